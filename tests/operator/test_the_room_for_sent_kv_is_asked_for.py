"""`handoff.receiveBytes` reaches decode's file, makes a revision, and is refused by name."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from baton_operator.children.resources import config
from baton_operator.children.resources.meta import Owner
from baton_operator.children.revision import make_record, revision_name
from baton_operator.models import InvalidSpec, parse_deployment
from baton_operator.models.receive_room import DEFAULT_ROOM, room_bytes
from baton_operator.names import Role
from baton_worker.config import HandoffConfig, load_config

OWNER = Owner("ns", "chat", "uid-1")
METADATA = {"name": "chat", "namespace": "ns", "uid": "uid-1"}


def spec_of(handoff=None, *, decode=None, prefill=None, **changes):
    """Return the spec as a pass reads it; `decode` and `prefill` are pod templates."""
    body = {
        "image": "worker:1",
        "model": {"servedName": "chat", "path": "/m"},
        "roles": [
            {"name": "prefill", "template": prefill or {}},
            {"name": "decode", "template": decode or {}},
        ],
        "handoff": handoff or {},
    }
    return parse_deployment({"metadata": METADATA, "spec": body | changes}).spec


def limited(memory, *, name="worker", of_pod=False):
    resources = {"resources": {"limits": {"memory": memory}}}
    if of_pod:
        return {"spec": resources}
    image = {} if name == "worker" else {"image": "side:1"}
    return {"spec": {"containers": [{"name": name} | image | resources]}}


def told(spec, role):
    return yaml.safe_load(config.worker_config(OWNER, spec, role, "r1"))["handoff"]


@pytest.mark.parametrize(
    ("asked", "n_bytes"),
    [("4Gi", 4 << 30), ("1.5Gi", 3 << 29), ("6G", 6 * 10**9), ("3e9", 3 * 10**9)],
)
@pytest.mark.parametrize("placement", ["separate", "samePod"])
def test_decode_reads_the_room_and_prefill_which_has_none_is_told_nothing(
    tmp_path, placement, asked, n_bytes
):
    spec = spec_of({"receiveBytes": asked}, placement=placement)
    path = tmp_path / "config.yaml"
    path.write_text(config.worker_config(OWNER, spec, Role.DECODE, "r1"))
    assert load_config(path).handoff.receive_bytes == n_bytes
    assert "receive_bytes" not in told(spec, Role.PREFILL)


def test_the_default_is_the_workers_own_and_told_to_nobody():
    assert room_bytes(DEFAULT_ROOM) == HandoffConfig().receive_bytes
    assert "receive_bytes" not in told(spec_of(), Role.DECODE)


def test_another_room_rolls_the_pods_and_another_spelling_does_not():
    plain = spec_of()
    asked = spec_of({"receiveBytes": "4Gi"})
    assert revision_name(asked) != revision_name(plain)
    assert revision_name(asked) != revision_name(spec_of({"receiveBytes": "8Gi"}))
    assert revision_name(asked) == revision_name(spec_of({"receiveBytes": "4096Mi"}))
    assert revision_name(plain) == revision_name(spec_of({"receiveBytes": "2048Mi"}))
    files = [make_record(OWNER, spec, "r1").configs for spec in (plain, asked)]
    assert files[0]["prefill"] == files[1]["prefill"]
    assert files[0]["decode"] != files[1]["decode"]


@pytest.mark.parametrize(
    ("spec", "revision"),
    [({}, "r082ef9aa"), ({"require": "rdma"}, "r8f81dcba")],
)
def test_who_asks_for_no_room_keeps_the_revision_that_an_older_operator_made(spec, revision):
    """Else an upgrade of the operator would restart every worker."""
    assert revision_name(spec_of(spec)) == revision
    assert revision_name(spec_of(spec | {"receiveBytes": "2Gi"})) == revision


@pytest.mark.parametrize(
    "asked",
    ["", "much", "4gi", "4 Gi", " 4Gi", "4GiB", "0", "-4Gi", "1023Ki", "1025Gi", "4m", "4Zi"],
)
def test_what_is_no_room_is_refused_by_the_fields_name(asked):
    told = r"^spec: handoff\.receiveBytes must be a quantity from 1Mi to 1Ti, such as 4Gi, and is '"
    with pytest.raises(InvalidSpec, match=told):
        spec_of({"receiveBytes": asked})


@pytest.mark.parametrize("asked", ["1Mi", "1024Ki", "1Ti", "1024Gi"])
def test_the_bounds_themselves_are_rooms(asked):
    assert spec_of({"receiveBytes": asked}).handoff.receive_bytes == asked


def test_a_number_without_quotes_is_refused_by_the_fields_name():
    with pytest.raises(InvalidSpec, match=r"Expected `str`, got `int` - at `\$\.handoff\.receiveB"):
        spec_of({"receiveBytes": 4 << 30})


@pytest.mark.parametrize("limit", ["4Gi", "3999Mi", 4 << 30, "1"])
@pytest.mark.parametrize(("of_pod", "where"), [(False, r"\.containers\[0\]"), (True, "")])
def test_a_room_that_fills_the_memory_of_decode_is_refused_by_name(limit, of_pod, where):
    told = (
        rf"^spec: handoff\.receiveBytes is 4Gi, but .* limited to {limit}, .* raise the limit or "
        rf"lower handoff\.receiveBytes - at `spec\.roles\[decode\]\.template\.spec{where}"
        r"\.resources\.limits\.memory`$"
    )
    for placement in ("separate", "samePod"):
        with pytest.raises(InvalidSpec, match=told):
            spec_of(
                {"receiveBytes": "4Gi"}, decode=limited(limit, of_pod=of_pod), placement=placement
            )


@pytest.mark.parametrize(
    "templates",
    [
        {"decode": limited("4097Mi")},
        {"decode": limited("1Gi", name="side")},
        {"prefill": limited("1Gi")},
        {"prefill": limited("1Gi", of_pod=True)},
        {"decode": limited(None)},
        {"decode": limited("0")},
        {"decode": limited(0, of_pod=True)},
        {"decode": limited("unheard of")},
        {"decode": {"spec": {"containers": [{"name": "worker", "resources": ["odd"]}]}}},
    ],
)
def test_what_leaves_room_or_is_not_decodes_is_taken(templates):
    assert spec_of({"receiveBytes": "4Gi"}, **templates).handoff.receive_bytes == "4Gi"


def test_in_one_pod_a_limit_that_prefills_template_gives_it_is_decodes_too():
    told = r"- at `spec\.roles\[prefill\]\.template\.spec\.resources\.limits\.memory`$"
    with pytest.raises(InvalidSpec, match=told):
        spec_of({"receiveBytes": "4Gi"}, prefill=limited("4Gi", of_pod=True), placement="samePod")
    spec_of({"receiveBytes": "4Gi"}, prefill=limited("1Gi"), placement="samePod")


@pytest.mark.parametrize(
    ("require", "changes"),
    [("rdma", {}), ("nvlink", {"placement": "samePod", "engine": {"device": "gpu"}})],
)
def test_where_no_kv_may_be_sent_the_room_fills_no_limit(require, changes):
    spec_of({"receiveBytes": "4Gi", "require": require}, decode=limited("4Gi"), **changes)
    with pytest.raises(InvalidSpec, match=r"handoff\.receiveBytes must be a quantity"):
        spec_of({"receiveBytes": "much", "require": require}, **changes)


def test_a_small_limit_beside_the_default_that_nobody_asked_for_is_taken():
    spec_of(decode=limited("1Gi"))
    spec_of({"receiveBytes": "512Mi"}, decode=limited("1Gi"))


def test_the_schemas_default_is_the_structs():
    assert msgspec.to_builtins(spec_of().handoff) == {"require": "any", "receiveBytes": "2Gi"}
