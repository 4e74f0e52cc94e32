"""A worker and ops of different releases: refused before a model is read, with both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton_ops import _library
from baton_ops.interface import INTERFACE
from baton_testing.tiny_model import TINY_MODEL
from baton_worker import __version__, ops_interface
from baton_worker.config import ConfigError
from baton_worker.readiness import EXIT_BAD_CONFIG


def start_decode(ops: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a decode worker for which `ops` is the folder in which Python finds `baton_ops`."""
    config = tmp_path / "decode.yaml"
    config.write_text(f"model: {{path: {TINY_MODEL}}}\n")
    path = os.pathsep.join([str(ops), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "baton_worker.main", "decode", "--config", str(config)],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": path},
    )


@pytest.mark.parametrize(("told", "has"), [(None, 0), (INTERFACE + 1, INTERFACE + 1)])
def test_other_ops_are_refused_with_both_versions(
    tmp_path: Path, told: int | None, has: int
) -> None:
    """They have nothing that the engine imports: whoever imports it first ends in a traceback."""
    package = tmp_path / "site" / "baton_ops"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if told is not None:
        (package / "interface.py").write_text(f"INTERFACE = {told}\n")
    ended = start_decode(package.parent, tmp_path)
    assert ended.returncode == EXIT_BAD_CONFIG, ended.stderr
    assert f"baton-worker {__version__} calls interface {INTERFACE} of baton-ops" in ended.stderr
    assert f"has interface {has}: install the baton-ops of this" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("of_library", [lambda self: 7, None])
def test_a_library_that_was_built_from_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, of_library: object
) -> None:
    functions = {} if of_library is None else {"interface": of_library}
    built = type("Module", (), functions)()
    monkeypatch.setattr(_library, "load_lib_module", lambda *names: built)
    has = 0 if of_library is None else 7
    with pytest.raises(
        RuntimeError, match=rf"has interface {has}, .* of interface {INTERFACE}: build"
    ):
        _library.library.__wrapped__()


def test_a_library_that_cannot_be_loaded_is_a_fault_of_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def isa() -> str:
        raise RuntimeError("the native library of baton-ops has interface 0")

    monkeypatch.setattr("baton_ops.isa", isa)
    with pytest.raises(ConfigError, match=r"baton-ops 0.*: the native library .* interface 0"):
        ops_interface.require_ops()


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('libtvm_ffi.so: cannot open shared object file')",
        "ModuleNotFoundError('No module named x', name='tvm_ffi.core')",
        "OSError('libtvm_ffi.so: undefined symbol: TVMFFI')",
        "RuntimeError('Cannot find libraries: libtvm_ffi.so')",
        "ValueError('numpy.dtype size changed')",
    ],
)
def test_a_broken_tvm_ffi_is_told_in_a_line(tmp_path: Path, error: str) -> None:
    """Whatever its import says, and it loads a library of its own: the ops stand on it."""
    package = tmp_path / "site" / "tvm_ffi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise {error}\n")
    ended = start_decode(package.parent, tmp_path)
    assert ended.returncode == EXIT_BAD_CONFIG, ended.stderr
    assert "baton-ops cannot be imported: " in ended.stderr
    assert error.partition("'")[2].partition("'")[0] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_ops_of_this_checkout_are_those_that_the_worker_calls() -> None:
    assert ops_interface.NEEDED == INTERFACE
    assert _library.library().interface() == INTERFACE
    ops_interface.require_ops()
