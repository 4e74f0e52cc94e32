"""A process whose KV pool others read by NIXL: `python -m baton_testing.nixl_owner SHAPE`.

Says its introduction (base64, a line), then does what it is told, a line each, and says so:
`fill SEED`, `spoil BLOCK`, `lend` (answers slot and serial), `end SLOT`.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np

from baton_testing.processes import stand_still
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff.nixl_agent import NixlAgent
from baton_worker.handoff.nixl_visits import NixlVisits
from baton_worker.handoff.nixl_words import Introduction


def values(shape: KvShape, seed: int) -> list[np.ndarray[Any, Any]]:
    """Return what a pool holds that was filled: K and V of each layer in turn."""
    rng = np.random.default_rng(seed)
    forms = shape.arrays(shape.n_blocks + 2)
    return [rng.standard_normal(form.shape, np.float32) for form in forms]


class Owner:
    """Such a process, as the one that started it has it.

    Args:
        under: words to run it under: namespaces, say.
        environment: what it gets beside this process's.
    """

    def __init__(
        self, shape: KvShape, under: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> None:
        sizes = [shape.n_layers, shape.kv_heads, shape.block_size, shape.head_dim, shape.n_blocks]
        command = [*under, sys.executable, "-m", "baton_testing.nixl_owner", *map(str, sizes)]
        path = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        )
        self.words = msgspec.msgpack.decode(base64.b64decode(self._heard()), type=Introduction)

    def say(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._heard()

    def lend(self) -> tuple[int, int]:
        slot, serial = map(int, self.say("lend").split())
        return slot, serial

    def kill(self) -> None:
        """kill -9, frozen or not."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def freeze(self) -> None:
        stand_still(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _heard(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner ended"
        return line.strip()


def main() -> None:
    """Share a pool, and obey."""
    sizes = list(map(int, sys.argv[1:]))
    shape = KvShape(*sizes)
    pool, leases, pool_id = KvPool(shape, is_shared=True), Leases(256), os.urandom(16)
    agent = NixlAgent(pool_id.hex(), is_rdma_only=False)
    assert pool.sharing is not None
    agent.register(pool.sharing.region)
    visits = NixlVisits(agent, pool_id, "prefill-0", shape, pool.sharing, leases)
    print(base64.b64encode(msgspec.msgpack.encode(visits.words)).decode(), flush=True)
    for line in sys.stdin:
        print(_obeyed(line.split(), pool, leases), flush=True)


def _obeyed(words: list[str], pool: KvPool, leases: Leases) -> str:
    match words:
        case ["fill", seed]:
            arrays = values(pool.shape, int(seed))
            for own, some in zip(
                (pool.keys, pool.values), (arrays[::2], arrays[1::2]), strict=True
            ):
                for array, new in zip(own, some, strict=True):
                    array[:] = new
        case ["spoil", block]:
            pool.values[-1][int(block)] = np.nan
        case ["lend"]:
            lease = leases.begin()
            return f"{lease.slot} {lease.serial}"
        case ["end", slot]:
            leases.end(int(slot))
        case _:
            raise ValueError(f"{words} is no order")
    return "done"


if __name__ == "__main__":
    main()
