"""A worker of two ranks over gloo does what one of one rank does, and never outlives a rank.

The real thing: two processes per engine.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.group import RankGroup
from baton_worker.engine.backends.parallel.shard import ShardSizes
from baton_worker.engine.build import build_engine
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import resolve_options
from baton_worker.engine.step.runner import Runner
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import LogprobParams, SamplingParams

pytestmark = pytest.mark.e2e
TOLERANCE = 5e-5
PATIENCE_SECONDS = 600.0
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 8},
)


def _config(model_dir: Path, **engine: Any) -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig(str(model_dir)),
        speculative=SpeculativeConfig("mtp", 2),
        engine=EngineConfig(**({"max_running": 16, "max_model_len": 128} | engine)),
    )


@pytest.fixture(scope="module")
def over(bench_of: Any, tiny_model_dir: Path) -> Iterator[Callable[..., Any]]:
    """`over(ranks, reader=None, **engine)`: a bench whose engine was built from the checkpoint."""

    with ExitStack() as stack:

        def make(ranks: int, reader: Any = None, **engine: Any) -> Any:
            config = _config(tiny_model_dir, tensor_parallel_size=ranks, **engine)
            built = stack.enter_context(closing(build_engine(config)))
            return bench_of(built, reader)

        yield make


@pytest.fixture(scope="module")
def two(over: Any) -> Any:
    return over(2)


def _submit_all(bench: Any, prompts: Any, start: int, **options: Any) -> list[RequestKey]:
    return [
        bench.submit(
            start + n,
            prompt,
            max_tokens=4 + n % 16,
            logprobs_k=(-1, 0, 5, 20)[n % 4],
            **SAMPLINGS[n % 3],
            **options,
        )
        for n, prompt in enumerate(prompts)
    ]


def _assert_same(ours: Any, keys: list[RequestKey], theirs: Any, others: list[RequestKey]) -> None:
    for key, other in zip(keys, others, strict=True):
        a, b = ours[key], theirs[other]
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        assert a.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
        for top, other_top in zip(a.topk, b.topk, strict=True):
            np.testing.assert_allclose(
                [v for _, v in top], [v for _, v in other_top], atol=TOLERANCE
            )


@pytest.mark.parametrize("n_draft", [0, 1, 5])
def test_two_ranks_say_what_one_says(
    two: Any, make_bench: Any, make_prompts: Any, n_draft: int
) -> None:
    prompts = make_prompts(16, seed=40 + n_draft, longest=60)
    one = make_bench(n_draft=n_draft, max_model_len=128)
    two.engine.set_num_speculative_tokens(n_draft)
    keys = _submit_all(two, prompts, start=1000 * (n_draft + 1))
    others = _submit_all(one, prompts, start=0)
    two.drain()
    one.drain()
    _assert_same(two.reader, keys, one.reader, others)
    if n_draft:
        assert sum(sum(two.reader[key].accepted) for key in keys), "drafts were accepted"


def test_overlapped_chunked_and_preempted_ranks_say_the_same(
    over: Any, make_bench: Any, make_prompts: Any
) -> None:
    prompts = make_prompts(14, seed=44, longest=60)
    sizes: dict[str, Any] = {"max_running": 6, "max_model_len": 96, "block_size": 8}
    two = over(2, kv_blocks=13, prefill_chunk_tokens=16, overlap=True, **sizes)
    one = make_bench(n_draft=2, **sizes)
    keys, others = _submit_all(two, prompts, start=0), _submit_all(one, prompts, start=0)
    preempted = sum(result.stats.preempted for result in two.drain())
    one.drain()
    assert preempted
    _assert_same(two.reader, keys, one.reader, others)


def test_what_breaks_one_request_on_rank_0_ends_it_alone(
    two: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone samples; the others hear of no failure but clear the blocks when told to."""
    two.engine.set_num_speculative_tokens(2)
    prompts, real = make_prompts(6, seed=47, longest=60), Runner._raw_logits
    wanted = _submit_all(two, prompts, start=7000)
    two.drain()
    victim = RequestKey(make_handle(1, 7102), 0)

    def raw_logits(self: Runner, batch: Any, hidden: Any) -> Any:
        logits = real(self, batch, hidden)
        for first, sequence in zip(batch.first_rows, batch.sampled, strict=True):
            if sequence.request.key == victim and sequence.request.n_output >= 2:
                logits[first] = np.nan
        return logits

    monkeypatch.setattr(Runner, "_raw_logits", raw_logits)
    keys = _submit_all(two, prompts, start=7100)
    failed = [failure for result in two.drain() for failure in result.failed]
    assert [(failure.key, failure.code) for failure in failed] == [(victim, ErrorCode.ARITHMETIC)]
    monkeypatch.undo()
    again = _submit_all(two, prompts, start=7200)
    two.drain()
    served = [(k, w) for k, w in zip(keys, wanted, strict=True) if k != victim]
    for key, other in [*served, *zip(again, wanted, strict=True)]:
        assert two.reader[key].tokens == two.reader[other].tokens
    assert two.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 2), (2, 1), (1, 2)])
def test_a_handoff_is_whole_whatever_the_ranks_of_either_side(
    over: Any, make_bench: Any, make_prompts: Any, prefill_ranks: int, decode_ranks: int
) -> None:
    prompts = make_prompts(9, seed=45, longest=60)
    one = make_bench(n_draft=2, max_model_len=128)
    others = _submit_all(one, prompts, start=0)
    one.drain()
    prefill = over(prefill_ranks)
    decode = over(decode_ranks, reader=prefill.reader)
    keys = _submit_all(prefill, prompts, start=0, hand_over=True)
    for handoff in prefill.handoffs():
        assert handoff.state.kv_heads == 2
        decode.engine.admit_handoff(handoff)
        prefill.engine.release_handoff(RequestKey(handoff.state.handle, 0))
    decode.drain()
    _assert_same(prefill.reader, keys, one.reader, others)
    assert prefill.engine.load().kv_blocks_used == decode.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 4)])
def test_compressed_rows_are_handed_over_exactly_whatever_the_ranks(
    make_checkpoint: Any,
    bench_of: Any,
    make_prompts: Any,
    prefill_ranks: int,
    decode_ranks: int,
) -> None:
    """Every rank keeps the rows that all heads share: decode's have the bits of prefill's."""
    path = make_checkpoint("deepseek_v3", max_position_embeddings=128).path
    prompts = make_prompts(7, seed=48, longest=60, vocab_size=96)

    def over(ranks: int, reader: Any = None) -> Any:
        return bench_of(stack.enter_context(closing(build(ranks))), reader)

    def build(ranks: int) -> Any:
        return build_engine(_config(path, tensor_parallel_size=ranks))

    with ExitStack() as stack:
        one, prefill = over(1), over(prefill_ranks)
        decode = over(decode_ranks, reader=prefill.reader)
        others = _submit_all(one, prompts, start=0)
        one.drain()
        keys = _submit_all(prefill, prompts, start=0, hand_over=True)
        handoffs = prefill.handoffs()
        pool = decode.engine._parts.pool
        for handoff in handoffs:
            assert (handoff.state.dtype, handoff.state.kv_heads) == ("float32-compressed", 1)
            blocks = tuple(range(2, 2 + len(handoff.kv[0])))
            pool.import_blocks(blocks, handoff.kv)
            kept = [pool.export_blocks(blocks, handoff.state.n_cached)]
            if decode_ranks > 1:
                asked = pool._ranks.ask(orders.Export(blocks, handoff.state.n_cached))
                assert len(asked) == decode_ranks - 1
                kept += [answer.arrays for answer in asked]
            for arrays in kept:
                assert [bytes(a) for a in arrays] == [a.tobytes() for a in handoff.kv]
        for handoff in handoffs:
            decode.engine.admit_handoff(handoff)
            prefill.engine.release_handoff(RequestKey(handoff.state.handle, 0))
        decode.drain()
        _assert_same(prefill.reader, keys, one.reader, others)


def test_ranks_tell_prompts_and_drafts_as_one_does(
    two: Any, make_bench: Any, make_prompts: Any
) -> None:
    """Scoring prompt rows and drafts stays on rank 0, and the others are told nothing of it."""
    prompts = make_prompts(6, seed=47, longest=50)
    one = make_bench(n_draft=2, max_model_len=128)
    two.engine.set_num_speculative_tokens(2)
    wanted = LogprobParams(draft_logprobs=True, prompt_k=2, processed=True)
    streams = []
    for bench in (two, one):
        keys = [
            bench.submit(
                9000 + n,
                p,
                temperature=0.7,
                seed=n,
                max_tokens=12,
                logprobs_k=1,
                logprobs=wanted,
                bad_words=((40,), (41, 42)),
            )
            for n, p in enumerate(prompts)
        ]
        bench.drain()
        streams.append([bench.reader[key] for key in keys])
    for a, b in zip(*streams, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
        for ours, theirs in ((a.prompt, b.prompt), (a.shown, b.shown)):
            for x, y in zip(filter(None, ours), filter(None, theirs), strict=True):
                assert (x.first, x.tokens) == (y.first, y.tokens)
                np.testing.assert_allclose(x.logprobs, y.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 4), ("qwen3", 2), ("deepseek_v3", 2), ("deepseek_v3", 4)]
)
def test_other_families_and_more_ranks_say_the_same(
    make_checkpoint: Any, bench_of: Any, make_prompts: Any, family: str, ranks: int
) -> None:
    path = make_checkpoint(family, num_key_value_heads=4, tie_word_embeddings=False).path
    prompts = make_prompts(6, seed=46, vocab_size=96)
    benches, keys = [], []
    for size in (1, ranks):
        with closing(build_engine(_config(path, tensor_parallel_size=size))) as engine:
            bench = bench_of(engine)
            keys.append(_submit_all(bench, prompts, start=0))
            bench.drain()
            benches.append(bench.reader)
    _assert_same(benches[1], keys[1], benches[0], keys[0])


def _waiting_in(pid: int) -> tuple[int, int]:
    """Return the system call a sleeping process waits in, and its first argument."""
    try:
        text = Path(f"/proc/{pid}/syscall").read_text()
    except PermissionError:
        pytest.skip("the kernel does not tell what a process waits for")
    words = text.split()
    return (int(words[0]), int(words[1], 16)) if len(words) > 2 else (-1, -1)


def test_an_idle_rank_waits_on_its_pipe_and_not_in_a_collective(two: Any) -> None:
    two.submit(90_000, range(5, 30), temperature=0.0, max_tokens=4)
    two.drain()
    read = {"x86_64": 0, "aarch64": 63}[platform.machine()]
    process, _ = two.engine._ranks._members._members[0]
    pipe = int(process.args[-1])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (waits_in := _waiting_in(process.pid)) != (read, pipe):
        assert time.monotonic() < deadline, f"waits in {waits_in}, its pipe is {pipe}"
        time.sleep(0.005)
    assert two.engine._ranks.pids == (process.pid,)


def _step_on(engine: Any) -> None:
    for _ in range(60):
        engine.step()


@pytest.mark.parametrize("busy", [False, True])
def test_a_dead_rank_is_named_at_once_idle_or_not(tiny_model_dir: Path, busy: bool) -> None:
    told: list[Exception] = []
    noticed = threading.Event()

    def on_death(error: Exception) -> None:
        told.append(error)
        noticed.set()

    config = _config(tiny_model_dir, tensor_parallel_size=2)
    with closing(build_engine(config, on_rank_death=on_death)) as engine:
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        request = Submit(
            make_handle(1, 1), 0, prompt_token_ids=tuple(range(5, 40)), sampling=sampling
        )
        engine.submit(request)
        engine.step()
        (pid,) = engine._ranks.pids  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        if not busy:
            assert noticed.wait(PATIENCE_SECONDS)
        with pytest.raises(RankDiedError, match=rf"rank 1 \(pid {pid}\) was ended by SIGKILL"):
            _step_on(engine)
        assert noticed.wait(PATIENCE_SECONDS)
    assert [str(error) for error in told] == [
        f"tensor-parallel rank 1 (pid {pid}) was ended by SIGKILL"
    ]


def test_a_rank_that_cannot_start_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Where it looks there is no checkpoint."""
    shape = load_shape(tiny_model_dir)
    sizes = ShardSizes.of(resolve_options(_config(tiny_model_dir), shape))
    ranks = RankGroup(tmp_path, 2, sizes, lambda error: None)
    with closing(ranks), pytest.raises(RankDiedError, match=r"rank 1 .* ended with code 1"):
        ranks.join("")
