"""What `bench_pair` is made of: tokens are counted, gaps are those that were scripted."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bench_pair
import page_pair
import pair_exact
import pair_parts
from bench_gateway import Load
from pair_deployments import KvWay, Processors, counted, handed_over_since
from pair_numbers import (
    capacity,
    gaps,
    poisson,
    quantile,
    queue_waits,
    ranks,
    second_gaps,
    tokens_between,
    waits,
)
from pair_report import Limit
from pair_sizes import SIZES as ALL_SIZES
from stream_clients import Ask, Clients, Notes, Served, Stream, together

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(n_tokens: int, counted: str = "token_logprobs") -> bytes:
    """One event of so many tokens, as the gateway writes it."""
    listed = {counted: [-1.5] * n_tokens, "text": f'"{counted}":[1,2]', "prompt_token_ids": [7, 8]}
    return b"data: " + json.dumps(listed, separators=(",", ":")).encode() + b"\n\n"


class Wire(asyncio.Transport):
    """What is written to it, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


async def read(script: Sequence[tuple[float, bytes]], counted: str = "logprobs") -> Notes:
    """Give a stream these bytes at these times; the request is sent at 10."""
    now = [10.0]
    notes = Notes([], [], [])
    stream = Stream(Ask(0, b"{}"), counted, notes, lambda: now[0])
    stream.connection_made(Wire())
    stream.send()
    for at, data in script:
        now[0] = at
        stream.data_received(data)
    stream.connection_lost(None)
    return notes


async def test_gaps_are_those_of_the_bytes_and_tokens_are_counted_not_chunks() -> None:
    three = event(3)
    script = [
        (10.25, HEAD + event(1)),
        (10.50, event(1) + event(1)),  # two events at once
        (11.00, three[:40]),  # an event in two pieces: it is there when its end is
        (11.50, three[40:]),
        (12.00, b": nothing to say\n\n"),
        (13.50, event(1) + DONE),
    ]
    served = together([await read(script)], 1)
    assert served.failures == []
    assert served.arrivals.totals(1).tolist() == [7]
    assert waits(served, [0]) == [0.25]
    assert waits(served, [0], 2) == [0.5]
    found = gaps(served.arrivals, [0], 0.0, math.inf)
    assert found.tolist() == [0.25, 0.0, 1.0, 0.0, 0.0, 2.0]
    assert gaps(served.arrivals, [0], 10.5, 11.5).tolist() == [1.0, 0.0, 0.0]
    assert tokens_between(served.arrivals, [0], 10.5, 11.5) == 3
    assert tokens_between(served.arrivals, None, 0.0, 11.5) == 6


async def test_tokens_without_logprobs_are_counted_by_their_ids_and_not_the_prompts() -> None:
    script = [(11.0, HEAD + event(2, "token_ids")), (12.0, event(1, "token_ids") + DONE)]
    served = together([await read(script, "ids")], 1)
    assert served.arrivals.totals(1).tolist() == [3]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([b"HTTP/1.1 429 Too Many\r\n\r\n", b'{"error":{}}'], "429"),
        ([b"HTTP/1.1 4", b"00 Bad\r\n\r\nno"], "400"),
        ([HEAD + event(1), b'data: {"error":{"code":"worker_lost"}}\n\n'], "worker_lost"),
        ([HEAD + event(1)], "the connection ended"),
    ],
)
async def test_a_stream_that_fails_says_why_once(script: list[bytes], said: str) -> None:
    notes = await read([(11.0, data) for data in script])
    (failure,) = notes.failures
    assert failure.startswith("request 0: ")
    assert said in failure


async def test_a_status_line_in_pieces_and_a_text_that_says_error_are_no_failure() -> None:
    told = b'data: {"token_logprobs":[-1.0],"top_logprobs":[{"error":-1.0}]}\n\n'
    notes = await read([(11.0, HEAD[:6]), (11.1, HEAD[6:] + told), (11.2, DONE)])
    assert notes.failures == []
    assert [count for _, _, count in notes.tokens] == [1]


def script_of(*streams: tuple[float, list[float]]) -> Served:
    """What clients saw: each stream sent at a time, a token at each of others."""
    tokens = [(at, n, 1) for n, (_, times) in enumerate(streams) for at in times]
    sent = [(at, n) for n, (at, _) in enumerate(streams)]
    return together([Notes(tokens, sent, [], 0.25)], len(streams))


def test_a_request_that_got_no_token_waits_for_ever_and_bounds_no_quantile() -> None:
    served = script_of((0.0, [1.0]), (0.0, []))
    assert waits(served, [0, 1]) == [1.0, math.inf]
    told = quantile(waits(served, [0, 1]), 0.99)
    assert told["value"] is None
    assert json.dumps(told, allow_nan=False)


def test_a_quantile_lies_between_draws_that_are_known() -> None:
    assert ranks(20, 0.5) == (6, 15), "as tables of the sign test have it"
    assert ranks(5, 0.5) == (0, 6), "five draws do not bound a median 19 times in 20"
    low, high = ranks(56, 0.99)
    assert low > 50
    assert high == 57
    told = quantile(range(1, 21), 0.5)
    assert told == {"value": 10.0, "low": 6.0, "high": 15.0, "n": 20}


@pytest.mark.parametrize(("n", "share"), [(20, 0.5), (100, 0.9), (2000, 0.99)])
def test_a_quantile_lies_there_as_often_as_is_said(n: int, share: float) -> None:
    rng = np.random.default_rng(1)
    low, high = ranks(n, share)
    drawn = np.sort(rng.random((4000, n)), axis=1)
    inside = (drawn[:, low - 1] <= share) & (share < drawn[:, high - 1])
    assert inside.mean() > 0.94


def test_gaps_of_a_step_count_as_one_draw() -> None:
    values = np.repeat(np.arange(1, 21), 64)
    assert quantile(values, 0.5, 64) == {"value": 10.0, "low": 6.0, "high": 15.0, "n": 20 * 64}


def test_prompts_arrive_at_their_rate_and_each_time_alike() -> None:
    times = poisson(5.0, 2000.0, 3)
    assert times == poisson(5.0, 2000.0, 3)
    assert times == sorted(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert np.diff(times).std() == pytest.approx(0.2, rel=0.05), "as of chance, not even"


def test_a_capacity_is_that_of_all_prompts_even_if_their_first_tokens_come_together() -> None:
    served = script_of((1.0, [2.0, 9.0]), (1.5, [3.0]), (1.5, [3.0]))
    assert capacity(served, 3, 100) == 150.0


SIZES = ALL_SIZES["tiny"]._replace(streams=2, skip=1, lead=2.0, window=4.0)


def test_steady_numbers_are_of_the_window_in_which_prompts_arrive() -> None:
    even = [0.5 * n for n in range(1, 20)]
    held_up = [0.5, 1.0, 1.5, 2.0, 2.5, 5.5, 6.0, 6.5]
    served = script_of((0.0, even), (0.0, held_up), (3.0, [3.25, 9.0]), (4.0, []))
    found = pair_parts.steady_numbers(served, SIZES, 2)
    assert found["seconds"] == 4.0
    assert found["gap_most"] == 3.0
    assert found["gap_p50"]["value"] == 0.5
    assert found["gap_p50"]["n"] == 8 + 3
    assert found["together"] == 0.0
    assert found["steady_tokens_per_s"] == 11 / 4
    assert found["tokens_per_s"] == 12 / 4
    assert (found["prompts"], found["unserved"]) == (2, 1)
    assert found["ttft_p50"]["value"] == 0.25
    assert found["client_busy"] == 0.25


def test_a_stall_that_brings_many_tokens_at_once_is_told_beside_the_gaps() -> None:
    stalled = [0.5, 1.0, *[4.0] * 199, 4.5, 5.0]
    found = pair_parts.steady_numbers(
        script_of((0.0, stalled), (0.0, stalled), (3.0, [3.5])), SIZES, 1
    )
    assert found["gap_p99"]["value"] == 0.5
    assert found["together"] == 198 / 201
    assert found["pause_p99"]["value"] == 3.0


def test_second_tokens_are_counted_from_the_first_of_the_same_request() -> None:
    served = script_of((0.0, [2.0, 2.25, 9.0]), (1.0, [3.0]), (1.5, []), (1.5, [4.0, 5.0]))
    assert second_gaps(served.arrivals, range(4)) == [0.25, 1.0]


def test_a_window_ends_with_the_first_stream_that_has_no_more_to_say() -> None:
    long, short = [0.5 * n for n in range(1, 20)], [0.5, 1.0, 2.5, 3.0]
    served = script_of((0.0, long), (0.0, short), (2.0, [2.5]))
    assert pair_parts.steady_numbers(served, SIZES, 1)["seconds"] == 1.0


def test_streams_that_never_ran_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ran together for -1\.00 s"):
        pair_parts.steady_numbers(script_of((0.0, [0.5, 1.0]), (0.0, [0.5, 1.0])), SIZES, 0)
    with pytest.raises(ValueError, match="a stream had 0 tokens"):
        pair_parts.steady_numbers(script_of((0.0, [0.5, 9.0]), (0.0, [])), SIZES, 0)


def test_a_first_token_is_later_by_the_difference_of_the_same_prompt() -> None:
    pair = [(1.25 + n, 3.25 + n, 3.5 + n, 4.0 + n) for n in range(20)]
    mixed = [(1.0 + n, 2.0 + n, 2.5 + n, 3.0 + n) for n in range(20)]
    found = pair_parts.first_tokens(512, pair, mixed)
    assert found["difference"]["value"] == 0.25
    assert found["second_difference"]["value"] == 1.25
    assert found["handed_over"]["value"] == 1.0, "what the first token is later by is not in it"
    assert found["mixed"]["first"]["value"] == 10.0
    assert [gap["value"] for gap in found["pair"]["between"]] == [2.0, 0.25, 0.5]


def test_a_line_without_a_pause_is_that_of_a_queue() -> None:
    assert queue_waits([0.0, 0.5, 4.0], 1.0, 1) == [1.0, 1.5, 1.0]
    assert queue_waits([0.0, 0.5, 0.5, 4.0], 1.0, 2) == [1.0, 1.0, 1.5, 1.0]
    times = poisson(0.7, 20_000.0, 1)
    mean = float(np.mean(queue_waits(times, 1.0, 1)))
    assert mean == pytest.approx(1 + 0.7 / (2 * 0.3), rel=0.05), "as Pollaczek and Khinchin have it"


def test_a_way_of_kv_is_known_by_name_or_told_with_its_flags() -> None:
    assert KvWay.of("nvlink") == ("nvlink", ("--share-kv",))
    assert KvWay.of("zmq") == ("zmq", ())
    assert KvWay.of("other=--one --two 3") == ("other", ("--one", "--two", "3"))
    with pytest.raises(ValueError, match="'wire' is none of nvlink, nixl, zmq, nor NAME=FLAGS"):
        KvWay.of("wire")


@pytest.mark.parametrize(("model", "card_bytes", "layers"), [("qwen3-8b", 80e9, 36)])
def test_what_stands_on_a_card_at_a_time_fits_one_of_80_gb(
    model: str, card_bytes: float, layers: int
) -> None:
    """Weights of 16.8 GB with a draft layer, and 2 GB a worker for what is neither they nor KV."""
    block, worker, sizes = 2 * (layers + 1) * 8 * 16 * 128 * 2, 16.8e9 + 2e9, ALL_SIZES[model]
    pairs_beside_a_mixed = 3 * worker + block * (2 * sizes.idle_blocks + sizes.exact_blocks)
    compared = 2 * worker + block * 2 * sizes.exact_blocks
    under_load = worker + block * sizes.blocks(wide=True)
    assert max(pairs_beside_a_mixed, compared, under_load) < card_bytes


def test_a_wide_phase_needs_every_token_of_every_stream() -> None:
    wide = Load(2, 1, 4, 1, 2)
    each = (0.0, [1.0, 2.0, 3.0, 4.0])
    assert pair_parts.wide_phase(script_of(each, each), wide).tokens_per_s == 2.0
    at_once = (0.0, [1.0] * 4)
    with pytest.raises(ValueError, match="the phase took no time"):
        pair_parts.wide_phase(script_of(at_once, at_once), wide)
    with pytest.raises(ValueError, match="1 streams have not 4 tokens"):
        pair_parts.wide_phase(script_of(each, (0.0, [1.0])), wide)


PLAIN = """# TYPE baton_handoff_transfer_seconds histogram
baton_handoff_transfer_seconds_bucket{le="+Inf"} 4
baton_handoff_transfer_seconds_count{model="x"} 4
baton_handoff_transfer_seconds_sum{model="x"} 2
# TYPE baton_handoff_sent_bytes counter
baton_handoff_sent_bytes_total{model="x"} 6000
"""
LABELLED = """# TYPE baton_handoff_transfer_seconds histogram
baton_handoff_transfer_seconds_bucket{transport="zmq",le="+Inf"} 1
baton_handoff_transfer_seconds_count{transport="zmq"} 1
baton_handoff_transfer_seconds_sum{transport="zmq"} 0.5
baton_handoff_transfer_seconds_bucket{transport="nvlink",le="+Inf"} 3
baton_handoff_transfer_seconds_count{transport="nvlink"} 3
baton_handoff_transfer_seconds_sum{transport="nvlink"} 1.5
# TYPE baton_handoff_sent_bytes counter
baton_handoff_sent_bytes_total 9000
# TYPE baton_handoff_delivered_bytes counter
baton_handoff_delivered_bytes_total{transport="zmq"} 1000
baton_handoff_delivered_bytes_total{transport="nvlink"} 5000
baton_handoff_delivered_bytes_total{transport="shm"} 0
# TYPE baton_handoff_places_held_up counter
baton_handoff_places_held_up_total{reason="bytes"} 3
baton_handoff_places_held_up_total{reason="slots"} 0
# TYPE baton_engine_kv_pulled_blocks counter
baton_engine_kv_pulled_blocks_total{when="ahead"} 9
baton_engine_kv_pulled_blocks_total{when="behind"} 1
"""


def test_handoffs_are_summed_over_labels_and_bytes_are_told_by_transport() -> None:
    for text, ways in ((PLAIN, {"untold": 6000.0}), (LABELLED, {"zmq": 1e3, "nvlink": 5e3})):
        found = handed_over_since({}, counted(text))
        assert (found["count"], found["transfer_seconds"]) == (4.0, 2.0)
        assert found["bytes_by_transport"] == ways
        assert (found["bytes"], found["bytes_per_s"]) == (6000.0, 3000.0)
    now = counted(LABELLED)
    assert handed_over_since({}, now)["held_up"] == {"bytes": 3.0}
    assert handed_over_since({}, now)["pulled_blocks"] == {"ahead": 9.0, "behind": 1.0}
    assert handed_over_since(now, now)["bytes_per_s"] is None, "nothing was handed over since"


def test_clients_have_processors_of_their_own_where_there_are_many() -> None:
    assert Processors.of(range(32), 4) == (tuple(range(28, 32)), tuple(range(28)))
    assert Processors.of([1, 0], 4) == ((), (0, 1))


def test_a_part_that_fails_is_told_and_costs_the_others_nothing(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--engine", "cpu", "--json", str(tmp_path / "x.json")]
    report = bench_pair.report_of(bench_pair.parsed(words))
    with report.part("first"):
        report.add("exact", {"k": 0})
        raise RuntimeError("gone")
    with report.part("second"):
        report.add("exact", {"k": 1})
    with report.part("third"):
        Limit(-1.0).need(5.0, "a round")
    told = json.loads((tmp_path / "x.json").read_text())
    assert [one["k"] for one in told["exact"]] == [0, 1]
    assert told["unmeasured"][0] == "first: RuntimeError: gone"
    assert told["unmeasured"][1].startswith("third: OutOfTime: a round takes 5 s")


def choice(logprob: float = -1.5, rank: int = 1) -> dict[str, Any]:
    return {
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [logprob, -2.0], "top_logprobs": [{"a": -1.0}, None]},
        "finish_reason": "length",
        "step_details": [{"ranks": [rank]}, {"ranks": [2]}],
        "prompt_logprobs": [None, {"7": {"logprob": -3.0, "rank": 4}}],
    }


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (choice(logprob=-1.5000001), "logprobs[0]"),
        (choice(rank=2), "ranks[0]"),
        (choice() | {"token_ids": [5, 7]}, "tokens[1]"),
        (choice() | {"prompt_logprobs": None}, "prompt: 0 and 1"),
    ],
)
def test_an_answer_that_differs_by_a_bit_is_found(other: dict[str, Any], where: str) -> None:
    said = [pair_exact.said_of(one) for one in (choice(), choice())]
    assert pair_exact.compared(said, said, "x")["differ"] == 0
    found = pair_exact.compared([said[0], pair_exact.said_of(other)], said, "K = 1")
    assert (found["requests"], found["tokens"], found["differ"]) == (2, 4, 1)
    assert f"K = 1, request 1: {where}" in found["first"][0]
    more = found | {"k": 1, "greedy": 1, "accepted_drafts": 2.0, "bytes": 3.0, "by_decode": 1.0}
    both = pair_exact.added(more, more)
    assert (both["requests"], both["differ"], both["bytes"], both["k"]) == (4, 2, 6.0, 1)
    assert both["by_decode"] == 2.0
    assert both["first"] == found["first"] * 2


def test_requests_of_every_kind_are_asked_for_over_http() -> None:
    bodies = [pair_exact.body(ask) for ask in pair_exact.asks(77, 512, 40, 8)]
    assert {body.get("logprobs") for body in bodies} >= {None, 0, 5, 20}
    assert {body["temperature"] for body in bodies} >= {0.0, 0.9}
    for name in ("prompt_logprobs", "logprobs_mode", "temp_scaled_logprobs",
                 "top_p_normalized_logprobs", "logit_bias", "presence_penalty"):  # fmt: skip
        assert any(name in body for body in bodies)
    assert json.dumps(bodies)


async def _scripted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer by what the body asks for: so many tokens in one event each, 429, or an early end."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.rpartition(b"content-length: ")[2])
    asked = json.loads(await reader.readexactly(size))
    if "refuse" in asked:
        writer.write(b'HTTP/1.1 429 Busy\r\n\r\n{"error":{}}')
    else:
        writer.write(HEAD + b"".join(event(n) for n in asked["events"]))
        writer.write(b"" if "dies" in asked else DONE)
    await writer.drain()
    writer.close()


@pytest.fixture
def scripted_port() -> Iterator[int]:
    """Of a server in a thread."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_scripted, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.e2e
def test_clients_count_what_a_server_sends_and_name_what_it_refuses(scripted_port: int) -> None:
    bodies: list[dict[str, Any]] = [{"events": [1] * n + [n]} for n in range(1, 6)]
    bodies += [{"refuse": True}, {"events": [2], "dies": True}]
    delays = [0.0, 0.0, 0.0, 0.01, 0.02, 0.0, 0.0]
    with Clients(scripted_port, 2) as clients:
        for _ in range(2):
            served = clients.serve(bodies, delays)
            assert served.arrivals.totals(7).tolist() == [2, 4, 6, 8, 10, 0, 2]
            assert sorted(line[:10] for line in served.failures) == ["request 5:", "request 6:"]
            assert all(wait >= 0 for wait in waits(served, range(5)))
        with pytest.raises(ValueError, match="2 streams failed"):
            clients.run(bodies)


@pytest.mark.e2e
def test_a_run_measures_its_parts_and_makes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose numbers take no window of time: a busy machine may miss that of the others."""
    results = tmp_path / "benchmarks" / "results" / "x.json"
    words = ["--model", "tiny", "--engine", "cpu", "--chunks", "64", "32", "--clients", "1"]
    words += ["--only", "ttft", "exact", "--kv", "nvlink", "zmq", "--seconds", "3000"]
    monkeypatch.setattr(sys, "argv", ["bench_pair.py", *words, "--json", str(results)])
    code = bench_pair.main()
    told = json.loads(results.read_text())
    assert told["unmeasured"] == []
    assert code == 0
    assert [(one["prompt"], one["chunk"]) for one in told["ttft"]] == [
        (32, 64), (32, 32), (256, 64), (256, 32),
    ]  # fmt: skip
    pulled = [one["handoff"]["pulled_blocks"] for one in told["ttft"]]
    # Decode's count: a request may end, and be aborted at prefill, before prefill has its word.
    sizes = (2, 2, 16, 16)
    assert all(sum(of.values()) >= 3 * n for of, n in zip(pulled, sizes, strict=True))
    # Of one size's few requests a slow machine may read none ahead.
    assert sum(of["ahead"] for of in pulled[2:]) > 0
    whole = [(kv, k, 24, 0) for kv in ("nvlink", "zmq") for k in (3, 2, 1, 0)]
    found = [(one["kv"], one["k"], one["requests"], one["differ"]) for one in told["exact"]]
    assert found == whole
    assert told["exact"][0]["accepted_drafts"] > 0
    assert 0 < told["exact"][0]["greedy"] < 24
    ways = [{way for one in told["exact"] if one["kv"] == kv for way in one["ways"]} for kv in
            ("nvlink", "zmq")]  # fmt: skip
    assert ways == [{"shm"}, {"zmq"}]
    page_pair.main([str(results), str(tmp_path)])
    assert "## The same bits" in (tmp_path / "benchmarks" / "several-gpus.md").read_text()
