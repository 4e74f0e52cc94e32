"""Two roles' templates as one pod's: nothing is lost or guessed, and order does not matter."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.models.pair_template import UnlikeTemplatesError, pair_template

words = st.text("abc", min_size=1, max_size=3)
values = st.recursive(
    words | st.integers(0, 3) | st.booleans(),
    lambda inner: st.dictionaries(words, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=6,
)
named = st.lists(
    st.builds(lambda name, rest: {**rest, "name": name}, words,
              st.dictionaries(words, values, max_size=2)),
    max_size=3, unique_by=lambda item: item["name"],
)  # fmt: skip
pods = st.fixed_dictionaries(
    {}, optional={"volumes": named, "containers": named, "other": values,
                  "tolerations": st.lists(values, max_size=2),
                  "nodeSelector": st.dictionaries(words, words, max_size=2)},
)  # fmt: skip
templates = st.fixed_dictionaries({}, optional={"spec": pods, "metadata": values})


def joined(prefill, decode):
    return pair_template({"prefill": prefill, "decode": decode})


def same(one, other):
    """Whether two templates say the same, in whatever order their lists are."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        left = list(other)
        for item in one:
            found = next((each for each in left if same(item, each)), None)
            if found is None and item not in left:
                return False
            left.remove(item if found is None else found)
        return not left
    return one == other


@pytest.mark.hypothesis
@given(template=templates)
def test_what_one_role_says_alone_is_said_of_the_pod(template):
    before = copy.deepcopy(template)
    assert joined(template, {}) == joined({}, template) == template
    assert joined(template, template) == template
    assert template == before, "a spec is nobody's to change"


@pytest.mark.hypothesis
@given(prefill=templates, decode=templates)
def test_what_is_said_by_both_is_the_same_either_way_or_refused_either_way(prefill, decode):
    try:
        one = joined(prefill, decode)
    except UnlikeTemplatesError:
        with pytest.raises(UnlikeTemplatesError):
            joined(decode, prefill)
        return
    assert same(one, joined(decode, prefill))
    for template in (prefill, decode):
        assert joined(one, template) == one, "it holds all that each of them says"


def test_the_worker_of_each_role_stays_its_own():
    worker = {"name": "worker", "env": [{"name": "A", "value": "1"}]}
    other = {"name": "worker", "env": [{"name": "A", "value": "2"}]}
    made = joined({"spec": {"containers": [worker]}}, {"spec": {"containers": [other]}})
    assert [(c["name"], c["env"][0]["value"]) for c in made["spec"]["containers"]] == [
        ("prefill", "1"),
        ("decode", "2"),
    ]


def test_a_volume_may_be_mounted_at_several_places():
    def side(*places):
        mounts = [{"name": "data", "mountPath": place} for place in places]
        return {"spec": {"containers": [{"name": "side", "volumeMounts": mounts}]}}

    assert joined(side("/a", "/b"), side("/c", "/a")) == side("/a", "/b", "/c")


class Counted(dict):
    """An item that counts how often it is compared with another."""

    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return super().__eq__(other)

    __hash__ = None


@pytest.mark.parametrize("field", ["tolerations", "volumes"])
def test_lists_as_long_as_an_object_has_room_for_are_joined_item_by_item(field):
    """Each with each would hold the operator up for a minute, and cost it the Lease."""
    count = 300

    def template(role):
        items = [Counted(name=f"{role}{number}") for number in range(count)]
        return {"spec": {field: items}}

    Counted.comparisons = 0
    pod = joined(template("p"), template("d"))["spec"]
    assert len(pod[field]) == 2 * count
    assert Counted.comparisons <= 4 * count
