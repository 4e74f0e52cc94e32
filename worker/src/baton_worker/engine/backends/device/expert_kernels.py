"""What kernels do for a mixture of experts: choose, feed each expert, add what they made.

Owns the protocol. A pair is a token and one of its experts: token n's are n * C to n * C + C - 1,
the expert it wants most first, C being how many each takes. Letters otherwise are `seam`'s; X is
the number of experts, I the width of each. Knows no layer and not where the memory comes from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton_worker.engine.backends.device.operands import Tensor
from baton_worker.engine.model.experts import Experts


class Routes(NamedTuple):
    """Which experts N tokens take.

    expert i32[N * C], weight f32[N * C] of each pair. order i32[N * C]: the pairs, expert by
    expert, in each by pair; starts i32[X + 1]: where each expert's begin in it.
    """

    expert: Tensor
    weight: Tensor
    order: Tensor
    starts: Tensor


class ExpertKernels(Protocol):
    """A token's bits depend on the token alone, not on who else chose its experts.

    Attributes:
        has_experts: whether there are such kernels; where not, each call raises `DeviceError`.
    """

    has_experts: bool

    def route(
        self, x: Tensor, router: Tensor, bias: Tensor | None, experts: Experts, out: Routes
    ) -> None:
        """Choose for x E[N, H] as `experts.choose` does, by x @ router f32[X, H]^T summed in fp32
        along H. `bias` f32[X], None for none. A row with NaN chooses some experts, weighted NaN.
        """

    def expert_gate_up_silu(self, x: Tensor, routes: Routes, weight: Tensor, out: Tensor) -> None:
        """out E[N * C, I]: of each pair `gate_up_silu` of its token's row of x E[N, H] and of its
        expert's rows of `weight` E[X * 2 I, H].
        """

    def expert_matmul(self, x: Tensor, routes: Routes, weight: Tensor, out: Tensor) -> None:
        """out E[N * C, H]: of each pair `matmul` of its row of x E[N * C, I] and of its expert's
        rows of `weight` E[X * H, I].
        """

    def combine(self, made: Tensor, routes: Routes, beside: Tensor | None, out: Tensor) -> None:
        """out E[N, H] = the sum of each token's pairs of made E[N * C, H] times their weights, from
        the first on, and then of beside E[N, H] (None: nothing); in fp32, rounded once.
        """
