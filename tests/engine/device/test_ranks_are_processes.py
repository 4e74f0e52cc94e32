"""A worker whose ranks are processes: they meet, serve, and never outlive one of them.

The real thing but for the GPUs: processes, pipes, descriptors and shared memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from baton_testing import numpy_ranks
from baton_testing.engine_bench import Bench, Reader
from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_rank import COMMAND, TOTAL, opened
from baton_testing.pool_pair import OPTIONS, Pair, said
from baton_testing.processes import stand_still
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.api import DeviceError, RankDiedError
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.start import Prepared, start_engine
from baton_worker.engine.backends.members import Members
from baton_worker.engine.backends.ranked import follower, group, meeting
from baton_worker.engine.backends.ranked.start import start_over_ranks
from baton_worker.engine.model.shards import Shard
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

pytestmark = pytest.mark.e2e

TOLERANCE = 5e-5
PATIENCE_SECONDS = 600.0


def config(ranks: int, shared_dir: str = "", **engine: Any) -> ProcessConfig:
    limits = {"max_model_len": 96, "max_running": 3, "prefill_chunk_tokens": 32, "kv_blocks": 30}
    given = limits | {"stuck_seconds": 2 * PATIENCE_SECONDS} | engine
    return ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        engine=EngineConfig(device="gpu", dtype="float32", tensor_parallel_size=ranks, **given),
        handoff=HandoffConfig(shared_dir=shared_dir),
    )


def over(ranks: int, on_death: Any = lambda error: None, **engine: Any) -> DeviceEngine:
    chosen = config(ranks, **engine)
    if ranks == 1:
        device = NumpyDevice(TOTAL)
        return start_engine(chosen, device, NumpyKernels(device), time.monotonic)
    return start_over_ranks(
        chosen,
        lambda: opened(chosen, 0),
        time.monotonic,
        on_death,
        lambda rank: NumpyDevice(),
        COMMAND,
    )


def served(engine: Any, number: int, **options: Any) -> list[Any]:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **options)
    prompt = tuple(5 + (7 * number + j) % 60 for j in range(20))
    engine.submit(Submit(number, 0, prompt_token_ids=prompt, sampling=sampling, logprobs_k=2))
    columns = []
    while engine.has_work():
        columns.append(engine.step().columns)
    return [
        np.concatenate([getattr(part, name) for part in columns])
        for name in ("token", "logprob", "rank", "topk_token", "topk_logprob")
    ]


def test_a_rank_that_cannot_serve_stays_until_rank_0_has_heard_why() -> None:
    """Else it were one that died: rank 0, which loads yet, would end with the code of a fault."""

    def refuses(config: ProcessConfig, shard: Shard) -> Prepared:
        raise DeviceError("no room for its part")

    near, far = Pipe()

    def run() -> None:
        with far:
            follower.run(far, refuses, Mock())

    rank = threading.Thread(target=run)
    rank.start()
    with near:
        near.send_bytes(meeting.encode(meeting.Start(config(2), 1, 2)))
        told = meeting.decode_answered(near.recv_bytes())
        assert told == meeting.Refused("no room for its part")
        near.send_bytes(bytes(8 << 20))  # more than waits where nobody reads
    rank.join(PATIENCE_SECONDS)
    assert not rank.is_alive(), "it is gone with rank 0"


@pytest.fixture(scope="module")
def two() -> Iterator[DeviceEngine]:
    with closing(over(2, overlap=False)) as engine:
        yield engine


@pytest.fixture(scope="module")
def one() -> DeviceEngine:
    return over(1)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.7, "repetition_penalty": 1.3}],
)
def test_two_processes_say_what_one_says(
    two: DeviceEngine, one: DeviceEngine, options: dict[str, Any]
) -> None:
    for number in (1, 2, 3):
        ours, theirs = (served(engine, number, **options) for engine in (two, one))
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=TOLERANCE)
    assert two.load().kv_blocks_used == 0


def test_ranks_outnumber_kv_heads() -> None:
    with closing(over(4)) as four, closing(over(1)) as alone:
        for mine, other in zip(served(four, 1), served(alone, 1), strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=TOLERANCE)


def test_the_pool_is_what_fits_on_each_rank() -> None:
    """Each has half of the weights and of a block, so more blocks fit than on one."""
    sizes = {"kv_blocks": 0, "gpu_memory_utilization": 0.5}
    with closing(over(2, **sizes)) as ranks, closing(over(1, **sizes)) as alone:
        assert ranks.options.n_blocks > 1.5 * alone.options.n_blocks
        assert ranks.kv.shape.block_bytes == alone.kv.shape.block_bytes, "of all heads"


def test_kv_goes_from_the_ranks_of_one_worker_to_those_of_another(two: DeviceEngine) -> None:
    """Descriptors of each rank's pool come to rank 0, which copies between them all."""
    with ExitStack() as stack:

        def make(reader: Reader | None = None, **_: Any) -> Bench:
            engine = stack.enter_context(closing(over(2, shared_dir="/shared")))
            return Bench(engine, reader or Reader())

        pair = Pair(make)
        prompt = tuple(5 + (7 * j) % 60 for j in range(70))
        keys = [pair.submit(number, prompt[number:]) for number in (1, 2)]
        while pair.prefill.engine.has_work():
            for handoff in pair.compute():
                pair.offer(handoff)
        pair.finish()
        assert sum(pair.pulled()) == 2 * 5
        pair.check_nothing_is_left()
        ours = [said(pair.decode, key) for key in keys]
    alone = Bench(two, Reader())
    theirs = []
    for number in (1, 2):
        told = OPTIONS | {"temperature": 0.9 * (number % 2), "seed": number}
        key = alone.submit(number, prompt[number:], **told)
        alone.drain()
        theirs.append(said(alone, key))
    assert ours == theirs


def test_a_step_goes_on_while_nobody_takes_an_answer() -> None:
    """An export of more bytes than a pipe holds is asked for, and taken only behind more steps."""
    blocks = list(range(2, 402))
    with closing(over(2, kv_blocks=400)) as engine:
        pool = engine.kv
        arrived = pool.begin_export(blocks, 16 * len(blocks))
        assert len(served(engine, 1)[0]) == 12
        (array,) = arrived()
        assert array.nbytes == len(blocks) * pool.shape.block_bytes > 4 << 20


def a_prompt(number: int) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    return Submit(number, 0, prompt_token_ids=tuple(range(5, 35)), sampling=sampling)


def wait_no_longer(engine: DeviceEngine) -> None:
    """Let rank 0 wait a second, in what is launched from here on, but for graphs: prompts."""
    assert engine.model.team is not None
    collective = engine.model.team.collective
    collective._exchange = collective._exchange._replace(limit_ns=1_000_000_000)


def first_rows(engine: DeviceEngine) -> Any:
    while not len(rows := engine.step().columns.token):
        pass
    return rows


def step_on(engine: DeviceEngine) -> None:
    for _ in range(60):
        engine.step()


@pytest.mark.parametrize("busy", [False, True])
def test_a_dead_rank_is_named_at_once_idle_or_not(busy: bool) -> None:
    told: list[Exception] = []
    noticed = threading.Event()

    def on_death(error: Exception) -> None:
        told.append(error)
        noticed.set()

    with closing(over(2, on_death, overlap=False)) as engine:
        (pid,) = engine.model.team.followers.pids  # type: ignore[union-attr]
        engine.submit(a_prompt(1))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        if not busy:
            assert noticed.wait(PATIENCE_SECONDS)
        wait_no_longer(engine)
        engine.submit(a_prompt(2))
        with pytest.raises(RankDiedError, match="rank 1"):
            step_on(engine)
        assert noticed.wait(PATIENCE_SECONDS)
    assert [str(error) for error in told] == [
        f"tensor-parallel rank 1 (pid {pid}) was ended by SIGKILL"
    ]


def test_a_rank_that_hangs_is_named() -> None:
    with closing(over(2, overlap=False)) as engine:
        (pid,) = engine.model.team.followers.pids  # type: ignore[union-attr]
        stand_still(pid)
        wait_no_longer(engine)
        engine.submit(a_prompt(1))
        try:
            with pytest.raises(RankDiedError, match="rank 1 did not come to a sum within 1 s"):
                step_on(engine)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_another_rank_gave_up_in_says_nothing(overlap: bool) -> None:
    """Its numbers are finite, and rank 0 has met all: only that rank's head tells."""
    with closing(over(2, overlap=overlap)) as engine:
        assert len(served(engine, 1)[0]) == 12
        collective = engine.model.team.collective  # type: ignore[union-attr]
        head, tell = numpy_ranks.head_words(collective._exchange, 1), collective.tell

        def given_up(out: Any) -> None:
            engine.model.kernels._launch(head.__setitem__, numpy_ranks.ERROR, 1)
            tell(out)

        collective.tell = given_up  # type: ignore[method-assign]
        engine.submit(a_prompt(2))
        with pytest.raises(RankDiedError, match=r"rank 0 did not come .*, as seen by rank 1"):
            first_rows(engine)


def test_ranks_end_with_an_engine_whose_device_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its step in flight and then its copies give up: the first is raised, and both are told."""
    engine = over(2, shared_dir="/shared", overlap=True)
    members = engine.model.team.followers._members  # type: ignore[union-attr]
    ((process, _),) = members._members
    engine.submit(a_prompt(1))
    engine.step()

    def give_up(why: str) -> Any:
        def call(*_: Any) -> None:
            raise DeviceError(why)

        return call

    flight = engine._in_flight
    assert flight is not None
    flight.landed()  # what the other rank has begun is to have ended
    monkeypatch.setattr(type(flight), "landed", give_up("an illegal address"))
    for copier in engine.pool.sharing.parts.copiers:  # type: ignore[union-attr]
        monkeypatch.setattr(copier, "synchronise", give_up("a copy of one"))
    with pytest.raises(DeviceError, match="an illegal address"):
        engine.close()
    assert process.poll() == 0, "it was told, and not killed"
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told == ["an illegal address", "a copy of one", "a copy of one"]


def test_the_program_of_a_rank_over_gpus_is_there_and_ends_with_rank_0() -> None:
    """Before it was told what to load."""
    ranks = Members(group.COMMAND, 2, lambda error: None)
    ((process, pipe),) = ranks._members
    pipe.close()
    assert process.wait(PATIENCE_SECONDS) == 0
    ranks.close()


def test_a_rank_that_cannot_load_says_why() -> None:
    """Rank 0 finds the same; whichever is first, the field is named and no process is left."""
    chosen = config(2, kv_blocks=0)
    tiny = lambda: (device := NumpyDevice(1 << 16), NumpyKernels(device))  # noqa: E731
    with pytest.raises(DeviceError, match="the model's weights take"):
        start_over_ranks(
            chosen,
            tiny,
            time.monotonic,
            lambda error: None,
            lambda rank: NumpyDevice(),
            COMMAND,
        )
