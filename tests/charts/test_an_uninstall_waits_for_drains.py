"""What an uninstall deletes may drain for as long as it says itself, and the hook waits for it."""

from __future__ import annotations

import importlib.util
import sys

import msgspec
import pytest
import yaml

from baton_operator.children.resources.drain import EXIT_HEADROOM_SECONDS
from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import gateway_template, worker_template
from baton_operator.models.crd import render_crds
from baton_operator.models.spec import PDDeploymentSpec

PATH = "/apis/baton.dev/v1alpha1/namespaces/ns/pddeployments/chat"


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def uninstall(chart, monkeypatch):
    """Return a function that loads the hook's script with the chart's environment."""

    def loaded(seconds):
        monkeypatch.setenv("WATCH_NAMESPACE", "")
        monkeypatch.setenv("TIMEOUT_SECONDS", str(seconds))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        rest = load(chart / "files" / "kube_rest.py", "kube_rest")
        monkeypatch.setitem(sys.modules, "kube_rest", rest)
        return load(chart / "files" / "uninstall.py", "uninstall")

    return loaded


class Server:
    """One object in memory, gone after as many looks as it drains for."""

    def __init__(self, spec, looks, finalizers=()):
        self.body = {
            "metadata": {"name": "chat", "namespace": "ns", "finalizers": list(finalizers)},
            "spec": spec,
        }
        self.looks, self.calls = looks, []

    def send(self, method, path, body=None, content_type="application/json"):
        self.calls.append(method)
        if method == "PATCH":
            self.body["metadata"].update(body["metadata"])
        if method == "GET":
            self.looks -= "DELETE" in self.calls
            is_held = any(f.startswith("baton.dev/") for f in self.body["metadata"]["finalizers"])
            return {"items": [self.body] if self.looks > 0 or is_held else []}
        return None


def run(module, server, monkeypatch):
    """Run the hook on a server; return its exit code and how long each wait was to be."""
    waits = []

    def wait(claim, look, seconds):
        waits.append(seconds)
        for _ in range(3):
            if look():
                return True
        raise TimeoutError(claim)

    monkeypatch.setattr(module, "Api", lambda: server)
    monkeypatch.setattr(module, "wait", wait)
    return module.main(), waits


SPECS = {
    "prefill": ({"roles": [{"drain": {"graceSeconds": 7200}}, {}]}, 7200),
    "decode": ({"roles": [{}, {"drain": {"graceSeconds": 900}}]}, 900),
    "gateways": ({"roles": [{}, {}], "gateway": {"drainSeconds": 3600}}, 3600),
    "nothing said": ({"roles": [{}, {}]}, 600),
    "short": (
        {"roles": [{"drain": {"graceSeconds": 5}}] * 2, "gateway": {"drainSeconds": 9}},
        9,
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_the_wait_is_the_longest_drain_and_what_ends_behind_it(
    case, uninstall, monkeypatch, capsys
):
    spec, drain = SPECS[case]
    code, waits = run(uninstall(0), Server(spec, looks=3), monkeypatch)
    assert (code, waits) == (0, [drain + 60])
    assert f"--timeout {drain + 120}s" in capsys.readouterr().out


def test_the_wait_covers_every_grace_period_that_pods_are_given(uninstall):
    """By the operator's own rendering, and by the definition's own defaults."""
    spec = {
        "image": "i",
        "model": {"servedName": "chat", "path": "/m"},
        "roles": [{"name": "prefill", "drain": {"graceSeconds": 700}}, {"name": "decode"}],
    }
    read = msgspec.convert(spec, PDDeploymentSpec)
    owner = Owner("ns", "chat", "uid")
    templates = [worker_template(owner, read, role, "r1") for role in read.roles]
    templates.append(gateway_template(owner, read, "file"))
    longest = max(t["spec"]["terminationGracePeriodSeconds"] for t in templates)
    patience = uninstall(0).patience({PATH: {"spec": spec}})
    assert patience >= longest + EXIT_HEADROOM_SECONDS
    crd = next(iter(yaml.safe_load_all(render_crds())))
    fields = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    gateway = fields["properties"]["gateway"]["properties"]["drainSeconds"]["default"]
    assert uninstall(0).drain_seconds({}) == gateway


def test_values_may_say_how_long(uninstall, monkeypatch):
    code, waits = run(uninstall(42), Server({"roles": [{}, {}]}, looks=2), monkeypatch)
    assert (code, waits) == (0, [42])


def test_a_finalizer_of_ours_is_taken_away_at_the_end(uninstall, monkeypatch):
    server = Server({}, looks=1, finalizers=["baton.dev/held", "foregroundDeletion"])
    code, waits = run(uninstall(1), server, monkeypatch)
    assert (code, waits) == (0, [1, 30])
    assert server.body["metadata"]["finalizers"] == ["foregroundDeletion"]


def test_what_is_still_there_is_named_and_fails(uninstall, monkeypatch, capsys):
    server = Server({}, looks=100, finalizers=["foregroundDeletion"])
    code, _ = run(uninstall(1), server, monkeypatch)
    assert code == 1
    assert (
        f"still there: {PATH}, whose finalizers are foregroundDeletion" in capsys.readouterr().out
    )


def test_nothing_to_delete_is_nothing_to_wait_for(uninstall, monkeypatch):
    code, waits = run(uninstall(0), Server({}, looks=0), monkeypatch)
    assert (code, waits) == (0, [60])
