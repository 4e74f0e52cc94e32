"""The fields of config.json that tell of experts, under the names that families give them.

Owns the fields and the refusal of values that no mixture has. Which of them a family has, and what
they mean, its own file says.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.refusals import ModelShapeError, refuse

_MOST_SCALING = 1e6
"""Published ones are 1 to 2.5; what is beyond overflows in few layers."""


class RawExperts(msgspec.Struct, frozen=True, kw_only=True):
    """What is absent is None; a family has a default for it, or refuses. One that it does not read
    must say what it would without.
    """

    num_experts: int | None = None
    num_local_experts: int | None = None
    moe_num_experts: int | list[int] | None = None
    n_routed_experts: int | list[int] | None = None
    num_experts_per_tok: int | list[int] | None = None
    moe_k: int | list[int] | None = None
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
    moe_layer_freq: int | list[int] | None = None
    scoring_func: str | None = None
    topk_method: str | None = None
    moe_gate_act: str | None = None


_SAYS_NOTHING: dict[str, object] = {
    "decoder_sparse_step": 1,
    "moe_layer_interval": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
"""What a field may be that its family does not read, beside nothing, 0 and false."""


def says_nothing(name: str, value: object) -> bool:
    """Whether a field of experts has a value that it may have in a family that does not read it."""
    return not value or value == _SAYS_NOTHING.get(name)


def refuse_others(raw: RawExperts, known: Mapping[str, object]) -> None:
    """Refuse what a config tells of experts and its family does not read.

    Args:
        known: what the family reads; not None: the one value that it takes.

    Raises:
        ModelShapeError: a field is told otherwise; the message names it and its value.
    """
    for name in RawExperts.__struct_fields__:
        value = getattr(raw, name)
        if value is None or (name in known and known[name] is None):
            continue
        wanted = known.get(name, _SAYS_NOTHING.get(name))
        if value != wanted and (name in known or value):
            refuse(name, value, "unset" if wanted is None else f"unset or {wanted!r}")


def agreed(raw: RawExperts, *names: str) -> int | None:
    """Return what a config tells under several names, None where it does not.

    Raises:
        ModelShapeError: two tell different numbers: which one counts, readers disagree about.
    """
    told = {name: getattr(raw, name) for name in names if getattr(raw, name) is not None}
    for name, value in told.items():
        for other, same in told.items():
            if value != same:
                refuse(name, value, f"unset or {same!r}, as {other} is")
    return next(iter(told.values()), None)


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


def check_experts(
    experts: Experts, n_layers: int, told_by: str, chosen_by: str = "num_experts_per_tok"
) -> Experts:
    """Return a mixture that there can be.

    Args:
        told_by, chosen_by: which fields say where it is, and how many experts a token takes.

    Raises:
        ModelShapeError: a size does not go with another.
    """
    if experts.chosen > experts.count:
        refuse(chosen_by, experts.chosen, f"<= the {experts.count} experts")
    if not experts.layers:
        raise ModelShapeError(
            f"{told_by}: no layer would have experts, supported are some of 0..{n_layers - 1}"
        )
    if not 0.0 < experts.scaling <= _MOST_SCALING:
        refuse("routed_scaling_factor", experts.scaling, f"a number > 0 and <= {_MOST_SCALING:g}")
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
        refuse(chosen_by, experts.chosen, f"<= the {room} in topk_group groups")
    return experts
