"""Fixtures of kernels on the host: the library, compiled once, and what stands for PyTorch."""

from __future__ import annotations

import os
import shutil

import pytest

import baton_ops
from baton_testing import draws, host_cuda, host_scaled
from baton_testing.host_scaled import HostScaled, HostTurned


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> host_cuda.HostLibrary:
    """The kernels of ops/csrc/cuda, compiled for the host, or a skip."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return host_cuda.HostLibrary(host_cuda.build(compiler, tmp_path_factory.mktemp("kernels")))


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[HostScaled, HostTurned]:
    """The products of FP8 for any GPU and for Hopper, compiled for the host, or a skip."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    units = [host_scaled.UNIT, host_scaled.TURNED]
    paths = [host_cuda.build(compiler, tmp_path_factory.mktemp("scaled"), unit) for unit in units]
    return HostScaled(paths[0]), HostTurned(paths[1])


@pytest.fixture
def host(compiled: host_cuda.HostLibrary, monkeypatch: pytest.MonkeyPatch) -> host_cuda.HostLibrary:
    """The library where `baton_ops` looks for its own, with an order of threads that is drawn."""
    seed = int(draws.new_rng().integers(2**63))
    print("threads' order: seed", seed)
    compiled.set(seed)
    for module in (baton_ops.sampling, baton_ops.cuda):
        monkeypatch.setattr(module, "library", lambda: compiled)
    return compiled


@pytest.fixture
def torch(host: host_cuda.HostLibrary) -> host_cuda.HostTorch:
    """What the tests of the kernels on a GPU allocate with."""
    return host_cuda.HostTorch()
