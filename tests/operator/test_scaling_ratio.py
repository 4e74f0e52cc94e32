"""The ratio clamps external roles, and says so."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from baton_operator.planning.scaling import Clamp, Scaled, Wanted, scale

FREE = ((1, 4096), (4096, 1))


def test_excess_prefill_is_reduced():
    scaling = scale(Wanted(8, is_external=True), Wanted(2), (1, 4), (1, 1))
    assert scaling.prefill == (2, Clamp.RATIO)
    assert scaling.is_ratio_kept


def test_excess_decode_is_reduced():
    scaling = scale(Wanted(1), Wanted(9, is_external=True), (1, 4), (1, 1))
    assert scaling.decode == (4, Clamp.RATIO)


def test_the_other_role_is_raised_when_the_excess_is_static():
    scaling = scale(Wanted(8), Wanted(2, is_external=True, most=16), (1, 4), (1, 1))
    assert scaling.prefill == (8, Clamp.NONE)
    assert scaling.decode == (8, Clamp.RATIO)


def test_static_roles_out_of_ratio_are_reported_not_changed():
    scaling = scale(Wanted(8), Wanted(2), (1, 4), (1, 1))
    assert (scaling.prefill.replicas, scaling.decode.replicas) == (8, 2)
    assert not scaling.is_ratio_kept


def test_bounds_win_over_the_ratio():
    scaling = scale(Wanted(8, is_external=True, least=6), Wanted(2), (1, 4), (1, 1))
    assert scaling.prefill.replicas == 6
    assert not scaling.is_ratio_kept


sides = st.builds(
    lambda n, low, width: Wanted(n, is_external=True, least=low, most=low + width),
    st.integers(0, 64),
    st.integers(1, 16),
    st.integers(0, 64),
)
ratios = st.tuples(st.integers(1, 8), st.integers(1, 8))


@given(sides, sides, ratios, ratios)
def test_scaled_replicas_stay_in_their_bounds_and_flags_tell_the_truth(prefill, decode, low, high):
    if low[0] * high[1] > high[0] * low[1]:
        low, high = high, low
    scaling = scale(prefill, decode, low, high)
    for wanted, scaled in ((prefill, scaling.prefill), (decode, scaling.decode)):
        assert wanted.least <= scaled.replicas <= wanted.most
        if scaled.replicas != wanted.replicas:
            assert scaled.clamped_by is not Clamp.NONE
    p, d = scaling.prefill.replicas, scaling.decode.replicas
    is_kept = low[0] * d <= p * low[1] and p * high[1] <= high[0] * d
    assert scaling.is_ratio_kept == is_kept


def bounded(wanted: Wanted) -> Scaled:
    if not wanted.is_external or wanted.least <= wanted.replicas <= wanted.most:
        return Scaled(wanted.replicas, Clamp.NONE)
    return (
        Scaled(wanted.least, Clamp.MIN)
        if wanted.replicas < wanted.least
        else Scaled(wanted.most, Clamp.MAX)
    )


def brought_down(
    excess: Wanted, has: Scaled, other: Wanted, has_other: Scaled, limit: Fraction
) -> tuple[Scaled, Scaled]:
    """The words of `scale`, by trying every number of replicas instead of dividing."""
    if excess.is_external:
        fewer = range(excess.least, has.replicas)
        fitting = [n for n in fewer if n <= limit * has_other.replicas]
        if fewer:
            has = Scaled(max(fitting, default=excess.least), Clamp.RATIO)
    if other.is_external and has.replicas > limit * has_other.replicas:
        enough = [n for n in range(other.most + 1) if has.replicas <= limit * n]
        needed = min(enough, default=other.most)
        if needed > has_other.replicas:
            has_other = Scaled(needed, Clamp.RATIO)
    return has, has_other


roles = st.builds(
    lambda n, external, low, width: Wanted(n, external, low, low + width),
    st.integers(0, 24),
    st.booleans(),
    st.integers(1, 8),
    st.integers(0, 24),
)


@given(roles, roles, ratios, ratios)
def test_each_role_has_what_trying_every_number_finds(prefill, decode, low, high):
    lowest, highest = sorted((low, high), key=lambda ratio: Fraction(*ratio))
    p, d = bounded(prefill), bounded(decode)
    if p.replicas > Fraction(*highest) * d.replicas:
        p, d = brought_down(prefill, p, decode, d, Fraction(*highest))
    elif p.replicas < Fraction(*lowest) * d.replicas:
        d, p = brought_down(decode, d, prefill, p, 1 / Fraction(*lowest))
    scaling = scale(prefill, decode, lowest, highest)
    assert (scaling.prefill, scaling.decode) == (p, d)


def test_a_role_is_free_between_one_and_what_a_fleet_may_have():
    assert (Wanted(3).least, Wanted(3).most) == (1, 4096)


def test_a_number_at_its_bound_is_what_was_asked_for():
    for n in (2, 5):
        scaling = scale(Wanted(n, True, least=2, most=5), Wanted(n), *FREE)
        assert scaling.prefill == (n, Clamp.NONE)


def test_a_pair_at_its_ratio_is_left_alone():
    wanted = Wanted(6, True), Wanted(3, True)
    for bounds in (((1, 4), (2, 1)), ((2, 1), (4, 1))):
        assert [role.clamped_by for role in scale(*wanted, *bounds)[:2]] == [Clamp.NONE] * 2
