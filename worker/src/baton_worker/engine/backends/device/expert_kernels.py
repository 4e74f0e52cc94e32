"""What kernels do for a mixture of experts: choose, feed each expert, add what they made.

Owns the protocol. A pair is a token and one of its experts: token n's are n * C to n * C + C - 1,
the expert it wants most first, C being how many each takes. Pairs stand sorted by expert, in each
by number, at places: so the rows of an expert lie together. Letters otherwise are `seam`'s; X is
the number of experts, I the width of each. Knows no layer and not where the memory comes from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton_worker.engine.backends.device.operands import Norm, Tensor
from baton_worker.engine.model.experts import Experts


class Routes(NamedTuple):
    """Which experts N tokens take.

    products f32[N, X], the router's. expert i32[N * C], weight f32[N * C], place i32[N * C] of each
    pair. row i32[N * C] of each place: whose token stands there. starts i32[X + 1]: where among the
    places each expert's begin.
    """

    products: Tensor
    expert: Tensor
    weight: Tensor
    place: Tensor
    row: Tensor
    starts: Tensor


class ExpertSum(NamedTuple):
    """What is to be added of a mixture: see `ExpertKernels.combine`."""

    made: Tensor
    routes: Routes
    beside: Tensor | None


class Router(NamedTuple):
    """Who chooses: weight f32[X, H], `bias` f32[X] that counts for the choice alone, the rule."""

    weight: Tensor
    bias: Tensor | None
    experts: Experts


class ExpertLimits(NamedTuple):
    """What kernels take at most: experts of a layer, those that a token takes, groups."""

    experts: int
    chosen: int
    groups: int


class ExpertKernels(Protocol):
    """A token's bits depend on the token alone, not on who else chose its experts.

    Attributes:
        expert_limits: what they take of a mixture.
    """

    expert_limits: ExpertLimits

    def norm_route(
        self,
        x: Tensor | None,
        residual: Tensor,
        norm: Norm,
        normed: Tensor,
        router: Router,
        out: Routes,
    ) -> None:
        """Do `add_norm` of x and residual to `normed` E[N, H], and choose for that as
        `experts.choose` does, by normed @ router^T summed in fp32 along H. A row with NaN chooses
        some experts, weighted NaN.
        """

    def expert_gate_up_silu(
        self, x: Tensor, starts: Tensor, weight: Tensor, out: Tensor, known: bool
    ) -> None:
        """out E[N * C, I]: of each place `gate_up_silu` of its row of x E[N * C, H] and of its
        expert's rows of `weight` E[X * 2 I, H]. A single token's x E[1, H] needs no spreading.

        `known`: `starts` may be read early, for `gate_up_silu` of the same tokens stands between
        what wrote it and this call.
        """

    def expert_matmul(self, x: Tensor, starts: Tensor, weight: Tensor, out: Tensor) -> None:
        """out E[N * C, H]: of each place `matmul` of its row of x E[N * C, I] and of its expert's
        rows of `weight` E[X * H, I]. Called behind `expert_gate_up_silu` with the same `starts`,
        which it reads early.
        """

    def combine(self, made: Tensor, routes: Routes, beside: Tensor | None, out: Tensor) -> None:
        """out E[N, H] = the sum of each token's pairs of made E[N * C, H], which stand at places,
        times their weights, from the first on, and then of beside E[N, H] (None: nothing); in fp32,
        rounded once. Places and weights are read early, as `starts` by `expert_matmul`.
        """

    def combine_norm(self, sum_: ExpertSum, residual: Tensor, norm: Norm, out: Tensor) -> None:
        """Do `combine`, and `add_norm` of what that makes and residual to out; the same bits."""
