"""One deployment whose workers die in turn under a load, and the judge of what its clients saw.

Two prefills on one card and two decodes on another, so that every request can go on elsewhere.
Owns how a worker is killed while KV is under way to decode - decode stands still until an offer of
prefill's has no answer - and what a round of kills tells. Reuses the fault tests' fleet, clients
and judge; runs in a process of its own, for its clients need one. Knows no other deployment.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from baton_faults.fleet import HTTP, MODEL, Fleet, Start, fleet, wait_until
from baton_faults.history import endings, violations
from baton_faults.load import Ask, Clients, Load, Log
from baton_faults.nursery import Nursery
from baton_faults.steady import wait_served
from baton_worker.config import EngineConfig, SimConfig

N_OPEN, N_TEXTS, BETWEEN, WARM = 12, 24, 4, 24
"""Streams at a time; texts that they ask for; requests served between two kills; and before all."""
CHUNK, KV_BLOCKS, MAX_RUNNING, DRAFTS = 16, 1024, 16, 2
"""Small chunks: most prompts are pulled while they are computed."""
PACE = SimConfig(prefill_token_seconds=200e-6, decode_step_seconds=0.01)
KV_WAYS: dict[str, dict[str, bool]] = {
    "nvlink": {"share_kv": True},
    "nixl": {"nixl": True},
    "zmq": {},
}
"""What a local deployment is told of the ways of KV, if it knows them."""
IMPORTED = {
    "gpu": ("torch", "baton_worker.roles.process", "baton_worker.engine.backends.torch.device"),
    "cpu": ("paddle", "baton_worker.roles.process"),
    "sim": ("baton_worker.roles.process",),
}
"""What workers need and what touches no device, by engine."""
VICTIMS = (("decode-0", "prefill-0"), ("decode-1", "prefill-1"))
"""Who dies in a round, one after the other; each two come back at the same time."""
FREEZE_SECONDS, LOOK_SECONDS, MOST_TOLD = 5.0, 0.02, 5
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05},
)


class CellOptions(NamedTuple):
    """What a deployment is: `gpus`, of prefill and of decode, as CUDA_VISIBLE_DEVICES names them.

    `kv`: its way, of `KV_WAYS`; `kills`: how many there shall be; `until`: of the monotonic clock,
    when no round begins that would end behind it. `forks`: workers are forked from a process that
    has imported what they need.
    """

    number: int
    engine: str
    gpus: tuple[str, str]
    kv: str
    kills: int
    until: float
    forks: bool = True


def asks(seed: int) -> list[Ask]:
    """Return requests of many lengths, greedy and sampled, each with its tokens' logprobs."""
    found = []
    for number in range(N_TEXTS):
        n = 1 + seed * N_TEXTS + number
        prompt = tuple(8 + (n * 37 + i * (3 + number)) % 400 for i in range((5, 40, 120)[n % 3]))
        extra = CHOICES[number % len(CHOICES)] | {"seed": n, "logprobs": 1}
        found.append(Ask(prompt, (10, 30, 60)[number // 3 % 3], tuple(extra.items())))
    return found


def scored(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[int, ...]:
    """Return tokens with the bits of their logprobs, each as one number that a judge compares."""
    bits = [int.from_bytes(struct.pack("<d", value), "little") for value in logprobs]
    return tuple(token << 64 | of for token, of in zip(ids, bits, strict=True))


class ScoredClients(Clients):
    """Clients for whom a token is its id and the bits of its logprob."""

    def _take(self, stream: str, chunk: dict[str, Any]) -> str:
        for choice in chunk["choices"]:
            told = choice["logprobs"]["token_logprobs"] if choice["token_ids"] else []
            choice["token_ids"] = scored(choice["token_ids"], told)
        return super()._take(stream, chunk)


def undisturbed(running: Fleet, ask: Ask) -> tuple[int, ...]:
    """Return what a request is told while nobody dies."""
    body = ask.body(MODEL.name) | {"stream": False, "include_step_details": False}
    reply = HTTP.post(f"{running.url}/v1/completions", json=body)
    reply.raise_for_status()
    choice = reply.json()["choices"][0]
    return scored(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def placed(options: CellOptions, _: str, start: Start) -> Start:
    """Return how a process is started: which card it sees."""
    if options.engine != "gpu":
        return start
    seen = {"prefill": options.gpus[0], "decode": options.gpus[1]}.get(start.role, "")
    return replace(start, environment={"CUDA_VISIBLE_DEVICES": seen})


def path_here() -> dict[str, str]:
    """Return this process's environment, with its own modules to be found."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextlib.contextmanager
def deployment(options: CellOptions) -> Iterator[Fleet]:
    """Start two prefills, two decodes and a gateway."""
    engine = EngineConfig(
        device=options.engine,  # type: ignore[arg-type]
        sim=PACE if options.engine == "sim" else SimConfig(),
        kv_blocks=KV_BLOCKS,
        max_running=MAX_RUNNING,
        prefill_chunk_tokens=CHUNK,
    )
    nursery = Nursery(IMPORTED[options.engine], path_here()) if options.forks else None
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet(
            Path(folder), partial(placed, options), prefill=2, decode=2, engine=engine,
            num_speculative_tokens=DRAFTS, **KV_WAYS[options.kv], nursery=nursery,
        ) as running,
    ):  # fmt: skip
        yield running


class Cell:
    """A deployment and the texts that its clients must be told."""

    def __init__(self, options: CellOptions, running: Fleet) -> None:
        self._options, self._running = options, running
        self._asks = asks(options.number)
        with ThreadPoolExecutor(N_OPEN) as clients:
            texts = clients.map(partial(undisturbed, running), self._asks)
            self._texts = dict(zip(self._asks, texts, strict=True))

    def round(self) -> dict[str, Any]:
        """Kill every worker once under a load, let it end, and judge."""
        running = self._running
        clients = ScoredClients(running.url, MODEL.name, self._texts.__getitem__, Log())
        load = Load(clients, lambda n: self._asks[n % N_TEXTS], N_OPEN, WARM)
        load.start()
        kills: list[dict[str, Any]] = []
        starts = []
        for number, victims in enumerate(VICTIMS):
            for name in victims:
                wait_served(load, BETWEEN)
                kills.append(self._kill(name, under_way=number % 2 == self._options.number % 2))
            began = time.monotonic()
            running.start(*victims)
            starts.append(time.monotonic() - began)
            running.wait_usable()
        wait_served(load, BETWEEN)
        load.finish()
        return self._judged(load) | {"kills": kills, "start_seconds": starts}

    def _kill(self, name: str, under_way: bool) -> dict[str, Any]:
        """kill -9: anyhow, or while an offer of KV has no answer."""
        running = self._running
        other = "decode" + name.removeprefix("prefill").removeprefix("decode")
        open_offers = 0.0
        if under_way:
            decode = self._alive(other)
            running.freeze(decode)
            open_offers = self._wait_offers(name)
        running.kill(name)
        if under_way and decode != name:
            running.thaw(decode)
        return {"name": name, "role": name.partition("-")[0], "open_offers": open_offers}

    def _alive(self, decode: str) -> str:
        """Return this decode, or the other one where it has just been killed."""
        if self._running[decode].popen.poll() is None:
            return decode
        return next(name for names in VICTIMS for name in names
                    if name.startswith("decode") and name != decode)  # fmt: skip

    def _wait_offers(self, victim: str) -> float:
        """Wait until offers of prefill stay without an answer; 0 where none came in the time."""
        owners = [victim] if victim.startswith("prefill") else ["prefill-0", "prefill-1"]
        owners = [name for name in owners if self._running[name].popen.poll() is None]
        until, seen = time.monotonic() + FREEZE_SECONDS, 0.0
        while time.monotonic() < until:
            now = sum(self._running[o].metric("baton_handoff_open_offers") for o in owners)
            if now and seen:  # twice: one to the decode that goes on has its answer by now
                return now
            seen = now
            time.sleep(LOOK_SECONDS)
        return 0.0

    def _judged(self, load: Load) -> dict[str, Any]:
        """Return what clients saw, and what is left in workers that owe nobody anything."""
        log = load.log
        found = violations(log.events, log.wanted)
        gateway = self._running["gateway"]
        return {
            "served": load.served,
            "asked_again": load.asked_again,
            "ends": dict(endings(log.events)),
            "violations": dict(Counter(str(one.fault) for one in found)),
            "first": [str(one)[:300] for one in found[:MOST_TOLD]],
            "leaks": self._leaks(),
            "ended": self._running.ended(),
            "retries": gateway.metric("baton_gateway_retries_total"),
            "mismatches": gateway.metric("baton_gateway_overlap_mismatches_total"),
        }

    def _leaks(self) -> list[str]:
        """Return what workers still hold: requests, blocks, handoffs, pools of the dead."""
        running, found = self._running, []
        try:
            running.wait_empty()
        except AssertionError as error:
            found.append(str(error)[:300])
        for name in ("decode-0", "decode-1"):
            look = partial(running[name].metric, "baton_handoff_mapped_pools")
            try:
                wait_until(f"{name} maps the pools of two that live", look, lambda n: n <= 2)
            except AssertionError as error:
                found.append(str(error)[:300])
        return found


def _standing(options: CellOptions, stack: contextlib.ExitStack, told: Any) -> Fleet:
    """Start the deployment; without forks where those do not come to be ready."""
    try:
        return stack.enter_context(deployment(options))
    except Exception as error:
        if not options.forks:
            raise
        told.put((options.number, "plain", {"why": f"{type(error).__name__}: {error}"[:600]}))
        return stack.enter_context(deployment(options._replace(forks=False)))


def run(options: CellOptions, told: Any, leave: Any) -> None:
    """Serve and kill until all kills are done or no time is left; tell the parent of each round.

    Args:
        told: queue of (number, kind, what), in this order: "plain" where workers had to be started
            without a fork, a "ready", "round"s, a "done"; or "failed" at any time.
        leave: event before which nothing ends, so that all deployments stand at the same time.
    """
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            cell = Cell(options, _standing(options, stack, told))
            told.put((options.number, "ready", {"seconds": time.monotonic() - began}))
            n_kills, longest = 0, 0.0
            while n_kills < options.kills and time.monotonic() + 1.2 * longest < options.until:
                started = time.monotonic()
                record = cell.round()
                record |= {"cell": options.number, "seconds": time.monotonic() - started}
                longest = max(longest, record["seconds"])
                n_kills += len(record["kills"])
                told.put((options.number, "round", record))
            told.put((options.number, "done", {}))
            leave.wait()
    except BaseException as error:  # whatever it is, the parent has to know that this one is gone
        told.put((options.number, "failed", {"why": f"{type(error).__name__}: {error}"[:600]}))
        raise


def next_of(told: Any, seconds: float) -> tuple[int, str, dict[str, Any]] | None:
    """Return what a deployment tells next, None where that takes longer."""
    try:
        number, kind, what = told.get(timeout=max(seconds, 0.01))
    except queue.Empty:
        return None
    return number, kind, what
