"""A model's weights in the device's memory, as the kernels read them.

Owns which tensors there are and their layout: `[out, in]` as in the checkpoint, projections of one
input fused by rows. A `Weight` is E, or FP8 of a quantised model. Knows no checkpoint, no
framework, and not how they get there.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_worker.engine.backends.device.scaled_kernels import Weight
from baton_worker.engine.backends.device.seam import DType, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMixture:
    """The experts of a layer: X of width I.

    Attributes:
        router: f32 `[X, H]`.
        choice_bias: f32 `[X]`, None for families without.
        gate_up: `[X * 2 * I, H]`: of each expert gate, then up.
        down: `[X * H, I]`.
    """

    router: Tensor
    choice_bias: Tensor | None
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLatent:
    """What MLA makes of compressed rows, see `model.mla.Mla`; E but for `q_up` where it is FP8.

    Attributes:
        q_norm: `[q_rank]`, q_up: `[n_heads * query_size, q_rank]`; None where queries are not
            compressed.
        kv_norm: `[kv_rank]`.
        kv_up: `[n_heads * unfolded_size, kv_rank]`: each head's key, then its value; what is FP8 in
            the checkpoint is multiplied out.
    """

    q_norm: Tensor | None
    q_up: Weight | None
    kv_norm: Tensor
    kv_up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
    """One decoder layer, all of it contiguous, and E but for what is quantised.

    Attributes:
        input_norm: `[H]`, before attention.
        qkv: `[(n_heads + 2 * n_kv_heads) * head_dim, H]`: all query heads, then keys, then values.
            With MLA `[sum of ModelShape.projected_sizes, H]`: queries, compressed or not, then the
            compressed row and the key that all heads share.
        o: `[H, n_heads * head_dim]`; with MLA `[H, n_heads * value_size]`.
        post_norm: `[H]`, before the MLP.
        gate_up: `[2 * I, H]`: gate, then up, of what every token takes: of a mixture the shared
            experts; None where it has none.
        down: `[H, I]`, None where `gate_up` is.
        qk_norm: `[head_dim]` each, of query and key heads; None for families without.
        qkv_bias: `[(n_heads + 2 * n_kv_heads) * head_dim]`, as `qkv`'s rows; None for families
            without.
        mixture: of the tokens' own experts; None for layers without.
        latent: of MLA; None for families without.
    """

    input_norm: Tensor
    qkv: Weight
    o: Weight
    post_norm: Tensor
    gate_up: Weight | None
    down: Weight | None
    qk_norm: tuple[Tensor, Tensor] | None
    qkv_bias: Tensor | None = None
    mixture: DeviceMixture | None = None
    latent: DeviceLatent | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMtp:
    """One MTP layer: `layer(concat[rms(emb(t+1), emb_norm), rms(h, hidden_norm)] @ proj^T)`.

    Attributes:
        emb_norm, hidden_norm: `[H]`.
        proj: `[H, 2 * H]`; columns `:H` take what comes first in `ModelShape.mtp_order`.
        final_norm: `[H]`; the main model's own tensor unless the checkpoint has another one.
    """

    emb_norm: Tensor
    hidden_norm: Tensor
    proj: Weight
    layer: DeviceLayer
    final_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """A whole model.

    Attributes:
        dtype: E.
        embed: `[V, H]`.
        final_norm: `[H]`.
        lm_head: `[V, H]`; the very tensor `embed` when they are tied.
        identity: hash of what they were read from; see `Weights.identity`.
    """

    dtype: DType
    embed: Tensor
    layers: tuple[DeviceLayer, ...]
    mtp: tuple[DeviceMtp, ...]
    final_norm: Tensor
    lm_head: Tensor
    identity: str
