"""A machine that cannot run a node is told why, before anything is built."""

import pytest

from baton_cluster import preflight
from baton_cluster.preflight import MachineError, missing_needs, require_machine


@pytest.fixture
def as_root(monkeypatch):
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 0)


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 1000)
    with pytest.raises(MachineError, match="root: run as root"):
        require_machine()


def test_a_missing_command_is_named(as_root, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "the command setpriv" in missing_needs()


def test_a_refused_kernel_feature_is_named_with_the_reason(as_root, monkeypatch, tmp_path):
    for name in preflight.COMMANDS:
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho {name} says no >&2\nexit 1\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    missing = missing_needs()
    assert "new namespaces: unshare says no" in missing
    assert "overlay mounts below /var/tmp: mount says no" in missing
    assert "a network bridge: ip says no" in missing
