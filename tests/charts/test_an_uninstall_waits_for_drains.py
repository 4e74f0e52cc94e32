"""What an uninstall deletes may drain for as long as it says itself, and the hook waits for it."""

from __future__ import annotations

import http.client
import importlib.util
import io
import sys
from email.message import Message
from urllib.error import HTTPError, URLError

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

    def loaded(seconds, definitions="", namespace=""):
        monkeypatch.setenv("DEFINITIONS", definitions)
        monkeypatch.setenv("WATCH_NAMESPACE", namespace)
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


class Definitions(Server):
    """A server that also has definitions, each there for some looks after it was deleted."""

    def __init__(self, looks, models=1):
        super().__init__({}, models)
        self.there, self.order = {"a.baton.dev": looks, "b.baton.dev": looks}, []

    def send(self, method, path, body=None, content_type="application/json"):
        *_, kind, name = path.split("/")
        if kind != "customresourcedefinitions":
            self.order.append((method, "model"))
            return super().send(method, path, body, content_type)
        self.order.append((method, name))
        if method == "DELETE":
            return {}
        self.there[name] -= 1
        return {} if self.there[name] > 0 else None


def test_definitions_go_when_every_model_has_gone(uninstall, monkeypatch):
    server = Definitions(looks=2)
    code, _ = run(uninstall(0, "a.baton.dev b.baton.dev"), server, monkeypatch)
    assert code == 0
    last = max(place for place, (_, what) in enumerate(server.order) if what == "model")
    deleted = [what for method, what in server.order[last + 1 :] if method == "DELETE"]
    assert deleted == ["a.baton.dev", "b.baton.dev"]
    assert ("DELETE", "a.baton.dev") not in server.order[:last]


def test_a_definition_that_stays_fails(uninstall, monkeypatch, capsys):
    code, _ = run(uninstall(0, "a.baton.dev b.baton.dev"), Definitions(looks=100), monkeypatch)
    assert code == 1
    assert "still there: a definition" in capsys.readouterr().out


def test_no_definition_goes_before_the_last_model(uninstall, monkeypatch):
    server = Definitions(looks=1, models=100)
    code, _ = run(uninstall(1, "a.baton.dev"), server, monkeypatch)
    assert code == 1
    assert {what for _, what in server.order} == {"model"}


class OthersToo(Definitions):
    """A server on which other namespaces have models, which stay."""

    def __init__(self, others):
        super().__init__(looks=2)
        self.others = [{"metadata": {"name": "m", "namespace": name}} for name in others]

    def send(self, method, path, body=None, content_type="application/json"):
        if path == "/apis/baton.dev/v1alpha1/pddeployments":
            return {"items": self.others}
        return super().send(method, path, body, content_type)


@pytest.mark.parametrize("others", [("shop",), ()], ids=["others", "nobody else"])
def test_a_release_of_one_namespace_takes_no_models_of_others_along(
    others, uninstall, monkeypatch, capsys
):
    server = OthersToo(others)
    module = uninstall(0, "a.baton.dev b.baton.dev", "ns")
    assert run(module, server, monkeypatch)[0] == 0
    deleted = [what for method, what in server.order if method == "DELETE"]
    assert deleted == ["model"] + ([] if others else ["a.baton.dev", "b.baton.dev"])
    kept = "namespaces/shop/pddeployments/m" in capsys.readouterr().out
    assert kept == bool(others)


@pytest.fixture
def rest(chart, monkeypatch):
    """The script that hooks ask the API server with; it waits for nothing."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loaded = load(chart / "files" / "kube_rest.py", "kube_rest")
    monkeypatch.setattr(loaded.time, "sleep", lambda _: None)
    return loaded


def api(rest, monkeypatch, tmp_path, answer):
    """Return an `Api` whose every request meets `answer`."""
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(rest, "ACCOUNT", tmp_path)
    monkeypatch.setattr(rest.ssl, "create_default_context", lambda **_: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "h")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")

    def urlopen(*_, **__):
        raise answer

    monkeypatch.setattr(rest.urllib.request, "urlopen", urlopen)
    return rest.Api()


def refused(code):
    return HTTPError("u", code, "words", Message(), io.BytesIO(b"why"))


@pytest.mark.parametrize(
    "answer",
    [
        refused(500), refused(503), refused(429), ConnectionResetError(), TimeoutError(),
        URLError("refused"), http.client.IncompleteRead(b""), ValueError("no JSON"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_server_that_is_replaced_meanwhile_ends_no_wait(rest, monkeypatch, tmp_path, answer):
    """An uninstall looks for up to ten minutes, and its Job has three tries."""
    server = api(rest, monkeypatch, tmp_path, answer)
    answers = [lambda: server.send("GET", "/x"), lambda: server.send("GET", "/x"), lambda: "it"]
    assert rest.wait("it is so", lambda: answers.pop(0)(), 60) == "it"


@pytest.mark.parametrize("code", [400, 401, 403, 409, 422])
def test_a_refusal_ends_a_wait_with_the_servers_words(rest, monkeypatch, tmp_path, code):
    server = api(rest, monkeypatch, tmp_path, refused(code))
    with pytest.raises(RuntimeError, match="why"):
        rest.wait("it is so", lambda: server.send("GET", "/x"), 60)
