"""The fields of config.json that tell of experts, under the names that families give them.

Owns the fields and the refusal of values that no mixture has. Which of them a family has, and what
they mean, its own file says.
"""

from __future__ import annotations

import math

import msgspec

from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.refusals import refuse


class RawExperts(msgspec.Struct, frozen=True, kw_only=True):
    """What is absent is None; a family has a default for it, or refuses."""

    num_experts: int | None = None
    num_local_experts: int | None = None
    moe_num_experts: int | list[int] | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_k: int | None = None
    moe_intermediate_size: int | list[int] | None = None
    shared_expert_intermediate_size: int | None = None
    moe_num_shared_experts: int | None = None
    n_shared_experts: int | None = None
    norm_topk_prob: bool | None = None
    moe_norm_min: float | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None
    moe_layer_start_index: int | list[int] | None = None
    moe_layer_end_index: int | list[int] | None = None
    moe_layer_interval: int | None = None
    first_k_dense_replace: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None


def count_of(name: str, value: int | list[int] | None, default: int | None = None) -> int:
    """Return a field's value, or its default.

    Raises:
        ModelShapeError: it is below 1, or there is neither, or it is one for each of several
            mixtures, as models of text and pictures have them.
    """
    found = default if value is None else value
    if not isinstance(found, int) or found < 1:
        refuse(name, found, "one number >= 1")
    return found


def check_experts(experts: Experts, n_layers: int) -> Experts:
    """Return a mixture that there can be.

    Raises:
        ModelShapeError: a size does not go with another.
    """
    if experts.chosen > experts.count:
        refuse("num_experts_per_tok", experts.chosen, f"<= the {experts.count} experts")
    if not experts.layers or not 0 <= experts.layers[0] <= experts.layers[-1] < n_layers:
        refuse("the layers with experts", list(experts.layers), f"some of 0..{n_layers - 1}")
    if not 0.0 < experts.scaling < math.inf:
        refuse("routed_scaling_factor", experts.scaling, "a number > 0")
    if not 0.0 <= experts.least_sum <= 1.0:
        refuse("moe_norm_min", experts.least_sum, "a number in 0..1")
    if experts.n_groups < 1 or experts.count % experts.n_groups:
        refuse("n_group", experts.n_groups, f"a divisor of the {experts.count} experts")
    if not 1 <= experts.n_chosen_groups <= experts.n_groups:
        refuse("topk_group", experts.n_chosen_groups, f"in 1..{experts.n_groups}")
    size = experts.count // experts.n_groups
    if experts.n_chosen_groups < experts.n_groups and size < 2:
        refuse("n_group", experts.n_groups, "groups of two experts or more")
    if experts.chosen > size * experts.n_chosen_groups:
        room = size * experts.n_chosen_groups
        refuse("num_experts_per_tok", experts.chosen, f"<= the {room} in topk_group groups")
    return experts
