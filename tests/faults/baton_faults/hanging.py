"""A simulated worker whose steps can be made to hang, as a driver or a device does.

    python -m baton_faults.hanging FILE decode --config CONFIG

runs `baton-worker`; as long as FILE exists, no step comes back. Link, KV transport and probes are
other threads' work and go on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from baton_worker.engine.backends.sim import engine as sim
from baton_worker.engine.output.snapshot import StepSnapshot
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.step.in_flight import Mark
from baton_worker.main import main


def hang_while(switch: Path) -> None:
    """Let every step of this process wait while a file exists."""
    run = sim.PacedRunner.run

    def hanging(
        runner: sim.PacedRunner, plan: StepPlan, n_draft: int, mark: Mark = lambda n_layers: None
    ) -> StepSnapshot:
        while switch.exists():
            time.sleep(0.05)
        return run(runner, plan, n_draft, mark)

    sim.PacedRunner.run = hanging  # type: ignore[method-assign]


if __name__ == "__main__":
    hang_while(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
