"""Step records against the alternatives: bytes per step, and steps per second through a socket.

One thread encodes a step, sends it over loopback TCP, receives it and decodes it, a few messages in
flight. Contenders get the same columns and take turns, so that a busy machine is busy for all:

    raw       the record's bytes sent and received, nothing encoded: the ceiling
    baton     encode_step and decode_step, checks and both checksums included
    rows      the same, then one Python row per request
    fixed     the reference system's 530,444-byte struct (512 slots of 6 x 21 entries), filled and
              read by whole-array numpy operations, which is kinder to it than its own loops
    msgspec   one msgpack object per request, made from and read back to Python values

Ratios are of steps per second in this run, the best round of each. Before timing, every contender's
output is compared with the columns it was made from.

Run: python tests/bench/bench_records.py [--seconds 20] [--transport tcp|inproc] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from baton_worker.identity import Role
from baton_worker.records.columns import StepColumns
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.rows import rows

BATCHES = (1, 64, 512)
TOP_K = (0, 5, 20)
VOCAB = 103_424
IN_FLIGHT = 8
ROUNDS = 5
MEAN_ACCEPTED = (0.3, 0.4, 0.2, 0.1)
"""Chances of 1, 2, 3 and 4 tokens a row: 2.1 on average."""
LIMITS = Limits(vocab_size=VOCAB)
HEADER = StepHeader(
    epoch=1, seq=1, step_id=1, role=Role.DECODE, semantic_hash=1, sent_unix_ns=time.time_ns()
)

FIXED_SLOTS, FIXED_POSITIONS, FIXED_COLUMNS = 512, 6, 21
FIXED = np.dtype(
    [
        ("meta", "<i4", 3 + FIXED_SLOTS),
        (
            "slot",
            [
                ("token", "<i4", (FIXED_POSITIONS, FIXED_COLUMNS)),
                ("score", "<f4", (FIXED_POSITIONS, FIXED_COLUMNS)),
                ("rank", "<i4", FIXED_POSITIONS),
            ],
            FIXED_SLOTS,
        ),
    ]
)
FIXED_BYTES = 530_444


class RequestTokens(msgspec.Struct, array_like=True):
    """One request's share of a step, as msgspec carries it."""

    handle: int
    attempt: int
    position: int
    flags: int
    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]
    topk_tokens: list[list[int]]
    topk_logprobs: list[list[float]]
    n_proposed: int
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to carry a step; `check` says whether what came out equals what went in."""

    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]
    check: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape's result; rates are steps per second."""

    batch: int
    top_k: int
    tokens: int
    bytes: dict[str, int]
    rate: dict[str, float]


def make_columns(batch: int, k: int, rng: np.random.Generator) -> StepColumns:
    """Return a decode step of `batch` rows with top-k logprobs."""
    n = rng.choice(np.arange(1, 5), batch, p=MEAN_ACCEPTED).astype(np.uint8)
    tokens = int(n.sum())
    return StepColumns(
        handle=(np.uint64(7) << np.uint64(40)) + np.arange(batch, dtype=np.uint64),
        position=rng.integers(0, 1000, batch).astype(np.uint32),
        n_tokens=n,
        width=np.full(batch, k + 1, np.uint8),
        flags=np.zeros(batch, np.uint8),
        attempt=np.zeros(batch, np.uint8),
        token=rng.integers(0, VOCAB, tokens).astype(np.int32),
        logprob=-rng.random(tokens, np.float32),
        rank=rng.integers(1, 50, tokens).astype(np.int32),
        topk_token=rng.integers(0, VOCAB, tokens * k).astype(np.int32),
        topk_logprob=-rng.random(tokens * k, np.float32),
        n_proposed=np.full(batch, 3, np.uint8),
        n_accepted=n - np.uint8(1),
    )


def baton(columns: StepColumns) -> Contender:
    """Records as Baton sends them."""

    def check(decoded: StepColumns) -> bool:
        names = ("handle", "n_tokens", "token", "logprob", "rank", "topk_token", "topk_logprob")
        return all(np.array_equal(getattr(decoded, n), getattr(columns, n)) for n in names)

    return Contender(
        "baton",
        lambda: encode_step(columns, HEADER, limits=LIMITS),
        lambda frame: decode_step(frame, LIMITS)[1],
        check,
    )


def baton_rows(columns: StepColumns) -> Contender:
    """Records, read into one Python row per request."""
    expected = list(rows(columns))
    return Contender(
        "rows",
        lambda: encode_step(columns, HEADER, limits=LIMITS),
        lambda frame: list(rows(decode_step(frame, LIMITS)[1])),
        lambda found: bool(found == expected),
    )


def raw(columns: StepColumns) -> Contender:
    """Only the bytes."""
    frame = encode_step(columns, HEADER, limits=LIMITS)
    return Contender("raw", lambda: frame, lambda got: got, lambda got: bool(got == frame))


def fixed(columns: StepColumns, k: int) -> Contender:
    """The fixed struct; one static buffer is refilled, as the reference does."""
    assert FIXED.itemsize == FIXED_BYTES
    buffer = np.zeros((), FIXED)
    batch = columns.n_rows

    def encode() -> bytes:
        n = columns.n_tokens.astype(np.intp)
        slot = np.repeat(np.arange(batch), n)
        place = np.arange(len(slot)) - np.repeat(np.cumsum(n) - n, n)
        buffer["meta"][:3] = (1, 3 | (k + 1) << 8, batch)
        buffer["meta"][3 : 3 + batch] = n
        buffer["slot"]["token"][slot, place, 0] = columns.token
        buffer["slot"]["score"][slot, place, 0] = columns.logprob
        buffer["slot"]["rank"][slot, place] = columns.rank
        buffer["slot"]["token"][slot, place, 1 : k + 1] = columns.topk_token.reshape(
            len(columns.token), k
        )
        buffer["slot"]["score"][slot, place, 1 : k + 1] = columns.topk_logprob.reshape(
            len(columns.token), k
        )
        return buffer.tobytes()

    def decode(frame: bytes) -> tuple[np.ndarray, ...]:
        got = np.frombuffer(frame, FIXED)[0]
        width, count = int(got["meta"][1]) >> 8, int(got["meta"][2])
        n = got["meta"][3 : 3 + count].astype(np.intp)
        slot = np.repeat(np.arange(count), n)
        place = np.arange(len(slot)) - np.repeat(np.cumsum(n) - n, n)
        tokens = got["slot"]["token"][slot, place, :width]
        scores = got["slot"]["score"][slot, place, :width]
        return n, tokens, scores, got["slot"]["rank"][slot, place]

    def check(got: tuple[np.ndarray, ...]) -> bool:
        n, tokens, scores, ranks = got
        return (
            np.array_equal(n, columns.n_tokens)
            and np.array_equal(tokens[:, 0], columns.token)
            and np.array_equal(tokens[:, 1:].ravel(), columns.topk_token)
            and np.array_equal(scores[:, 0], columns.logprob)
            and np.array_equal(scores[:, 1:].ravel(), columns.topk_logprob)
            and np.array_equal(ranks, columns.rank)
        )

    return Contender("fixed", encode, decode, check)


def per_request(columns: StepColumns, k: int) -> Contender:
    """One msgspec object per request."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(list[RequestTokens])

    def objects() -> Iterator[RequestTokens]:
        topk_tokens = columns.topk_token.reshape(len(columns.token), k).tolist()
        topk_logprobs = columns.topk_logprob.reshape(len(columns.token), k).tolist()
        at = 0
        for row in rows(columns):
            end = at + len(row.tokens)
            yield RequestTokens(
                row.handle,
                row.attempt,
                row.position,
                row.flags,
                row.tokens,
                row.logprobs,
                row.ranks,
                topk_tokens[at:end] if k else [],
                topk_logprobs[at:end] if k else [],
                row.n_proposed,
                row.n_accepted,
            )
            at = end

    expected = list(objects())
    return Contender(
        "msgspec",
        lambda: encoder.encode(list(objects())),
        decoder.decode,
        lambda found: bool(found == expected),
    )


@contextmanager
def socket_pair(transport: str) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Yield a connected (PUSH, PULL) pair of this process."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        context.socket(zmq.PULL) as pull,
    ):
        for socket in (push, pull):
            socket.setsockopt(zmq.LINGER, 0)
        if transport == "tcp":
            port = pull.bind_to_random_port("tcp://127.0.0.1")
            push.connect(f"tcp://127.0.0.1:{port}")
        else:
            pull.bind("inproc://records")
            push.connect("inproc://records")
        yield push, pull


def cycle(
    contender: Contender, push: zmq.Socket[bytes], pull: zmq.Socket[bytes], seconds: float
) -> float:
    """Return steps per second over about `seconds`."""
    done = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not done:
        for _ in range(IN_FLIGHT):
            push.send(contender.encode())
        for _ in range(IN_FLIGHT):
            contender.decode(pull.recv())
        done += IN_FLIGHT
    return done / elapsed


def measure(batch: int, k: int, transport: str, seconds: float) -> Measured:
    """Check and time every contender on one shape, about `seconds` in all."""
    columns = make_columns(batch, k, np.random.default_rng(batch * 100 + k))
    contenders = [
        raw(columns),
        baton(columns),
        baton_rows(columns),
        fixed(columns, k),
        per_request(columns, k),
    ]
    for contender in contenders:
        if not contender.check(contender.decode(contender.encode())):
            raise SystemExit(f"{contender.name} does not carry batch {batch}, top-k {k} intact")
    rate = {contender.name: 0.0 for contender in contenders}
    share = seconds / (ROUNDS * len(contenders))
    with socket_pair(transport) as (push, pull):
        for _ in range(ROUNDS):
            for contender in contenders:
                found = cycle(contender, push, pull, share)
                rate[contender.name] = max(rate[contender.name], found)
    sizes = {contender.name: len(contender.encode()) for contender in contenders}
    return Measured(batch, k, len(columns.token), sizes, rate)


def table(results: list[Measured]) -> str:
    """Return the results for people."""
    lines = [
        "bytes per step                                    | steps per second",
        f"{'B':>4}{'k':>4}{'tokens':>8}{'baton':>9}{'fixed':>9}{'msgspec':>9}{'fixed/':>8} |"
        f"{'raw':>9}{'baton':>8}{'rows':>8}{'fixed':>8}{'msgspec':>9}"
        f"{'baton/raw':>11}{'/fixed':>8}{'/msgspec':>10}{'rows/msgspec':>14}",
    ]
    for r in results:
        size, rate = r.bytes, r.rate
        lines.append(
            f"{r.batch:>4}{r.top_k:>4}{r.tokens:>8}{size['baton']:>9,}{size['fixed']:>9,}"
            f"{size['msgspec']:>9,}{size['fixed'] / size['baton']:>7.0f}x |"
            f"{rate['raw']:>9,.0f}{rate['baton']:>8,.0f}{rate['rows']:>8,.0f}"
            f"{rate['fixed']:>8,.0f}{rate['msgspec']:>9,.0f}"
            f"{rate['baton'] / rate['raw']:>11.2f}{rate['baton'] / rate['fixed']:>7.1f}x"
            f"{rate['baton'] / rate['msgspec']:>9.1f}x{rate['rows'] / rate['msgspec']:>13.1f}x"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all shapes, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="in all")
    parser.add_argument("--transport", choices=("tcp", "inproc"), default="tcp")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    shapes = list(itertools.product(BATCHES, TOP_K))
    share = options.seconds / len(shapes)
    results = [measure(batch, k, options.transport, share) for batch, k in shapes]
    sys.stdout.write(table(results) + "\n")
    if options.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "transport": options.transport,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
