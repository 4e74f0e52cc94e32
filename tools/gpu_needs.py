"""What a machine must have before the GPU suite or a benchmark runs on it, and how to get it.

Owns the lists of packages and programs. Builds and runs nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter

NEEDS = {
    "tvm_ffi": "apache-tvm-ffi",
    "anyio": "anyio",
    "google_crc32c": "google-crc32c",
    "httptools": "httptools",
    "httpx": "httpx",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Distributions by the module that they bring."""
PROGRAMS = {"nvcc": "the CUDA toolkit", "cmake": "CMake"}


def missing_modules() -> list[str]:
    """Return the distributions that this Python lacks."""
    return [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]


def what_is_missing(builds: bool) -> str:
    """Return all that must be there first and how to get it, "" for nothing."""
    found = []
    if problem := missing_device():
        found.append(problem)
    absent = [what for name, what in PROGRAMS.items() if builds and not shutil.which(name)]
    if absent:
        found.append(f"not on the PATH: {' and '.join(absent)}")
    modules = missing_modules()
    if modules:
        command = [sys.executable, "-m", "pip", "install", "-c", "constraints.txt", *modules]
        found.append(f"Python packages are missing; get them with\n\n  {' '.join(command)}\n")
    return "\n[gpu] ".join(found)


def missing_device() -> str:
    """Return why nothing can run on a GPU here, "" for nothing."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch with CUDA is missing: this needs a machine that has it"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch finds no CUDA device on this machine"


def too_few_gpus(wanted: int) -> str:
    """Return that there are fewer of one kind than are asked for, "" where there are enough."""
    import torch

    cuda = torch.cuda
    kinds = Counter(cuda.get_device_name(index) for index in range(cuda.device_count()))
    kind, count = kinds.most_common(1)[0]
    if count >= wanted:
        return ""
    return f"{wanted} GPUs of one kind are needed, this machine has {count}: {kind}"
