"""A worker over GPUs, two or four: it starts from a folder, says what one says, ends with a rank.

That its answers have the same bits in any company is asked of `gpu-qwen3-8b-12-2-ranks`, and of
`gpu-qwen3-8b-4-4-ranks`, in `test_the_same_bits_any_way_it_is_served`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Bench, Reader
from baton_testing.gpus import some_gpus, two_gpus
from baton_testing.pool_pair import OPTIONS, Pair, said
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.api import Handoff, RankDiedError
from baton_worker.engine.build import build_engine
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.sampling import SamplingParams

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-5
COUNT = 6


@pytest.fixture(autouse=True)
def needs_two_gpus() -> None:
    two_gpus()


def over(
    ranks: int, on_death: Any = lambda error: None, shared_dir: str = "", **engine: Any
) -> Any:
    config = ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        engine=EngineConfig(
            device="gpu",
            dtype="float32",
            tensor_parallel_size=ranks,
            max_model_len=256,
            max_running=8,
            prefill_chunk_tokens=64,
            kv_blocks=200,
            **engine,
        ),
        handoff=HandoffConfig(shared_dir=shared_dir),
    )
    return build_engine(config, on_rank_death=on_death)


def request(number: int, hand_over: bool = False) -> Submit:
    sampling = SamplingParams(
        max_tokens=40,
        temperature=0.8 * (number % 2),
        repetition_penalty=1.2 if number % 3 == 2 else 1.0,
        seed=number,
        ignore_eos=True,
    )
    return Submit(
        1 + number,
        0,
        prompt_token_ids=tuple(5 + (7 * number + j) % 60 for j in range(9 + 20 * number)),
        sampling=sampling,
        logprobs_k=2,
        decode=DecodeTarget("decode", "tcp://decode:1") if hand_over else None,
    )


def drained(engine: Any, reader: Reader) -> list[Handoff]:
    handoffs: list[Handoff] = []
    while engine.has_work():
        result = engine.step()
        reader.read(result)
        handoffs += result.handoffs
    return handoffs


def served(engine: Any) -> Reader:
    reader = Reader()
    for number in range(COUNT):
        engine.submit(request(number))
    drained(engine, reader)
    return reader


def first_rows(engine: Any) -> Any:
    while not len(rows := engine.step().columns.token):
        pass
    return rows


def near(ours: Reader, theirs: Reader) -> None:
    for number in range(COUNT):
        key = request(number).key
        mine, other = ours[key], theirs[key]
        assert mine.tokens == other.tokens
        np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    two_gpus()
    with closing(over(1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    two_gpus()
    with closing(over(2)) as engine:
        yield engine


def test_two_gpus_say_what_one_says(one: Any, two: Any) -> None:
    alone, together = served(one), served(two)
    near(together, alone)
    assert two.load().device.launched, "steps were counted"
    assert two.load().kv_blocks_used == 0


def test_four_gpus_say_what_one_says(one: Any) -> None:
    """Of the example's two KV heads each is two ranks' there."""
    some_gpus(4)
    with closing(over(4)) as four:
        near(served(four), served(one))
        assert four.load().kv_blocks_used == 0


def test_a_step_in_which_rank_0_stands_still_longer_than_the_limit_says_nothing() -> None:
    """In its last sums, with a step more to compute for rank 1, which gives up and goes on."""
    torch = pytest.importorskip("torch")
    with closing(over(2, stuck_seconds=10.0)) as engine:
        assert served(engine)[request(0).key].tokens
        collective = engine.model.team.collective
        even, cycles = collective.even, [8 * 2_000_000_000]

        def late() -> None:
            while cycles:
                torch.cuda._sleep(cycles.pop())
            even()

        collective.even = late
        engine.submit(request(0))
        told = r"rank 0 did not come to a sum within 5 s, as seen by rank 1"
        with pytest.raises(RankDiedError, match=told):
            first_rows(engine)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_a_handoff_is_whole_whatever_the_ranks(
    one: Any, two: Any, prefill: int, decode: int
) -> None:
    engines = {1: one, 2: two}
    alone, reader = served(one), Reader()
    first, second = engines[prefill], engines[decode]
    for number in range(COUNT):
        first.submit(request(number, hand_over=True))
    for handoff in drained(first, reader):
        first.release_handoff(handoff.state.key)
        second.admit_handoff(handoff)
    drained(second, reader)
    near(reader, alone)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
def test_kv_is_pulled_out_of_the_parts_of_ranks(
    one: Any, two: Any, prefill: int, decode: int
) -> None:
    """Rank 0 copies out of both GPUs' memory into both, whole blocks or rows of heads; each GPU has
    a rank of either worker. Two and two say bit for bit what two say.
    """
    with ExitStack() as stack:
        made = iter((prefill, decode))

        def make(reader: Reader | None = None, **_: Any) -> Bench:
            engine = over(next(made), shared_dir="/shared")
            return Bench(stack.enter_context(closing(engine)), reader or Reader())

        pair = Pair(make)
        prompt = tuple(5 + (7 * j) % 60 for j in range(190))
        keys = [pair.submit(number, prompt[number:]) for number in (1, 2, 3)]
        while pair.prefill.engine.has_work():
            for handoff in pair.compute():
                pair.offer(handoff)
        pair.finish()
        assert sum(pair.pulled()) == 3 * 12
        pair.check_nothing_is_left()
        alone = Bench({1: one, 2: two}[decode], Reader())
        for number, key in zip((1, 2, 3), keys, strict=True):
            told = OPTIONS | {"temperature": 0.9 * (number % 2), "seed": number}
            other = alone.submit(number, prompt[number:], **told)
            alone.drain()
            ours, theirs = said(pair.decode, key), said(alone, other)
            assert ours[0] == theirs[0]
            np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=TOLERANCE)
            if prefill == decode:
                assert ours == theirs


def test_a_rank_that_is_killed_ends_the_worker_by_name() -> None:
    told: list[Exception] = []
    noticed = threading.Event()

    def on_death(error: Exception) -> None:
        told.append(error)
        noticed.set()

    with closing(over(2, on_death)) as engine:
        (pid,) = engine.model.team.followers.pids
        for number in range(COUNT):
            engine.submit(request(number))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankDiedError, match="rank 1"):
            drained(engine, Reader())
        assert noticed.wait(60)
    assert str(told[0]) == f"tensor-parallel rank 1 (pid {pid}) was ended by SIGKILL"
