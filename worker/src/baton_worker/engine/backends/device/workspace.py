"""The device's memory between the launches of a step: allocated once, used by every step.

Owns its sizes and its views by rows. Nothing here lives from one step to the next but what kernels
ask to be left alone (attention's scratch, the logprob op's workspace). Knows no request.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.backends.device.chain import ChainMemory, ChainSpace
from baton_worker.engine.backends.device.products import ScaledSpace, scaled_space
from baton_worker.engine.backends.device.seam import (
    Device,
    DType,
    Kernels,
    NextStep,
    Routes,
    ScorePlan,
    Tensor,
)
from baton_worker.engine.model.shape import ModelShape


class Sizes(NamedTuple):
    """The largest step.

    Attributes:
        tokens: flat tokens.
        sequences: with a table.
        decoded: flat tokens of the sequences that decode.
        rows: of logits that tokens are chosen from.
        positions: that a table covers.
        prompt_rows: of logits that a prompt's tokens are scored from at once.
        n_mtp: MTP layers.
    """

    tokens: int
    sequences: int
    decoded: int
    rows: int
    positions: int
    prompt_rows: int
    n_mtp: int = 0


class TokenSpace(NamedTuple):
    """Memory of N flat tokens, E.

    Attributes:
        residual: [N, H], the stream between layers.
        normed: [N, H]. added: [N, H], what a layer adds to the stream.
        final: [N, H], the main model's output behind its final norm.
        pair: [N, 2 H], what the MTP layer projects.
        qkv: [N, (Hq + 2 Hkv) D]. query, attended: [N, Hq, D]; attended_rows: [N, Hq D], the same.
            With MLA what its input is projected to, its folded queries, and its values.
        activated: [N, I], behind the gate.
        experts: of models that have some.
        latent: of models with MLA.
        chained: [N, H], what an MTP layer hands the next one, normed; None where there is one.
        scaled: of quantised models; one for all N.
    """

    residual: Tensor
    normed: Tensor
    added: Tensor
    final: Tensor
    pair: Tensor
    qkv: Tensor
    query: Tensor
    attended: Tensor
    attended_rows: Tensor
    activated: Tensor
    experts: ExpertSpace | None = None
    latent: LatentSpace | None = None
    chained: Tensor | None = None
    scaled: ScaledSpace | None = None


class LatentSpace(NamedTuple):
    """Memory of N flat tokens in multi-head latent attention, E.

    Attributes:
        normed: [N, q_rank]; queries: [N, Hq * query_size]; None where queries are not compressed.
        attended: [N, Hq, kv_rank].
    """

    normed: Tensor | None
    queries: Tensor | None
    attended: Tensor


class ExpertSpace(NamedTuple):
    """Memory of N flat tokens in a mixture, C experts each.

    Attributes:
        routes: theirs.
        spread: E[N * C, H], each token's row at the places of its pairs.
        activated: E[N * C, I], behind the gate of an expert of width I.
        made: E[N * C, H], by experts.
        shared: E[N, width of shared experts]; beside: E[N, H], by these; None where there are none.
            Where they are as wide as an expert these lie right behind activated and made.
    """

    routes: Routes
    spread: Tensor
    activated: Tensor
    made: Tensor
    shared: Tensor | None
    beside: Tensor | None


class SequenceSpace(NamedTuple):
    """Memory of B sequences: hidden, normed E[B, H]; rows, positions, contexts i32[B]."""

    hidden: Tensor
    normed: Tensor
    rows: Tensor
    positions: Tensor
    contexts: Tensor


class RowSpace(NamedTuple):
    """Memory of R rows.

    Attributes:
        hidden: E[R, H]. logits: f32[R, V]. processed: f32[R, V], right behind. both: the two.
        probs: f32[R, V]. target: i32[R]. uniform: f64[R].
        scores: a plan for R tokens, its offsets aside.
    """

    hidden: Tensor
    logits: Tensor
    processed: Tensor
    both: Tensor
    probs: Tensor
    target: Tensor
    uniform: Tensor
    scores: ScorePlan


class NextSpace:
    """What the step behind a step feeds, told by the device: it outlives the step."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._flat = [device.zeros((sizes.decoded,), "int32") for _ in range(2)]
        self._each = [device.zeros((sizes.sequences,), "int32") for _ in range(3)]
        self._draws = device.zeros((sizes.sequences,), "int64")
        self._draft = device.zeros((4 * sizes.rows,), "uint8")

    def of(self, sequences: int, q_len: int, n_drafts: int) -> NextStep:
        """Return it for so many sequences, absent ones included, flat tokens and drafts of each.

        q_len 0: nobody decodes.
        """
        n_drafts = max(n_drafts, 0)
        rows = self._device.rows
        columns = max(n_drafts, 1)
        tokens, position = (rows(t, 0, sequences * max(q_len, 1)) for t in self._flat)
        contexts, first, count = (rows(t, 0, sequences) for t in self._each)
        return NextStep(
            tokens=tokens,
            position=position,
            contexts=contexts,
            first=first,
            count=count,
            draws=rows(self._draws, 0, sequences),
            draft=self._device.view(self._draft, 0, (sequences, columns), "int32"),
        )


class Workspace:
    """The memory, and its parts for a step's sizes.

    Raises:
        DeviceError: the device has less.
    """

    def __init__(
        self, device: Device, kernels: Kernels, model_shape: ModelShape, dtype: DType, sizes: Sizes
    ) -> None:
        self._device = device
        self.sizes = sizes
        self._tokens = _token_space(device, model_shape, dtype, sizes.tokens)
        hidden = (sizes.tokens, model_shape.hidden_size)
        self._chained = device.empty(hidden, dtype) if sizes.n_mtp > 1 else None
        self._chain = ChainMemory(device, sizes.sequences) if sizes.n_mtp > 1 else None
        self._experts = _expert_space(device, model_shape, dtype, sizes.tokens)
        self._latent = _latent_space(device, model_shape, dtype, sizes.tokens)
        self._scaled = scaled_space(device, model_shape, sizes.tokens)
        self._n_chosen = model_shape.experts.chosen if model_shape.experts else 0
        self._sequences = _sequence_space(device, model_shape, dtype, sizes.sequences)
        self._hidden = device.empty((sizes.rows, model_shape.hidden_size), dtype)
        # Room for the processed copy of any number of rows right behind the raw ones.
        n_logits = max(2 * sizes.rows, sizes.prompt_rows)
        self._logits = device.empty((n_logits, model_shape.vocab_size), "float32")
        self._probs = device.empty((sizes.rows, model_shape.vocab_size), "float32")
        self._target = device.empty((sizes.rows,), "int32")
        self._uniform = device.empty((sizes.rows,), "float64")
        self._scores = _score_plan(device, sizes.rows)
        self.next = NextSpace(device, sizes)
        self.next_with_found = NextSpace(device, sizes)
        self.attention = device.zeros((_attention_bytes(kernels, model_shape, sizes),), "uint8")
        most_scored = max(sizes.rows, sizes.sequences, sizes.prompt_rows)
        self.logprobs = device.zeros(
            (kernels.logprob_workspace_bytes(most_scored, model_shape.vocab_size),), "uint8"
        )

    def tokens(self, count: int) -> TokenSpace:
        """Return the memory of so many flat tokens."""
        rows = self._device.rows
        parts = (rows(t, 0, count) for t in self._tokens[: TokenSpace._fields.index("experts")])
        return TokenSpace(*parts)._replace(
            experts=self._experts_of(count),
            latent=self._latent_of(count),
            chained=None if self._chained is None else rows(self._chained, 0, count),
            scaled=self._scaled,
        )

    def chain(self, count: int) -> ChainSpace:
        """Return the memory of so many sequences between two MTP layers."""
        assert self._chain is not None, "memory was made for one MTP layer"
        return self._chain.of(count)

    def _latent_of(self, count: int) -> LatentSpace | None:
        space = self._latent
        if space is None:
            return None
        return LatentSpace(*(t if t is None else self._device.rows(t, 0, count) for t in space))

    def _experts_of(self, count: int) -> ExpertSpace | None:
        space, rows, n_pairs = self._experts, self._device.rows, count * self._n_chosen
        if space is None:
            return None
        routes = space.routes
        shared, beside = space.shared, space.beside
        if shared is space.activated:  # behind however many pairs there are
            shared, beside = (rows(each, n_pairs, n_pairs + count) for each in (shared, space.made))
        elif shared is not None and beside is not None:
            shared, beside = rows(shared, 0, count), rows(beside, 0, count)
        return ExpertSpace(
            routes=Routes(
                products=rows(routes.products, 0, count),
                expert=rows(routes.expert, 0, n_pairs),
                weight=rows(routes.weight, 0, n_pairs),
                place=rows(routes.place, 0, n_pairs),
                row=rows(routes.row, 0, n_pairs),
                starts=routes.starts,
            ),
            spread=rows(space.spread, 0, n_pairs),
            activated=rows(space.activated, 0, n_pairs),
            made=rows(space.made, 0, n_pairs),
            shared=shared,
            beside=beside,
        )

    def sequences(self, count: int) -> SequenceSpace:
        """Return the memory of so many sequences."""
        return SequenceSpace(*(self._device.rows(t, 0, count) for t in self._sequences))

    def rows(self, count: int) -> RowSpace:
        """Return the memory of so many rows of logits."""
        rows = self._device.rows
        return RowSpace(
            hidden=rows(self._hidden, 0, count),
            logits=rows(self._logits, 0, count),
            processed=rows(self._logits, count, 2 * count),
            both=rows(self._logits, 0, 2 * count),
            probs=rows(self._probs, 0, count),
            target=rows(self._target, 0, count),
            uniform=rows(self._uniform, 0, count),
            scores=self._scores_of(count),
        )

    def _scores_of(self, count: int) -> ScorePlan:
        """Return the plan's columns of so many tokens; offsets are another's."""
        plan, rows = self._scores, self._device.rows
        return plan._replace(
            row_index=rows(plan.row_index, 0, count),
            token=rows(plan.token, 0, count),
            k=rows(plan.k, 0, count),
            inv_temp=rows(plan.inv_temp, 0, count),
            top_p=rows(plan.top_p, 0, count),
        )

    def prompt_logits(self, count: int) -> Tensor:
        """Return f32[n, V] for rows of a prompt."""
        return self._device.rows(self._logits, 0, count)


def _token_space(device: Device, model_shape: ModelShape, dtype: DType, count: int) -> TokenSpace:
    def rows(width: int) -> Tensor:
        return device.empty((count, width), dtype)

    n_bytes = count * model_shape.o_size * (2 if dtype == "bfloat16" else 4)
    attended = device.empty((n_bytes,), "uint8")
    n_heads = model_shape.n_heads
    return TokenSpace(
        residual=rows(model_shape.hidden_size),
        normed=rows(model_shape.hidden_size),
        added=rows(model_shape.hidden_size),
        final=rows(model_shape.hidden_size),
        pair=rows(2 * model_shape.hidden_size),
        qkv=rows(sum(model_shape.projected_sizes)),
        query=device.empty((count, n_heads, model_shape.head_dim), dtype),
        attended=device.view(attended, 0, (count, n_heads, model_shape.o_size // n_heads), dtype),
        attended_rows=device.view(attended, 0, (count, model_shape.o_size), dtype),
        activated=rows(model_shape.intermediate_size),
    )


def _latent_space(
    device: Device, model_shape: ModelShape, dtype: DType, count: int
) -> LatentSpace | None:
    mla, n_heads = model_shape.mla, model_shape.n_heads
    if mla is None:
        return None
    width = n_heads * mla.query_size
    return LatentSpace(
        normed=device.empty((count, mla.q_rank), dtype) if mla.q_rank else None,
        queries=device.empty((count, width), dtype) if mla.q_rank else None,
        attended=device.empty((count, n_heads, mla.kv_rank), dtype),
    )


def _expert_space(
    device: Device, model_shape: ModelShape, dtype: DType, count: int
) -> ExpertSpace | None:
    experts, hidden = model_shape.experts, model_shape.hidden_size
    if experts is None:
        return None
    n_pairs, shared_size = count * experts.chosen, experts.shared_size
    is_alike = shared_size == experts.intermediate_size
    n_made = n_pairs + (count if is_alike else 0)
    activated = device.empty((n_made, experts.intermediate_size), dtype)
    made = device.empty((n_made, hidden), dtype)
    shared, beside = (activated, made) if is_alike else (None, None)
    if shared_size and not is_alike:
        shared = device.empty((count, shared_size), dtype)
        beside = device.empty((count, hidden), dtype)
    return ExpertSpace(
        routes=Routes(
            products=device.empty((count, experts.count), "float32"),
            expert=device.empty((n_pairs,), "int32"),
            weight=device.empty((n_pairs,), "float32"),
            place=device.empty((n_pairs,), "int32"),
            row=device.empty((n_pairs,), "int32"),
            starts=device.empty((experts.count + 1,), "int32"),
        ),
        spread=device.empty((n_pairs, hidden), dtype),
        activated=activated,
        made=made,
        shared=shared,
        beside=beside,
    )


def _sequence_space(
    device: Device, model_shape: ModelShape, dtype: DType, count: int
) -> SequenceSpace:
    return SequenceSpace(
        hidden=device.empty((count, model_shape.hidden_size), dtype),
        normed=device.empty((count, model_shape.hidden_size), dtype),
        rows=device.empty((count,), "int32"),
        positions=device.empty((count,), "int32"),
        contexts=device.empty((count,), "int32"),
    )


def _score_plan(device: Device, count: int) -> ScorePlan:
    def words(dtype: DType = "int32", n: int = count) -> Tensor:
        return device.empty((n,), dtype)

    return ScorePlan(
        row_index=words(),
        token=words(),
        k=words(),
        inv_temp=words("float32"),
        row_offset=words(n=count + 1),
        topk_offset=words(n=count + 1),
        num_rows=words(n=1),
        top_p=words("float32"),
    )


def _attention_bytes(kernels: Kernels, model_shape: ModelShape, sizes: Sizes) -> int:
    """Return what the largest decoding step needs, or the largest chunk."""
    return max(
        kernels.attention_scratch_bytes(
            model_shape.n_heads,
            model_shape.n_kv_heads,
            model_shape.head_dim,
            n_sequences,
            n_tokens,
            sizes.positions,
        )
        for n_sequences, n_tokens in ((sizes.sequences, sizes.decoded), (1, sizes.tokens))
    )
