"""Templates that mean the same make one revision, however they are spelled, and others another."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import worker_template
from baton_operator.children.revision import revision_name
from baton_operator.models import PDDeploymentSpec

OWNER = Owner("ns", "chat", "uid-1")
EMPTY = {
    "command": [],
    "args": [],
    "startupProbe": {},
    "livenessProbe": {},
    "readinessProbe": {},
    "capabilities": {"securityContext": {"capabilities": {}}},
    "no capability dropped": {"securityContext": {"capabilities": {"drop": []}}},
    "seccompProfile": {"securityContext": {"seccompProfile": {}}},
}
NULLS = [*(key for key in EMPTY if " " not in key), "terminationMessagePolicy", "env", "resources"]


def spec_of(**container):
    template = {"spec": {"containers": [{"name": "worker", **container}]}}
    return spec_with(template)


def spec_with(template):
    roles = [{"name": "prefill", "template": template}, {"name": "decode"}]
    body = {"image": "worker:1", "model": {"servedName": "m", "path": "/m"}, "roles": roles}
    return msgspec.convert(body, PDDeploymentSpec)


def limited(**limits):
    return revision_name(spec_of(resources={"limits": limits}))


def rendered(spec):
    return worker_template(OWNER, spec, spec.role("prefill"), "r1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.2", "200m"), ("1Gi", "1024Mi"), ("1e3", "1k"), ("1E3", "1000"), ("+1", "1"),
        (".5", "0.5"), (" 2 ", "2"), ("1.", "1"), ("2", 2), ("1.50", 1.5),
        ("1e-3", "1m"), ("1E", "1000P"),
    ],
)  # fmt: skip
def test_a_quantity_is_the_same_in_each_spelling(one, other):
    assert limited(cpu=one) == limited(cpu=other)


@pytest.mark.parametrize(
    ("refused", "mended"),
    [
        ("1_000", "1000"), ("512K", "512"), ("512mi", "512"), ("1K", "1"), ("\uff11", "1"),
        ("1 Gi", "1Gi"),
    ],
)  # fmt: skip
def test_a_quantity_that_the_server_refuses_is_another_than_what_it_is_mended_to(refused, mended):
    """The record of a revision is what it was first made from: the mended one would not be had."""
    assert limited(cpu=refused) != limited(cpu=mended)


@pytest.mark.parametrize(
    "value",
    ["1e9999999", "1e-9999999", "1e999999Ki", "NaN", "Infinity", "1e400", True, None, [], {}],
)
def test_what_is_no_quantity_of_use_makes_a_revision_all_the_same(value):
    assert limited(cpu=value)


def test_quantities_of_many_digits_take_no_memory():
    """A plain number of `1e999999` has a megabyte, and an object has room for twenty thousand."""
    spec = spec_of(resources={"limits": {f"x/{n}": "1e999999" for n in range(100)}})
    tracemalloc.start()
    try:
        revision_name(spec)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("key", EMPTY)
def test_an_empty_field_is_another_wish_than_none_where_pods_have_a_default(key):
    value = EMPTY[key]
    empty = spec_of(**(value if "securityContext" in value else {key: value}))
    assert rendered(empty) != rendered(spec_of())
    assert revision_name(empty) != revision_name(spec_of())


@pytest.mark.parametrize("key", ["env", "resources", "volumeMounts", "securityContext"])
def test_an_empty_field_is_none_elsewhere(key):
    empty = spec_of(**{key: [] if key in ("env", "volumeMounts") else {}})
    assert revision_name(empty) == revision_name(spec_of())


@pytest.mark.parametrize("key", ["command", "args", "livenessProbe"])
@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_an_empty_field_of_a_container_of_the_users_is_none(key, where):
    """It has no default of ours, so its pods are the same and must not be made anew."""
    worker, side = {"name": "worker"}, {"name": "side", "image": "side:1"}

    def named(beside):
        ours = {"containers": [worker]}
        ours[where] = [*ours.get(where, []), beside]
        return revision_name(spec_with({"spec": ours}))

    assert named({**side, key: [] if key != "livenessProbe" else {}}) == named(side)


def test_a_hook_that_earlier_operators_dropped_makes_a_revision():
    hook = {"postStart": {"exec": {"command": ["true"]}}}
    assert revision_name(spec_of(lifecycle=hook)) != revision_name(spec_of())
    assert revision_name(spec_of(lifecycle={})) == revision_name(spec_of())


def test_a_selector_without_a_value_selects():
    """In a map of texts the server reads null as the empty text."""
    spec = spec_with({"spec": {"nodeSelector": {"gpu": None}}})
    assert rendered(spec)["spec"]["nodeSelector"] == {"gpu": ""}


@pytest.mark.parametrize("key", NULLS)
def test_a_null_is_no_wish(key):
    is_of_context = key in ("capabilities", "seccompProfile")
    null = spec_of(**({"securityContext": {key: None}} if is_of_context else {key: None}))
    assert rendered(null) == rendered(spec_of())
    assert revision_name(null) == revision_name(spec_of())


@pytest.mark.parametrize("key", ["serviceAccountName", "securityContext", "nodeSelector"])
def test_a_null_of_the_pod_is_no_wish(key):
    null, none = spec_with({"spec": {key: None}}), spec_with({"spec": {}})
    assert rendered(null) == rendered(none)
    assert revision_name(null) == revision_name(none)
