"""A worker that cannot compute on its GPU ends before it serves, and says what would help."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton_testing.numpy_device import NumpyDevice
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig
from baton_worker.engine import build
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends import gpu, kernels
from baton_worker.engine.backends.torch import framework

ROOT = Path(__file__).resolve().parents[3]
NO_DRIVER = "Found no NVIDIA driver on your system."


def fake_torch(version: str = "2.11.0+cu130", cuda: str | None = "13.0") -> Any:
    """PyTorch as it is where there is no device."""

    def init() -> None:
        raise RuntimeError(f"{NO_DRIVER}\nPlease check that you have one.")

    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: False, init=init),
    )


def on_a_gpu(framework: str) -> ProcessConfig:
    engine = EngineConfig(device="gpu", framework=framework)  # type: ignore[arg-type]
    return ProcessConfig(model=ModelConfig(path=str(TINY_MODEL)), engine=engine)


def test_pytorch_that_is_not_there_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        DeviceError, match=r"engine\.framework 'torch' .*pip install 'baton-worker\[torch\]'"
    ):
        build.build_engine(on_a_gpu("torch"))


@pytest.mark.parametrize("engine", [{}, {"device": "gpu", "framework": "paddle"}])
def test_paddle_that_is_not_there_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    backend = "baton_worker.engine.backends.paddle"
    for name in [name for name in sys.modules if name.startswith(f"{backend}.")]:
        monkeypatch.delitem(sys.modules, name)
    config = ProcessConfig(model=ModelConfig(path=str(TINY_MODEL)), engine=EngineConfig(**engine))
    with pytest.raises(DeviceError, match=r"engine\.device 'cpu'.*pip install 'baton-worker\["):
        build.build_engine(config)


def test_without_any_framework_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"engine\.device .*pip install 'baton-worker\[torch\]'"):
        build.build_engine(on_a_gpu("auto"))


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (fake_torch("2.8.1"), r"torch 2\.8\.1 is installed.*2\.11.*pip install"),
        (fake_torch("3.0.0a1+git"), r"torch 3\.0\.0a1\+git is installed"),
        (fake_torch(cuda=None), r"built without CUDA.*pip install"),
        (fake_torch(), rf"finds no device for CUDA 13\.0: {NO_DRIVER}; .*engine\.device"),
    ],
)
def test_pytorch_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, torch: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DeviceError, match=message):
        build.build_engine(on_a_gpu("torch"))


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]
    low, high = (".".join(map(str, version)) for version in framework._TESTED)
    assert project["optional-dependencies"]["torch"][0] == f"torch>={low},<{high}"


@pytest.mark.parametrize("answer", [0, RuntimeError("built without CUDA")])
def test_a_library_without_cuda_code_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: int | Exception
) -> None:
    def workspace_bytes(logits: Any, n_tokens: int) -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernels.baton_ops, "workspace_bytes", workspace_bytes)
    with pytest.raises(DeviceError, match=r"without CUDA code .*make ops-cuda-fat"):
        kernels.OpsKernels(NumpyDevice())


def test_a_gpu_that_the_library_has_no_code_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "embed failed: no kernel image is available for execution on the device"

    def embed_into(*tensors: Any) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(kernels.baton_ops, "workspace_bytes", lambda logits, n_tokens: 256)
    monkeypatch.setattr(kernels.decoder, "embed_into", embed_into)
    device = NumpyDevice()
    with pytest.raises(DeviceError, match=rf"{device.name} \({why}\).*make ops-cuda-fat"):
        kernels.OpsKernels(device)


def test_the_gpus_that_a_process_was_left_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=r"system\., of those that CUDA_VISIBLE_DEVICES='7'"):
        build.build_engine(on_a_gpu("torch"))


def test_importing_the_device_loads_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    importlib.reload(importlib.import_module("baton_worker.engine.backends.torch.framework"))
