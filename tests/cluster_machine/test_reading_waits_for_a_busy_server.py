"""Reading a cluster is tried again while its server has no time, and writing never is."""

import pytest

from baton_cluster import kubectl as module
from baton_cluster.kubectl import Kubectl, KubectlError

BUSY = (
    "Error from server: etcdserver: request timed out",
    "Unable to connect to the server: net/http: TLS handshake timeout",
    "dial tcp 127.0.0.1:1: connect: connection refused",
    "The connection to the server 127.0.0.1:1 was refused - did you specify the port?",
    "Error from server: etcdserver: leader changed",
)
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
echo try >> tries
if [ "$(wc -l < tries)" -gt {refusals} ]; then echo '{{"kind": "Pod"}}'; exit 0; fi
echo '{message}' >&2
exit 1
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that makes a kubectl of a server which refuses so often."""
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)

    def make(message, refusals):
        program = tmp_path / "kubectl"
        program.write_text(SCRIPT.format(message=message, refusals=refusals))
        program.chmod(0o755)
        return Kubectl(program, tmp_path / "kubeconfig")

    return make


@pytest.fixture
def tries(tmp_path):
    return lambda: len((tmp_path / "tries").read_text().split())


@pytest.mark.parametrize("message", BUSY)
def test_a_busy_server_is_asked_again(told, tries, message):
    assert told(message, 2).get("pod", "x") == {"kind": "Pod"}
    assert tries() == 3


def test_what_lasts_is_told(told, tries, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(KubectlError, match="request timed out"):
        told(BUSY[0], 9).get("pod", "x")
    assert tries() == 1


@pytest.mark.parametrize("message", ["Error from server (Forbidden): no", "error: no such flag"])
def test_an_answer_is_an_answer(told, tries, message):
    with pytest.raises(KubectlError):
        told(message, 9).get("pod", "x")
    assert tries() == 1


def test_what_is_not_there_is_none(told, tries):
    assert told("Error from server (NotFound): pods x not found", 9).get("pod", "x") is None
    assert tries() == 1


def test_writing_is_not_tried_again(told, tries):
    with pytest.raises(KubectlError):
        told(BUSY[0], 1).run("delete", "pod", "x")
    assert tries() == 1
