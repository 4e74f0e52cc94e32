"""`Kernels` over `baton_ops`: each call is one op on tensors that share their memory by DLPack.

Owns nothing but the names: arguments go through as they are, except that the seam's groups of
tensors become the ops' own. Which stream the ops use is the framework's matter, see its device.
Knows no framework and no step.
"""

from __future__ import annotations

import baton_ops
from baton_ops import cuda, decoder, ranks, sampling, scaled
from baton_ops import experts as mixtures
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.expert_kernels import ExpertLimits, ExpertSum, Router
from baton_worker.engine.backends.device.latent_kernels import LatentKernels
from baton_worker.engine.backends.device.lookup_kernels import Histories
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.rank_kernels import Exchange
from baton_worker.engine.backends.device.scaled_kernels import Beside, Scaled
from baton_worker.engine.backends.device.seam import (
    Accepted,
    Device,
    DraftRows,
    NextStep,
    Penalised,
    Places,
    Rotation,
    Routes,
    RowMap,
    RowParams,
    Rules,
    ScoreColumns,
    ScorePlan,
    ScoreSource,
    Seeds,
    Tensor,
)
from baton_worker.engine.backends.latent import OpsLatentKernels
from baton_worker.engine.ngram import NgramSizes


class OpsKernels:
    """See `seam.Kernels`.

    Args:
        device: whose tensors the kernels are given.

    Raises:
        DeviceError: the installed library has no code for such a device, found out before there
            are weights on it.
    """

    expert_limits = ExpertLimits(mixtures.MOST_EXPERTS, mixtures.MOST_CHOSEN, mixtures.MOST_GROUPS)
    latent: LatentKernels = OpsLatentKernels()

    def __init__(self, device: Device) -> None:
        self._device = device
        try:
            has_code = self.logprob_workspace_bytes(1, 8) > 0
        except RuntimeError as error:
            raise DeviceError(_without_code(str(error))) from error
        if not has_code:
            raise DeviceError(_without_code("its ops would run on the CPU"))
        try:
            self._launch_one()
        except RuntimeError as error:
            raise DeviceError(
                f"engine.device is 'gpu', but the installed baton-ops cannot run on {device.name} "
                f"({error}): install a build with code for this GPU; the wheel that `make "
                "ops-cuda-fat` builds has some from compute capability 8.0 on"
            ) from error

    def embed(self, table: Tensor, tokens: Tensor, out: Tensor) -> None:
        """See `Kernels.embed`."""
        decoder.embed_into(table, tokens, out)

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `Kernels.matmul`."""
        decoder.matmul_into(x, weight, out)

    def gate_up_silu(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `Kernels.gate_up_silu`."""
        decoder.gate_up_silu_into(x, weight, out)

    def add_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """See `Kernels.add_norm`."""
        decoder.add_norm_into(x, residual, weight, eps, out)

    def rope_store(
        self, qkv: Tensor, rotation: Rotation, places: Places, kv: Tensor, layer: int, query: Tensor
    ) -> None:
        """See `Kernels.rope_store`."""
        decoder.rope_store_into(qkv, rotation, places, kv, layer, query)

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        tables: Tensor,
        contexts: Tensor,
        scale: float,
        out: Tensor,
        scratch: Tensor,
    ) -> None:
        """See `Kernels.attend`."""
        decoder.attend_into(query, kv, layer, tables, contexts, scale, out, scratch)

    def attention_scratch_bytes(
        self, n_heads: int, n_kv_heads: int, head_dim: int, sequences: int, tokens: int, width: int
    ) -> int:
        """See `Kernels.attention_scratch_bytes`."""
        return decoder.attention_scratch_bytes(
            n_heads, n_kv_heads, head_dim, sequences, tokens, width
        )

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """See `Kernels.gather`."""
        decoder.gather_into(x, rows, out)

    def broken_rows(self, x: Tensor, out: Tensor) -> None:
        """See `Kernels.broken_rows`."""
        decoder.broken_rows_into(x, out)

    def process(
        self,
        logits: Tensor,
        rows: RowMap,
        state: Penalised,
        rules: Rules,
        processed: Tensor,
        broken: Tensor,
    ) -> None:
        """See `Kernels.process`."""
        sampling.process_into(
            logits,
            rows.cu_rows,
            sampling.Penalised(*state),
            sampling.Rules(*rules),
            processed,
            broken,
        )

    def argmax(self, logits: Tensor, token: Tensor, broken: Tensor) -> None:
        """See `Kernels.argmax`."""
        sampling.argmax_into(logits, token, broken)

    def probabilities(
        self, logits: Tensor, params: RowParams, probs: Tensor, broken: Tensor
    ) -> None:
        """See `Kernels.probabilities`."""
        sampling.probabilities_into(logits, sampling.RowParams(*params), probs, broken)

    def uniforms(self, seeds: Tensor, positions: Tensor, rows: RowMap, out: Tensor) -> None:
        """See `Kernels.uniforms`."""
        sampling.uniforms_into(seeds, positions, rows.cu_rows, out)

    def verify_greedy(self, target: Tensor, drafts: DraftRows, out: Accepted) -> None:
        """See `Kernels.verify_greedy`."""
        cuda.verify_greedy_into(target, cuda.Drafts(*drafts), cuda.Accepted(*out))

    def verify_sampled(
        self, probs: Tensor, uniform: Tensor, drafts: DraftRows, out: Accepted
    ) -> None:
        """See `Kernels.verify_sampled`."""
        cuda.verify_sampled_into(probs, uniform, cuda.Drafts(*drafts), cuda.Accepted(*out))

    def count_tokens(self, accepted: Accepted, state: Penalised) -> None:
        """See `Kernels.count_tokens`."""
        sampling.count_tokens_into(cuda.Accepted(*accepted), state.slot, state.counts, state.seen)

    def scatter_tokens(
        self, accepted: Accepted, count: Tensor, starts: Tensor, tokens: Tensor
    ) -> None:
        """See `Kernels.scatter_tokens`."""
        sampling.scatter_tokens_into(cuda.Accepted(*accepted), count, starts, tokens)

    def seed_drafts(self, accepted: Accepted, seeds: Seeds, ahead: int) -> None:
        """See `Kernels.seed_drafts`."""
        sampling.seed_drafts_into(cuda.Accepted(*accepted), sampling.Seeds(*seeds), ahead)

    def advance(
        self, accepted: Accepted, starts: Tensor, drafts: Tensor, fed: NextStep, out: NextStep
    ) -> None:
        """See `Kernels.advance`."""
        sampling.advance_into(
            cuda.Accepted(*accepted),
            starts,
            drafts,
            sampling.NextStep(*fed),
            sampling.NextStep(*out),
        )

    def look_up(
        self,
        accepted: Accepted,
        histories: Histories,
        drafts: Tensor,
        n_before: int,
        sizes: NgramSizes,
    ) -> None:
        """See `LookUpKernels.look_up`."""
        sampling.look_up_into(
            cuda.Accepted(*accepted),
            sampling.Histories(*histories),
            drafts,
            n_before,
            sampling.Ngrams(sizes.shortest, sizes.longest),
        )

    def plan_scores(
        self, accepted: Accepted, rows: RowMap, k: Tensor, scale: ScoreSource, out: ScorePlan
    ) -> None:
        """See `Kernels.plan_scores`."""
        cuda.plan_into(
            cuda.Accepted(*accepted),
            rows.cu_rows,
            k,
            cuda.StepPlan(*out),
            temperature=scale.temperature,
            first_row=scale.first_row,
            top_p=scale.top_p,
        )

    def logprobs(self, logits: Tensor, plan: ScorePlan, out: ScoreColumns, work: Tensor) -> None:
        """See `Kernels.logprobs`."""
        baton_ops.logprobs_into(
            logits,
            plan.token,
            plan.k,
            tuple(out),
            offsets=(plan.row_offset, plan.topk_offset),
            row_index=plan.row_index,
            inv_temp=plan.inv_temp,
            num_rows=plan.num_rows,
            workspace=work,
        )

    def normalise_top_p(self, logits: Tensor, plan: ScorePlan, out: ScoreColumns) -> None:
        """See `Kernels.normalise_top_p`."""
        cuda.normalise_top_p_into(
            logits,
            cuda.StepPlan(*plan),
            plan.top_p,
            out.logprob,
            (out.topk_token, out.topk_logprob),
        )

    def logprob_workspace_bytes(self, rows: int, vocab_size: int) -> int:
        """See `Kernels.logprob_workspace_bytes`."""
        logits = self._device.empty((1, vocab_size), "float32")
        return baton_ops.workspace_bytes(logits, rows)

    def exchange_head_bytes(self) -> int:
        """See `RankKernels.exchange_head_bytes`."""
        return ranks.head_bytes()

    def rank_sum(self, part: Tensor, exchange: Exchange, out: Tensor) -> None:
        """See `RankKernels.rank_sum`."""
        ranks.rank_sum_into(part, ranks.Exchange(*exchange), out)

    def rank_sum_norm(
        self,
        part: Tensor,
        exchange: Exchange,
        room: Tensor,
        residual: Tensor,
        norm: Norm,
        out: Tensor,
    ) -> None:
        """See `RankKernels.rank_sum_norm`."""
        ranks.rank_sum_norm_into(part, ranks.Exchange(*exchange), room, residual, *norm, out)

    def rank_gather(self, part: Tensor, exchange: Exchange, out: Tensor) -> None:
        """See `RankKernels.rank_gather`."""
        ranks.rank_gather_into(part, ranks.Exchange(*exchange), out)

    def rank_errors(self, exchange: Exchange, out: Tensor) -> None:
        """See `RankKernels.rank_errors`."""
        ranks.rank_errors_into(ranks.Exchange(*exchange), out)

    def _launch_one(self) -> None:
        """Copy a row, which any GPU can that the library has code for."""
        table, token = self._device.zeros((1, 8), "float32"), self._device.zeros((1,), "int32")
        self.embed(table, token, self._device.empty((1, 8), "float32"))
        self._device.synchronise()

    def norm_route(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm: Norm,
        normed: Tensor,
        router: Router,
        out: Routes,
    ) -> None:
        """See `ExpertKernels.norm_route`."""
        weight, bias, experts = router
        mixtures.norm_route_into(x, residual, *norm, normed, weight, bias, experts, out)

    def expert_gate_up_silu(
        self, x: Tensor, starts: Tensor, weight: Tensor, out: Tensor, known: bool
    ) -> None:
        """See `ExpertKernels.expert_gate_up_silu`."""
        mixtures.expert_gate_up_silu_into(x, starts, weight, out, known=known)

    def expert_matmul(self, x: Tensor, starts: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `ExpertKernels.expert_matmul`."""
        mixtures.expert_matmul_into(x, starts, weight, out)

    def combine(self, made: Tensor, routes: Routes, beside: Tensor | None, out: Tensor) -> None:
        """See `ExpertKernels.combine`."""
        mixtures.combine_into(made, routes, beside, out)

    def combine_norm(self, sum_: ExpertSum, residual: Tensor, norm: Norm, out: Tensor) -> None:
        """See `ExpertKernels.combine_norm`."""
        mixtures.combine_norm_into(*sum_, residual, *norm, out)

    def quantise(self, x: Tensor, out: Scaled) -> None:
        """See `ScaledKernels.quantise`."""
        scaled.quantise_rows_into(x, *out)

    def scaled_matmul(self, x: Scaled, weight: Scaled, out: Tensor) -> None:
        """See `ScaledKernels.scaled_matmul`."""
        scaled.scaled_matmul_into(*x, *weight, out)

    def scaled_gate_up_silu(self, x: Scaled, weight: Scaled, out: Tensor) -> None:
        """See `ScaledKernels.scaled_gate_up_silu`."""
        scaled.scaled_gate_up_silu_into(*x, *weight, out)

    def scaled_expert_gate_up_silu(
        self, x: Scaled, row: Tensor, starts: Tensor, weight: Scaled, out: Tensor
    ) -> None:
        """See `ScaledKernels.scaled_expert_gate_up_silu`."""
        scaled.scaled_expert_gate_up_silu_into(*x, row, starts, *weight, out)

    def quantise_matmul(self, x: Tensor, room: Scaled, weight: Scaled, out: Tensor) -> None:
        """See `ScaledKernels.quantise_matmul`."""
        scaled.quantise_matmul_into(x, *room, *weight, out)

    def quantise_gate_up_silu(self, x: Tensor, room: Scaled, weight: Scaled, out: Tensor) -> None:
        """See `ScaledKernels.quantise_gate_up_silu`."""
        scaled.quantise_gate_up_silu_into(x, *room, *weight, out)

    def quantise_expert_gate_up_silu(
        self,
        x: Tensor,
        room: Scaled,
        row: Tensor,
        starts: Tensor,
        weight: Scaled,
        out: Tensor,
        beside: Beside | None,
    ) -> None:
        """See `ScaledKernels.quantise_expert_gate_up_silu`."""
        run = scaled.quantise_expert_gate_up_silu_into
        run(x, *room, row, starts, *weight, out, _flat(beside))

    def quantise_expert_matmul(
        self,
        x: Tensor,
        room: Scaled,
        starts: Tensor,
        weight: Scaled,
        out: Tensor,
        beside: Beside | None,
    ) -> None:
        """See `ScaledKernels.quantise_expert_matmul`."""
        run = scaled.quantise_expert_matmul_into
        run(x, *room, starts, *weight, out, _flat(beside))


def _flat(beside: Beside | None) -> tuple[Tensor, ...] | None:
    """Return what `quantise_matmul_into` takes."""
    if beside is None:
        return None
    return beside.x, *beside.room, *beside.weight, beside.out


def _without_code(why: str) -> str:
    return (
        "engine.device is 'gpu', but the installed baton-ops was built without CUDA code "
        f"({why}): install the wheel that `make ops-cuda-fat` builds, or set engine.device to 'cpu'"
    )
