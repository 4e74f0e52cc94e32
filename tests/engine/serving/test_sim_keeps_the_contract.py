"""The simulated engine keeps the engine's contract: one text per request, however it is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_worker.config import ConfigError, SimConfig
from baton_worker.engine.api import EngineRefusedError, Handoff
from baton_worker.engine.backends.sim.engine import sim_shape
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish

ROOT = Path(__file__).resolve().parents[3]

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "seed": 7},
    {"temperature": 0.7, "top_k": 12, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]


def streams(bench: Any, prompts: Any, **options: Any) -> list[Any]:
    keys = [
        bench.submit(n, p, max_tokens=24, logprobs_k=n % 6 - 1, **SAMPLING[n % 4], **options)
        for n, p in enumerate(prompts)
    ]
    bench.drain()
    return [bench.reader[key] for key in keys]


def same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.ranks == other.ranks
        assert one.topk == other.topk
        assert one.finish is other.finish is Finish.LENGTH


@pytest.fixture
def plain(make_sim_bench: Callable[..., Any], make_prompts: Any) -> list[Any]:
    """Each request alone, no drafts."""
    prompts = make_prompts(12, seed=5)
    alone = []
    for n, prompt in enumerate(prompts):
        bench = make_sim_bench()
        key = bench.submit(n, prompt, max_tokens=24, logprobs_k=n % 6 - 1, **SAMPLING[n % 4])
        bench.drain()
        alone.append(bench.reader[key])
    return alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"n_draft": 0},
        {"n_draft": 3},
        {"n_draft": 5, "prefill_tokens": 7},
        {"n_draft": 2, "max_running": 4, "n_blocks": 16},
        {"n_draft": 2, "overlap": True},
    ],
    ids=["batched", "drafts", "chunked", "preempted", "overlap"],
)
def test_any_schedule_gives_the_solo_text(
    plain: list[Any], make_sim_bench: Callable[..., Any], make_prompts: Any, options: dict[str, Any]
) -> None:
    same(streams(make_sim_bench(**options), make_prompts(12, seed=5)), plain)


def test_a_pair_gives_the_solo_text(
    plain: list[Any],
    make_sim_bench: Callable[..., Any],
    make_prompts: Any,
    hand_over: Callable[..., None],
) -> None:
    prefill = make_sim_bench(n_draft=2)
    decode = make_sim_bench(n_draft=2, reader=prefill.reader)
    keys = [
        prefill.submit(n, p, max_tokens=24, logprobs_k=n % 6 - 1, hand_over=True, **SAMPLING[n % 4])
        for n, p in enumerate(make_prompts(12, seed=5))
    ]
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    same([decode.reader[key] for key in keys], plain)


def test_the_text_comes_from_the_kv_so_damaged_kv_shows(
    make_sim_bench: Callable[..., Any], make_prompts: Any
) -> None:
    texts = []
    for is_damaged in (False, True):
        prefill = make_sim_bench()
        decode = make_sim_bench(reader=prefill.reader)
        (prompt,) = make_prompts(1, seed=9)
        key = prefill.submit(1, prompt, temperature=0.0, max_tokens=12, hand_over=True)
        (handoff,) = prefill.handoffs()
        kv = [array.copy() for array in handoff.kv]
        kv[0][-1, 0, (len(prompt) - 1) % 16, 0] += float(is_damaged)
        decode.engine.admit_handoff(Handoff(handoff.state, tuple(kv)))
        decode.drain()
        texts.append(decode.reader[key].tokens)
    assert texts[0][0] == texts[1][0], "prefill's token was chosen before"
    assert texts[0][1:] != texts[1][1:]


def test_logprobs_are_a_distribution_over_the_vocabulary(
    make_sim_bench: Callable[..., Any],
) -> None:
    sim = SimConfig(
        prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0, vocab_size=50
    )
    bench = make_sim_bench(sim, max_top_k=50)
    key = bench.submit(1, range(2, 20), temperature=1.0, seed=4, max_tokens=30, logprobs_k=50)
    bench.drain()
    stream = bench.reader[key]
    for token, logprob, rank, top in zip(
        stream.tokens, stream.logprobs, stream.ranks, stream.topk, strict=True
    ):
        assert sorted(t for t, _ in top) == list(range(50))
        assert np.exp([value for _, value in top]).sum() == pytest.approx(1.0, abs=1e-5)
        assert top[rank - 1] == (token, logprob)


def test_drafts_are_accepted_as_often_as_configured(
    make_sim_bench: Callable[..., Any], make_prompts: Any
) -> None:
    sim = msgspec.structs.replace(
        SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0),
        acceptance=(0.9, 0.6, 0.3, 0.3, 0.0),
    )
    bench = make_sim_bench(sim, n_draft=5)
    for n, prompt in enumerate(make_prompts(30, seed=2)):
        bench.submit(n, prompt, temperature=0.0, max_tokens=200)
    stats = [result.stats for result in bench.drain()]
    proposed = sum(s.proposed_by_position for s in stats)
    accepted = sum(s.accepted_by_position for s in stats)
    assert proposed.min() > 1000
    assert (accepted / proposed).tolist() == pytest.approx(sim.acceptance, abs=0.05)


def test_a_step_takes_the_simulated_time(make_sim_bench: Callable[..., Any]) -> None:
    """The bench's clock moves 1 ms per reading, and by what is slept for."""
    sim = SimConfig(prefill_token_seconds=0.5, decode_step_seconds=10.0, decode_row_seconds=1.0)
    bench = make_sim_bench(sim)
    first = bench.submit(1, range(2, 22), temperature=0.0, max_tokens=4)
    bench.submit(2, range(2, 22), temperature=0.0, max_tokens=4)
    stats = [result.stats for result in bench.drain()]
    assert [s.step_seconds for s in stats] == pytest.approx([20.0, 12.0, 12.0, 12.0], abs=0.1)
    prefills = {key: prefill for s in stats for key, _, prefill in s.first_tokens}
    assert prefills[first] == pytest.approx(20.0, abs=0.1)


def test_another_seed_is_another_model(make_sim_bench: Callable[..., Any]) -> None:
    sim = SimConfig(seed=1)
    prefill, decode = make_sim_bench(), make_sim_bench(sim)
    prefill.submit(1, range(2, 22), temperature=0.0, max_tokens=4, hand_over=True)
    (handoff,) = prefill.handoffs()
    with pytest.raises(EngineRefusedError) as refusal:
        decode.engine.admit_handoff(handoff)
    assert refusal.value.code is ErrorCode.INCOMPATIBLE


def test_rules_of_the_edge_hold(make_sim_bench: Callable[..., Any]) -> None:
    bench = make_sim_bench(max_waiting=1, max_running=1)
    key = bench.submit(1, range(2, 22), temperature=0.0, max_tokens=50)
    bench.submit(2, range(2, 22), temperature=0.0, max_tokens=5)
    with pytest.raises(EngineRefusedError) as full:
        bench.submit(3, range(2, 22), max_tokens=5)
    assert full.value.code is ErrorCode.QUEUE_FULL
    bench.step()
    with pytest.raises(EngineRefusedError, match="already held"):
        bench.submit(1, range(2, 22), max_tokens=5)
    assert bench.engine.abort(key)
    bench.step()
    with pytest.raises(EngineRefusedError, match=r"ids are 0\.\.511"):
        bench.submit(3, (512,), max_tokens=5)
    assert not bench.engine.abort(RequestKey(key.handle, 5))
    bench.drain()
    assert bench.reader[key].finish is Finish.ABORT
    assert bench.engine.load().kv_blocks_used == 0


def test_a_stop_token_ends_and_min_tokens_holds_it_back(
    make_sim_bench: Callable[..., Any],
) -> None:
    bench = make_sim_bench(n_draft=3)
    key = bench.submit(1, range(2, 22), temperature=0.0, max_tokens=20)
    bench.drain()
    tokens = bench.reader[key].tokens
    stop = tokens[4]
    for number, n_min in ((2, 0), (3, tokens.index(stop) + 2)):
        again = make_sim_bench(n_draft=3)
        key = again.submit(
            number, range(2, 22), temperature=0.0, max_tokens=20, stop_token_ids=(stop,),
            min_tokens=n_min,
        )  # fmt: skip
        again.drain()
        found = again.reader[key].tokens
        at = tokens.index(stop)
        assert found[:at] == tokens[:at]
        assert (found[at] == stop) == (n_min == 0)


def test_more_tokens_than_the_tokenizer_has_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.sim\.vocab_size is 513, the model's is 512"):
        sim_shape(SimConfig(vocab_size=513), tiny.shape)


@pytest.mark.slow
def test_no_accelerator_stack_is_loaded_and_no_weights_are_read(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        source = ROOT / "examples" / "tiny-mtp" / name
        if source.exists():
            (tmp_path / name).write_bytes(source.read_bytes())
    program = (
        "import sys\n"
        "from baton_worker.config import *\n"
        "from baton_worker.engine.build import build_engine\n"
        "import baton_worker.roles.process\n"
        f"config = ProcessConfig(ModelConfig({str(tmp_path)!r}), engine=EngineConfig('sim'))\n"
        "assert not build_engine(config).has_work()\n"
        "assert 'paddle' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
