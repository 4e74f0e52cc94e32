"""A worker that a defect ends looks like one that was killed, not like one that left in order.

What a gateway was doing there may be what broke it. A goodbye would let the same request go on to
the next worker, and to the one after that, for nothing speaks against it then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ControlConfig,
    CurveConfig,
    EngineConfig,
    HandoffConfig,
    HealthConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    dump_config,
)
from baton_worker.faults import EXIT_FAULT
from baton_worker.gateway.serving.failures import TREATMENTS, loss_of
from baton_worker.identity import make_handle
from baton_worker.link.api import WorkerDown, WorkerUp
from baton_worker.messages import Abort

WORKER = """
import sys
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.main import main
from baton_worker.roles.loop import WorkerLoop

def broken(*args):
    raise RuntimeError("a defect")

{place} = broken
sys.exit(main(["decode", "--config", sys.argv[1]]))
"""

DEFECTS = {
    "the engine's thread": "WorkerLoop._abort",
    "the link's thread": "ZmqWorkerLink._tell_command",
    "the KV transport's thread": "ZmqKvTransport._leave",
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("place", DEFECTS.values(), ids=DEFECTS)
def test_the_defect_counts_against_the_request_that_was_there(
    start_gateway: Callable, tmp_path: Path, place: str
) -> None:
    # Noticed by the end of the connection, or by the goodbye that there must not be.
    # A gateway that stood still for a moment gives as long to connections that ended too.
    gateway = start_gateway(dead_after_seconds=60.0)
    config = ProcessConfig(
        model=ModelConfig(str(TINY_MODEL)),
        worker_id="decode-0",
        engine=EngineConfig(device="sim"),
        link=LinkConfig(gateways=(gateway.link.endpoint,), curve=CurveConfig(enabled=False)),
        handoff=HandoffConfig(bind="tcp://127.0.0.1:0"),
        health=HealthConfig(host="127.0.0.1", port=0),
        control=ControlConfig(socket=str(tmp_path / "control")),
    )
    path = tmp_path / "decode.yaml"
    path.write_bytes(dump_config(config))
    with subprocess.Popen(
        [sys.executable, "-c", WORKER.format(place=place), str(path)],
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            gateway.log.wait_for(WorkerUp)
            assert gateway.link.send("decode-0", Abort(make_handle(77, 1), 0))
            [down] = gateway.log.wait_for(WorkerDown)
            said = worker.communicate(timeout=300)[1]
        finally:
            worker.kill()
    assert down.reason == "disconnected"
    assert TREATMENTS[loss_of(down.reason)].harms
    assert worker.returncode == EXIT_FAULT, said
    assert "a defect" in said
