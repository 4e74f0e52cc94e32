"""Models of Qwen3-8B's and MiMo-7B's shapes with random weights, made on a device from a seed.

Owns how it is made so that its text is worth trying: the likeliest token is often the next of a
short cycle, which the draft layer foretells, and as often a near-tie decides. So some drafts are
accepted, some are not, and a wrong last bit changes tokens. Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.shape import ModelShape

LAYERS = 36
CYCLE = 8
PULL = 0.0022
"""How much the next token of its cycle is in a row of the head: as much as the largest of the
vocabulary's random logits, more or less."""


def qwen3_8b(n_layers: int = LAYERS, n_mtp_layers: int = 1) -> ModelShape:
    """Return the shape, with fewer layers if asked for, and a draft layer that Qwen3 has not."""
    return ModelShape(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        n_layers=n_layers,
        n_mtp_layers=n_mtp_layers,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        rope_style="half",
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        mtp_hidden="pre_norm",
        bos_token_id=None,
        eos_token_ids=(151_645,),
        max_position_embeddings=131_072 + 1024,
        dtype="bfloat16",
        has_qk_norm=True,
    )


def mimo_7b(n_layers: int = LAYERS) -> ModelShape:
    """Return the shape as published, with fewer layers if asked for."""
    return ModelShape(
        model_type="mimo",
        vocab_size=151_680,
        hidden_size=4096,
        n_layers=n_layers,
        n_mtp_layers=1,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        intermediate_size=11_008,
        rope_style="half",
        rope_theta=640_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        mtp_hidden="post_norm",
        bos_token_id=None,
        eos_token_ids=(151_645,),
        max_position_embeddings=32_768,
        dtype="bfloat16",
        has_qkv_bias=True,
        mtp_order="hidden_embedding",
    )


def qwen3_30b_a3b(n_layers: int = 48) -> ModelShape:
    """Return the shape as published (128 experts, 8 a token), and a draft layer that it has not."""
    return replace(
        qwen3_8b(n_layers),
        model_type="qwen3_moe",
        hidden_size=2048,
        n_kv_heads=4,
        intermediate_size=6144,
        experts=Experts(128, 8, 768, tuple(range(n_layers))),
    )


def ernie_21b_a3b(n_layers: int = 28) -> ModelShape:
    """Return the shape as published: 64 experts, 6 a token, 2 for all, a dense draft layer."""
    return replace(
        qwen3_8b(n_layers),
        model_type="ernie4_5_moe",
        vocab_size=103_424,
        hidden_size=2560,
        n_heads=20,
        n_kv_heads=4,
        rope_style="interleaved",
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        has_qk_norm=False,
        experts=Experts(
            64,
            6,
            1536,
            tuple(range(1, n_layers)),
            shared_size=3072,
            has_choice_bias=True,
            least_sum=1e-12,
        ),
    )


def glm_45_air(n_layers: int = 46) -> ModelShape:
    """Return the shape as published, with fewer layers if asked for."""
    experts = Experts(
        128,
        8,
        1408,
        tuple(range(1, n_layers)),
        shared_size=1408,
        scores="sigmoid",
        has_choice_bias=True,
        least_sum=1e-20,
        has_mtp=True,
    )
    return replace(
        qwen3_8b(n_layers),
        model_type="glm4_moe",
        vocab_size=151_552,
        n_heads=96,
        intermediate_size=10_944,
        rms_norm_eps=1e-5,
        mtp_hidden="post_norm",
        has_qk_norm=False,
        has_qkv_bias=True,
        rotated_size=64,
        experts=experts,
    )


def deepseek_v3(n_layers: int = 61, n_experts: int = 256) -> ModelShape:
    """Return the shape as published, rotation not stretched; with fewer layers and experts if asked
    for, of which all layers behind the third have some.
    """
    n_dense = min(3, n_layers - 1)
    experts = Experts(
        n_experts,
        8,
        2048,
        tuple(range(n_dense, n_layers)),
        shared_size=2048,
        scores="sigmoid",
        n_groups=8,
        n_chosen_groups=4,
        has_choice_bias=True,
        scaling=2.5,
        least_sum=1e-20,
        has_mtp=True,
    )
    mla = Mla(1536, 512, 128, 64, 128, score_scale=192**-0.5)
    return replace(
        qwen3_8b(n_layers),
        model_type="deepseek_v3",
        vocab_size=129_280,
        hidden_size=7168,
        n_heads=128,
        n_kv_heads=1,
        head_dim=mla.row_size,
        intermediate_size=18_432,
        rope_style="interleaved",
        rope_theta=10_000.0,
        mtp_hidden="post_norm",
        has_qk_norm=False,
        experts=experts,
        mla=mla,
    )


def random_weights(
    torch: Any,
    shape: ModelShape,
    seed: int = 0,
    kept_as: Callable[[DeviceLayer], DeviceLayer] = lambda layer: layer,
) -> DeviceWeights:
    """Return bfloat16 weights on the current CUDA device, the same for a seed on every H200.

    Args:
        kept_as: what becomes of each layer before the next is made, so that no more than one is
            there in bfloat16.
    """
    source = torch.Generator(device="cuda")
    source.manual_seed(seed)
    kind = {"device": "cuda", "dtype": torch.bfloat16}

    def normal(*sizes: int, scale: float = 0.02) -> Any:
        return torch.empty(sizes, **kind).normal_(0.0, scale, generator=source)

    def norm(size: int) -> Any:
        return 1 + normal(size, scale=0.1)

    hidden = shape.hidden_size

    def layer(index: int) -> DeviceLayer:
        return kept_as(_layer(normal, norm, shape, index))

    embed = normal(shape.vocab_size, hidden, scale=1.0)
    head = normal(shape.vocab_size, hidden)
    head += PULL * embed[_before_in_cycle(torch, shape.vocab_size)]
    final_norm = norm(hidden)

    def draft_layer(index: int) -> DeviceMtp:
        project = normal(hidden, 2 * hidden, scale=0.002)
        is_first = shape.mtp_order == "embedding_hidden"
        embedding = project[:, :hidden] if is_first else project[:, hidden:]
        embedding += torch.eye(hidden, **kind)
        return DeviceMtp(
            norm(hidden), norm(hidden), project, layer(shape.n_layers + index), final_norm
        )

    return DeviceWeights(
        dtype="bfloat16",
        embed=embed,
        layers=tuple(map(layer, range(shape.n_layers))),
        mtp=tuple(map(draft_layer, range(shape.n_mtp_layers))),
        final_norm=final_norm,
        lm_head=head,
        identity=f"random {shape.n_layers} {seed}",
    )


def _layer(normal: Any, norm: Any, shape: ModelShape, index: int) -> DeviceLayer:
    hidden, into_residual = shape.hidden_size, 0.02 / (2 * shape.n_layers) ** 0.5
    inner, experts = shape.mlp_size(index), shape.experts_of(index)
    heads = (norm(shape.head_dim), norm(shape.head_dim)) if shape.has_qk_norm else None
    width = sum(shape.projected_sizes)
    return DeviceLayer(
        input_norm=norm(hidden),
        qkv=normal(width, hidden),
        o=normal(hidden, shape.o_size, scale=into_residual),
        post_norm=norm(hidden),
        gate_up=normal(2 * inner, hidden) if inner else None,
        down=normal(hidden, inner, scale=into_residual) if inner else None,
        qk_norm=heads,
        qkv_bias=normal(width, scale=1.0) if shape.has_qkv_bias else None,
        mixture=_mixture(normal, hidden, experts, into_residual) if experts else None,
        latent=_latent(normal, norm, shape.n_heads, shape.mla) if shape.mla else None,
    )


def _latent(normal: Any, norm: Any, n_heads: int, mla: Mla) -> DeviceLatent:
    return DeviceLatent(
        q_norm=norm(mla.q_rank) if mla.q_rank else None,
        q_up=normal(n_heads * mla.query_size, mla.q_rank) if mla.q_rank else None,
        kv_norm=norm(mla.kv_rank),
        kv_up=normal(n_heads * mla.unfolded_size, mla.kv_rank),
    )


def _mixture(normal: Any, hidden: int, experts: Experts, into_residual: float) -> DeviceMixture:
    count, width = experts.count, experts.intermediate_size
    return DeviceMixture(
        router=normal(count, hidden).float(),
        choice_bias=normal(count).float() if experts.has_choice_bias else None,
        gate_up=normal(count * 2 * width, hidden),
        down=normal(count * hidden, width, scale=into_residual),
    )


def _before_in_cycle(torch: Any, vocab_size: int) -> Any:
    """Return i64[V]: the token before each in its cycle of `CYCLE` neighbours."""
    tokens = torch.arange(vocab_size, device="cuda")
    first = tokens // CYCLE * CYCLE
    size = torch.clamp(vocab_size - first, max=CYCLE)
    return first + (tokens - first + size - 1) % size
