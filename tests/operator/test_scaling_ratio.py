"""The ratio clamps external roles, and says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_operator.scaling import Clamp, Wanted, scale

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
