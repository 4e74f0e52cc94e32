"""Deployments that are measured against each other: how they are started, and what they count.

Owns flags, processors and metrics. Knows no measurement.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from stream_clients import Clients

from baton_testing.local_deployment import Deployment, start
from baton_testing.processes import HTTP, metric, wait_until
from baton_worker.control import run_control

KV_FLAGS = {"nvlink": ("--share-kv",), "nixl": ("--nixl",), "zmq": ()}
"""What `baton-worker local` is told of the ways of KV, if it knows them; others are named with
their flags."""
MANY_PROCESSORS = 16
"""With fewer, clients get none of their own: workers need them more."""
HANDOFF_SECONDS = {
    "seconds": "baton_handoff_seconds_sum",
    "transfer_seconds": "baton_handoff_transfer_seconds_sum",
    "import_seconds": "baton_handoff_import_seconds_sum",
    "count": "baton_handoff_transfer_seconds_count",
    "place_seconds": "baton_handoff_place_seconds_sum",
    "places": "baton_handoff_place_seconds_count",
}
HANDOFF_BYTES = ("baton_handoff_delivered_bytes_total", "baton_handoff_sent_bytes_total")
"""KV handed over, told by transport; or, of a worker that does not tell it so, what was sent."""
UNTOLD = "untold"
STILL_AT_WORK = ("baton_live_requests", "baton_handoff_open_offers")
HELD_UP = "baton_handoff_places_held_up_total"
"""Requests that got no place at once, by reason: prefill does not compute them before."""

HELP_FLAG = "--decode-prompt-chunk"
OWN_PROMPTS = "baton_handoff_own_prompts_total"
"""Prompts that decode computed, all of them."""

PULLED = "baton_engine_kv_pulled_blocks_total"
"""Blocks that decode read in prefill's pool: there before their offers, or not."""


class Way(NamedTuple):
    """A way to serve: how many workers of each role, and what they are told."""

    name: str
    prefill: int
    decode: int
    mixed: int
    chunk: int
    kv_blocks: int
    max_running: int
    drafts: int = 0
    more: tuple[str, ...] = ()
    gateways: int = 1

    @property
    def workers(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.mixed

    @property
    def helps(self) -> bool:
        """Whether decode computes prompts while prefill's line is long."""
        return HELP_FLAG in self.more

    def flags(self, model: Path, engine: str, gpus: str) -> list[str]:
        """Return what `baton-worker local` is told."""
        told = {
            "model": model,
            "engine": engine,
            "prefill": self.prefill,
            "decode": self.decode,
            "mixed": self.mixed,
            "gateways": self.gateways,
            "num-speculative-tokens": self.drafts,
            "kv-blocks": self.kv_blocks,
            "max-running": self.max_running,
            "prefill-chunk": self.chunk,
        } | ({"gpus": gpus} if gpus else {})
        return [word for name, value in told.items() for word in (f"--{name}", str(value))] + [
            *self.more
        ]


class KvWay(NamedTuple):
    """A way of KV, and what `baton-worker local` is told of it."""

    name: str
    flags: tuple[str, ...]

    @classmethod
    def of(cls, words: str) -> KvWay:
        """Return a way that is known by its name, or of NAME=FLAGS.

        Raises:
            ValueError: it is neither.
        """
        name, given, flags = words.partition("=")
        if not given and name not in KV_FLAGS:
            raise ValueError(f"{words!r} is none of {', '.join(KV_FLAGS)}, nor NAME=FLAGS")
        return cls(name, tuple(flags.split()) if given else KV_FLAGS[name])


class Processors(NamedTuple):
    """Which processors clients have for themselves, none on a machine of few; workers the rest."""

    clients: tuple[int, ...]
    workers: tuple[int, ...]

    @classmethod
    def of(cls, available: Sequence[int], clients: int) -> Processors:
        """Give the last ones to clients."""
        ordered = tuple(sorted(available))
        if len(ordered) < MANY_PROCESSORS:
            return cls((), ordered)
        return cls(ordered[-clients:], ordered[:-clients])


class Serving:
    """A deployment and its clients; only one of those that run is at work at a time."""

    def __init__(self, way: Way, deployment: Deployment, clients: Clients) -> None:
        self.way, self.deployment, self.clients = way, deployment, clients

    @property
    def processes(self) -> list[dict[str, str]]:
        """The newest readiness line of each process; a worker's control socket is its own, and
        nobody here restarts a gateway.
        """
        newest = {line["control"] or line["pid"]: line for line in self.deployment.lines}
        return list(newest.values())

    @property
    def workers(self) -> list[dict[str, str]]:
        """Those of the workers."""
        return [line for line in self.processes if line["role"] != "gateway"]

    @property
    def pids(self) -> dict[str, list[int]]:
        """Of the processes, by role, clients' too."""
        found = {"clients": self.clients.pids}
        for line in self.processes:
            found.setdefault(line["role"], []).append(int(line["pid"]))
        return found

    def wait_idle(self) -> None:
        """Wait until no process has a request; who leaves prefill has been counted before."""
        for line in self.processes:
            for name in STILL_AT_WORK:
                look = partial(metric, line["metrics_url"], name)
                wait_until(f"{line['role']} has no {name}", look, lambda left: left == 0)

    def handed_over(self) -> dict[str, float]:
        """Return what is counted of handoffs: seconds, bytes by transport, who was held up."""
        self.wait_idle()
        found: dict[str, float] = {}
        for line in self.workers:
            if line["role"] in ("prefill", "decode"):
                for name, value in counted(HTTP.get(line["metrics_url"]).text).items():
                    found[name] = found.get(name, 0.0) + value
        return found

    def own_prompts(self) -> float:
        """Return how many prompts decode has computed so far."""
        of_decode = [line for line in self.workers if line["role"] == "decode"]
        return sum(metric(line["metrics_url"], OWN_PROMPTS) for line in of_decode)

    def speculate(self, k: int) -> None:
        """Order another K from every worker."""
        for line in self.workers:
            with contextlib.redirect_stdout(io.StringIO()):
                code = run_control(line["control"], "speculative", k)
            if code:
                raise RuntimeError(f"{line['role']} does not take K = {k}")

    def accepted(self) -> float:
        """Return how many drafts were accepted so far."""
        name = "baton_draft_accepted_tokens_total"
        return sum(metric(line["metrics_url"], name) for line in self.workers)


def counted(text: str) -> dict[str, float]:
    """Return what a worker's metrics say of handoffs; bytes are `bytes:TRANSPORT`, and requests
    that were held up `held_up:REASON`; blocks that decode read are `pulled:WHEN`.

    Labels are summed over, but for these.
    """
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    found = {
        name: sum(s.value for s in samples if s.name == of) for name, of in HANDOFF_SECONDS.items()
    }
    for of in HANDOFF_BYTES:
        some = [s for s in samples if s.name == of]
        for sample in some:
            name = f"bytes:{sample.labels.get('transport', UNTOLD)}"
            found[name] = found.get(name, 0.0) + sample.value
        if some:
            break
    found |= {f"held_up:{s.labels['reason']}": s.value for s in samples if s.name == HELD_UP}
    return found | {f"pulled:{s.labels['when']}": s.value for s in samples if s.name == PULLED}


def handed_over_since(before: dict[str, float], after: dict[str, float]) -> dict[str, object]:
    """Return the handoffs between two looks: count, seconds, bytes by transport, and the rate."""
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    by_transport, held_up = _by_label(moved, "bytes:"), _by_label(moved, "held_up:")
    n_bytes, seconds = sum(by_transport.values()), moved.get("transfer_seconds", 0.0)
    return {name: moved.get(name, 0.0) for name in HANDOFF_SECONDS} | {
        "bytes": n_bytes,
        "bytes_by_transport": by_transport,
        "held_up": held_up,
        "pulled_blocks": _by_label(moved, "pulled:"),
        "bytes_per_s": n_bytes / seconds if seconds else None,
    }


def _by_label(moved: dict[str, float], kind: str) -> dict[str, float]:
    return {
        name.removeprefix(kind): value
        for name, value in moved.items()
        if name.startswith(kind) and value
    }


@contextlib.contextmanager
def serving(way: Way, flags: Sequence[str], clients: int, on: Processors) -> Iterator[Serving]:
    """Start a deployment on the workers' processors, and its clients on theirs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, on.workers)  # of this thread, and so of what it starts
    try:
        with start(*flags) as deployment:
            os.sched_setaffinity(0, before)
            deployment.wait_lines(way.gateways + way.workers)
            port = int(deployment.url.rpartition(":")[2])
            with Clients(port, clients, on.clients) as readers:
                yield Serving(way, deployment, readers)
    finally:
        os.sched_setaffinity(0, before)


def all_of(
    stacks: Sequence[ExitStack], contexts: Sequence[AbstractContextManager[Serving]]
) -> list[Serving]:
    """Enter contexts side by side; each that was entered ends with its stack."""
    with ThreadPoolExecutor(len(contexts)) as threads:
        entering = [threads.submit(context.__enter__) for context in contexts]
    failures = [one.exception() for one in entering]
    for stack, context, failure in zip(stacks, contexts, failures, strict=True):
        if failure is None:
            stack.push(context)
    for failure in failures:
        if failure is not None:
            raise failure
    return [one.result() for one in entering]
