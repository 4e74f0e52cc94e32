"""Each call of a model of real size passes the CUDA ops' checks, those of Hopper's kernels too.

The tiny model's calls are shown to the ops with what they compute on (see
test_ops_take_what_a_step_gives_them); here tensors have no memory, so that shapes may be any.
`make ops-arguments` builds the library that both need, which has CUDA code, and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton_testing.engine_bench import Clock
from baton_testing.exactness import devices
from baton_testing.exactness.asks import serve, serve_in_pair
from baton_testing.exactness.random_model import (
    deepseek_v3,
    glm_45_air,
    mimo_7b,
    qwen3_8b,
    qwen3_30b_a3b,
)
from baton_testing.exactness.subjects import Sizes, Subject
from baton_testing.stub_device import (
    JudgedKernels,
    StubDevice,
    has_cuda_code,
    stub_team,
    stub_weights,
)
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.expert_kernels import Router, Routes
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.scorer import TextScorer
from baton_worker.engine.backends.latent import OpsLatentKernels
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import head_rows, local_shape
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.sampling import LogprobParams

pytestmark = pytest.mark.skipif(
    not has_cuda_code(), reason="needs baton_ops with CUDA code on a machine without a GPU"
)

LOOKUP_BEHIND_A_LAYER = DraftSources(1, NgramSizes(2, 4))
SIZES = Sizes(33, 12, 200, (3, 32), (64,), (3, 5), (4, 8), (64,))


def fp8(made: Callable[[int], ModelShape], group: int) -> Callable[[int], ModelShape]:
    """Return a shape whose matrices are FP8, with a scale for each group or row of activations."""
    quantisation = Fp8(group, group or 1, "weight_scale")
    return lambda n_layers: replace(made(n_layers), quantisation=quantisation)


OF_MIMO, OF_GLM = fp8(mimo_7b, 0), fp8(glm_45_air, 128)


@pytest.fixture(params=[qwen3_8b, mimo_7b, qwen3_30b_a3b, glm_45_air, deepseek_v3, OF_MIMO, OF_GLM])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Qwen3-8B's shape with a draft layer, MiMo-7B's, which has biases, mixtures with and without
    shared experts, and DeepSeek-V3's with MLA; dense and mixed in FP8; fewer layers.
    """
    return of_ranks(1, request.param(2))


def of_ranks(size: int, model_shape: ModelShape) -> Subject:
    device, kernels = StubDevice(), JudgedKernels()
    local, rows = local_shape(model_shape, size), head_rows(model_shape.vocab_size, size)
    loaded = LoadedModel(
        device, kernels, model_shape, stub_weights(device, local, "bfloat16", rows)
    )
    if size > 1:
        loaded = loaded._replace(team=stub_team(device, kernels, model_shape, size))
    return Subject(
        name="stub",
        vocab_size=model_shape.vocab_size,
        has_mtp=True,
        max_model_len=2048,
        sizes=SIZES,
        make=lambda options: DeviceEngine(loaded, options, Clock()),
        over=devices.engine_of,
        loaded=loaded,
    )


def test_steps_of_every_kind(subject: Subject) -> None:
    for options in (
        {"max_running": 1},
        {"max_running": 32, "n_draft": 5, "prefill_tokens": 64},
        {"max_running": 7, "n_draft": 3, "overlap": True, "prefix_caching": True},
        {"max_running": 7, "n_draft": 3, "overlap": True, "drafts": LOOKUP_BEHIND_A_LAYER},
    ):
        with subject.engine(**options) as engine:
            serve(engine, subject.asks(), arriving=4)
    called = set(subject.loaded.kernels.calls)
    kernels = {name for name in vars(type(subject.loaded.kernels._ops)) if not name.startswith("_")}
    is_fp8 = subject.loaded.model_shape.quantisation is not None
    plain = {"gate_up_silu", "expert_gate_up_silu", "expert_matmul"}
    scaled = {"quantise", "scaled_matmul", "scaled_gate_up_silu", "scaled_expert_gate_up_silu"}
    scaled |= {"quantise_matmul", *(f"quantise_{name}" for name in plain)}
    of_mixtures = {"norm_route", "combine_norm"}
    of_mixtures |= {name for name in plain | scaled if "expert" in name}
    is_mixture = subject.loaded.model_shape.experts is not None
    has_mla = subject.loaded.model_shape.mla is not None
    of_rows = {f"latent.{name}" for name in vars(OpsLatentKernels) if not name.startswith("_")}
    assert (of_rows <= called) if has_mla else not (of_rows & called)
    of_heads = {"rope_store", "attend"} if has_mla else set()
    unasked = (plain if is_fp8 else scaled) | (set() if is_mixture else of_mixtures)
    assert not called & unasked
    assert kernels - called - of_heads - unasked <= {
        "attention_scratch_bytes", "logprob_workspace_bytes", "expert_limits", "latent",
        "exchange_head_bytes", "rank_sum", "rank_sum_norm", "rank_gather", "rank_errors", "combine",
    }  # fmt: skip


@pytest.mark.parametrize("made", [qwen3_8b, mimo_7b, glm_45_air, deepseek_v3, fp8(qwen3_8b, 128)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ranks_steps(size: int, made: Callable[[int], ModelShape]) -> None:
    """More rows than are gathered at once among them."""
    subject = of_ranks(size, made(2))
    for options in ({"max_running": 128, "n_draft": 5}, {"max_running": 3, "overlap": True}):
        with subject.engine(prefill_tokens=128, **options) as engine:
            serve(engine, subject.asks(80), arriving=64)
    is_fp8 = subject.loaded.model_shape.quantisation is not None
    gate_up = "scaled_gate_up_silu" if is_fp8 else "gate_up_silu"
    called = set(subject.loaded.kernels.calls)
    meeting = {"rank_sum", "rank_sum_norm", "rank_gather", "rank_errors"}
    assert meeting | {"matmul", gate_up} <= called
    assert ("combine" in called) == (subject.loaded.model_shape.experts is not None)
    assert "combine_norm" not in called


def test_handoffs(subject: Subject) -> None:
    """Without logprobs: zeros are no ranks, which decode refuses."""
    asks = [replace(ask, logprobs_k=-1, logprobs=LogprobParams()) for ask in subject.asks()]
    with subject.engine(n_draft=2) as prefill, subject.engine(n_draft=2) as decode:
        serve_in_pair(prefill, decode, asks)


def test_texts_that_a_trainer_scores(subject: Subject) -> None:
    scorer = TextScorer(subject.loaded, longest=400, at_once=96, most_top=3)
    scored = scorer.score(list(range(2, 302)), top=3)
    assert len(scored.logprob) == 299


def routed(rule: Experts, n_tokens: int = 4, hidden: int = 64) -> None:
    device, pairs = StubDevice(), n_tokens * rule.chosen
    out = Routes(
        device.empty((n_tokens, rule.count), "float32"),
        device.empty((pairs,), "int32"),
        device.empty((pairs,), "float32"),
        device.empty((pairs,), "int32"),
        device.empty((pairs,), "int32"),
        device.empty((rule.count + 1,), "int32"),
    )
    residual, normed = (device.empty((n_tokens, hidden), "bfloat16") for _ in range(2))
    norm = Norm(device.empty((hidden,), "bfloat16"), 1e-6)
    router = Router(device.empty((rule.count, hidden), "float32"), None, rule)
    JudgedKernels().norm_route(None, residual, norm, normed, router, out)


def test_a_choice_beyond_the_chosen_groups_is_refused() -> None:
    """The schema of models refuses it; the op would take experts that it must not."""
    rule = Experts(32, 8, 8, (0,), n_groups=8, n_chosen_groups=2)
    routed(rule)
    with pytest.raises(ValueError, match=r"chosen\[0\] must be in \[1, 8\], got 9"):
        routed(replace(rule, chosen=9))
    with pytest.raises(ValueError, match=r"experts of a group\[0\] must be in \[2, .*got 1"):
        routed(replace(rule, n_groups=32, n_chosen_groups=8))


def test_more_rows_of_experts_than_are_addressed_are_refused() -> None:
    device, kernels = StubDevice(1 << 50), JudgedKernels()

    def multiplied(width: int) -> None:
        x, starts = device.empty((8, 8), "bfloat16"), device.empty((513,), "int32")
        weight = device.empty((512 * width, 8), "bfloat16")
        kernels.expert_matmul(x, starts, weight, device.empty((8, width), "bfloat16"))

    multiplied(1 << 20)
    with pytest.raises(ValueError, match=r"weight\.shape\[0\] must be in .*got 2147483648"):
        multiplied(1 << 22)
