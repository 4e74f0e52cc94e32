"""Several ranks say what one says, to the rounding of a sum, whatever shares their steps.

Ranks are threads with NumPy devices of their own, each of which loads its part of a checkpoint.
That a group's bits do not depend on company is asked in tests/gpu, of `numpy-tiny-2-ranks` too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import Clock
from baton_testing.exactness.asks import mixture, serve
from baton_testing.exactness.devices import SMOKE
from baton_testing.exactness.said import Said
from baton_testing.fp8_folder import quantise_folder
from baton_testing.numpy_device import NumpyDevice, on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_team import team_of
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.pace import Pace
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import NO_DRAFTS, DraftSources, EngineOptions
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import SamplingParams

TOLERANCE = 5e-5
QUANTISED_STEP = 0.25
"""What a few activations on the other side of a step change a logprob by, at most."""
MOST_LEN = 128


def options(**given: Any) -> EngineOptions:
    n_draft = given.get("n_draft", 0)
    most: dict[str, Any] = {
        "block_size": 16,
        "n_blocks": 64,
        "max_running": 5,
        "max_waiting": 64,
        "max_model_len": MOST_LEN,
        "prefill_tokens": 48,
        "n_draft": n_draft,
        "use_mtp": n_draft > 0,
        "drafts": DraftSources() if n_draft else NO_DRAFTS,
        "max_top_k": 20,
        "overlap": True,
    }
    return EngineOptions(**(most | given))


@contextmanager
def model_over(ranks: int, folder: Path = TINY_MODEL, n_mtp: int | None = None) -> Iterator[Any]:
    if ranks > 1:
        model = team_of(folder, ranks, n_mtp)
        assert model.team is not None
        try:
            yield model
        finally:
            model.team.followers.close()  # type: ignore[union-attr]
        return
    shape, checkpoint, device = load_shape(folder), open_checkpoint(folder), NumpyDevice()
    n_mtp = shape.n_mtp_layers if n_mtp is None else n_mtp
    weights = load_device_weights(device, checkpoint, shape, "float32", n_mtp)
    yield LoadedModel(device, NumpyKernels(device), shape, weights)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """Of the tiny model, which has two KV heads: four ranks have each of them twice."""
    with model_over(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def whole() -> Iterator[LoadedModel]:
    with model_over(1) as model:
        yield model


def asked(model: LoadedModel, vocab_size: int = 0, **given: Any) -> list[Said]:
    asks = mixture(
        SMOKE.asks, vocab_size or model.model_shape.vocab_size, 60, 10, seed=1, max_top_k=20
    )
    engine = DeviceEngine(model, options(**given), Clock())
    try:
        return serve(engine, asks, arriving=3)
    finally:
        engine.close()


def quoted(model: LoadedModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return what is said behind a prompt, with lookup's drafts."""
    drafts, said = DraftSources(0, NgramSizes(1, 3)), list[int]()
    engine = DeviceEngine(model, options(n_draft=3, drafts=drafts, use_mtp=False), Clock())
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    try:
        engine.submit(Submit(1, 0, prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work():
            said += engine.step().columns.token.tolist()
    finally:
        engine.close()
    return tuple(said)


def floats(values: Any) -> list[float]:
    return [struct.unpack("<f", bits)[0] for bits in values]


def near(ours: list[Said], theirs: list[Said]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.tokens, mine.finish) == (other.tokens, other.finish)
        pairs = [(mine.logprobs, other.logprobs)]
        for row, others in zip(mine.topk, other.topk, strict=True):
            pairs.append(([bits for _, bits in row], [bits for _, bits in others]))
        for row, others in zip(mine.prompt, other.prompt, strict=True):
            assert row[0] == others[0]
            pairs.append(([row[1]], [others[1]]))
        for left, right in pairs:
            np.testing.assert_allclose(floats(left), floats(right), rtol=0, atol=TOLERANCE)


def test_all_ranks_find_the_same_in_what_they_were_told(
    ranks: LoadedModel, whole: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that goes ahead each rank feeds the drafts that its own histories gave."""
    monkeypatch.setattr(Pace, "are_worth_rows", lambda self, n, gain: True)
    loop = quoted(whole, (7, 8, 9, 10) * 6, 60)
    assert quoted(ranks, loop, 12) == quoted(whole, loop, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [NO_DRAFTS, DraftSources(), DraftSources(1, NgramSizes(1, 3))],
    ids=["none", "mtp", "mtp, then lookup"],
)
def test_requests_of_every_kind(
    ranks: LoadedModel, whole: LoadedModel, drafts: DraftSources
) -> None:
    """Penalties, bias, bad words, prompts and drafts that are scored: see `mixture`."""
    n_draft = 0 if drafts.is_none else 3
    ours, theirs = (asked(model, n_draft=n_draft, drafts=drafts) for model in (ranks, whole))
    near(ours, theirs)
    assert sum(len(said.tokens) for said in ours) > SMOKE.asks
    assert any(said.prompt for said in ours), "some prompts were scored"


@pytest.mark.slow
def test_draft_layers_in_turn(make_checkpoint: Callable[..., Any]) -> None:
    """What a rank's step is told of the drafts of its layers is in its upload, as all else."""
    made = make_checkpoint("mimo", num_nextn_predict_layers=2, tie_word_embeddings=False)
    said = []
    for size in (1, 2):
        with model_over(size, made.path) as model:
            assert len(model.weights.mtp) == 2
            said.append(asked(model, n_draft=3, n_draft_layers=2))
    near(said[1], said[0])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_ranks_do_not_divide(
    make_checkpoint: Callable[..., Any], tied: bool
) -> None:
    """The last ranks of four have fewer ids, one of them none that is not void."""
    made = make_checkpoint(family="qwen3", vocab_size=70, tie_word_embeddings=tied)
    said = []
    for size in (1, 2, 4):
        with model_over(size, made.path) as model:
            said.append(asked(model))
    near(said[1], said[0])
    near(said[2], said[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "mimo", "ernie4_5", "qwen3_moe", "glm4_moe", "deepseek_v3"]
)
def test_every_family(make_checkpoint: Callable[..., Any], family: str) -> None:
    """Biases of query, key and value are the heads', so each rank adds its own; of each expert a
    rank has a part of the width. Compressed rows are on every rank, their heads are split.
    """
    made = make_checkpoint(family=family)
    said = []
    for size in (1, 2):
        with model_over(size, made.path) as model:
            said.append(asked(model))
    near(said[1], said[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_a_quantised_model(make_checkpoint: Callable[..., Any], family: str) -> None:
    """Ranks have whole groups, so they quantise what one does. Sums over ranks are rounded apart,
    and where that takes an activation over a step of e4m3, a logprob moves by what it is worth.
    """
    sizes: dict[str, Any] = {"intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"v_head_dim": 64} if family == "deepseek_v3" else {"head_dim": 64}
    folder = make_checkpoint(family, num_key_value_heads=4, **sizes).path
    quantise_folder(folder, with_drafts=True)
    said = []
    for size in (1, 2):
        with model_over(size, folder) as model:
            said.append(asked(model, n_draft=2))
    pairs = [pair for pair in zip(*said, strict=True) if pair[0].tokens == pair[1].tokens]
    assert len(pairs) >= len(said[0]) - 3, "near-ties alone are decided otherwise"
    misses = np.abs(
        [x - y for one, two in pairs for x, y in zip(*map(told, (one, two)), strict=True)]
    )
    print(f"{family}: median {np.median(misses):.2g}, largest {misses.max():.2g}")
    assert np.median(misses) < TOLERANCE
    assert misses.max() < QUANTISED_STEP


def told(said: Said) -> list[float]:
    return floats(said.logprobs) + floats([row[1] for row in said.prompt])


@pytest.mark.slow
def test_a_row_that_breaks_on_another_rank_ends_its_request_alone(whole: LoadedModel) -> None:
    """A number that is none in one rank's KV becomes all ranks' by the sum, of that row alone."""

    def requests() -> list[Submit]:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return [
            Submit(n, 0, prompt_token_ids=tuple(range(5 + n, 30 + n)), sampling=sampling)
            for n in (1, 2, 3)
        ]

    with model_over(2) as model:
        engine = DeviceEngine(model, options(overlap=False, prefix_caching=False), Clock())
        for request in requests():
            engine.submit(request)
        while engine._requests[requests()[1].key].n_output < 3:
            engine.step()
        block = engine._requests[requests()[1].key].blocks[0]
        spoil(model, block)
        failed, n_rows = [], 0
        while engine.has_work():
            result = engine.step()
            failed += result.failed
            n_rows += result.stats.emitted_tokens
        assert [(f.key, f.code) for f in failed] == [(requests()[1].key, ErrorCode.ARITHMETIC)]
        assert n_rows > 12
        assert engine.load().kv_blocks_used == 0
        again = [said.tokens for said in asked(model)]
        assert again == [said.tokens for said in asked(whole)], "nothing of it is left in blocks"
        engine.close()


def spoil(model: LoadedModel, block: int) -> None:
    """Write NaN to a block of rank 1's pool, of the engine that was opened first."""
    (member,) = model.team.followers._members  # type: ignore[union-attr]
    device = member.model.device
    (pool,) = [engine.pool for engine in member.follower._engines.values()]
    row = device.rows(pool.tensor, block, block + 1)
    device.launch(lambda array: array.fill(np.nan), row)
    device.synchronise()
    assert np.isnan(on_device(row)).all()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("is_compressed", [False, True], ids=["heads", "compressed"])
def test_kv_is_the_same_bits_whoever_holds_its_heads(
    make_checkpoint: Callable[..., Any], prefill: int, decode: int, is_compressed: bool
) -> None:
    """What one pool gives out another takes, however many ranks have a part of each, or all."""
    blocks, n_positions = [5, 9, 3], 41
    folder = make_checkpoint("deepseek_v3").path if is_compressed else TINY_MODEL
    with model_over(prefill, folder) as first, model_over(decode, folder) as second:
        engines = [DeviceEngine(model, options(), Clock()) for model in (first, second)]
        source, target = (engine.pool for engine in engines)
        assert source.shape == target.shape
        (form,) = source.shape.arrays(len(blocks))
        values = np.random.default_rng(1).normal(size=form.shape).astype(form.dtype)
        source.import_blocks(blocks, [values])
        (given,) = source.begin_export(blocks, n_positions)()
        target.import_blocks([2, 8, 7], [given])
        (found,) = target.begin_export([2, 8, 7], n_positions)()
        np.testing.assert_array_equal(given.view(np.uint32), found.view(np.uint32))
        values[-1, ..., n_positions % 16 :, :] = 0
        np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
        for engine in engines:
            engine.close()


def test_what_a_closed_engine_asked_for_is_not_the_next_ones(ranks: LoadedModel) -> None:
    """Its KV was on the way out; the ranks answer in the order asked, whoever asks."""
    blocks, sampling = [5, 9, 3], SamplingParams(max_tokens=4)
    engine = DeviceEngine(ranks, options(kv_bytes_per_step=1), Clock())
    decode = DecodeTarget("decode", "tcp://decode:1")
    engine.submit(Submit(1, 0, prompt_token_ids=tuple(range(60)), sampling=sampling, decode=decode))
    while not engine._transfers._under_way:
        engine.step()
    engine.close()
    after = DeviceEngine(ranks, options(), Clock())
    (form,) = after.pool.shape.arrays(len(blocks))
    values = np.random.default_rng(1).normal(size=form.shape).astype(form.dtype)
    after.pool.import_blocks(blocks, [values])
    (given,) = after.pool.begin_export(blocks, 48)()
    np.testing.assert_array_equal(given, values)
    after.close()
