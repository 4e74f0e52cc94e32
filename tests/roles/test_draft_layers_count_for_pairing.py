"""KV of several draft layers fits no worker that keeps fewer of them, so these do not pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
from safetensors.numpy import load_file, save_file

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.compatibility import process_config_hash
from baton_worker.config import (
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from baton_worker.engine.build import build_engine
from baton_worker.identity import Role
from baton_worker.roles.process import _KvAddress, _worker_info

DeviceName = Literal["cpu", "gpu", "sim"]
BY_DEVICE: dict[DeviceName, str] = {
    "cpu": "8104f61f3c9b",
    "gpu": "4fd9d3b99c2b",
    "sim": "df3891785761",
}
"""Hashes of K = 3 that workers of earlier versions told, however many draft layers they had."""


def with_draft_layers(folder: Path, count: int) -> Path:
    """Write the tiny model with its draft layer `count` times."""
    shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    config = json.loads((TINY_MODEL / "config.json").read_text())
    config["num_nextn_predict_layers"] = count
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(TINY_MODEL / "model.safetensors")
    drafting = {key: tensor for key, tensor in tensors.items() if ".mtp_" in key}
    for number in range(count):
        tensors |= {key.replace(".0.", f".{number}."): drafting[key] for key in drafting}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    return {count: with_draft_layers(root / str(count), count) for count in (1, 2, 3)}


def told(path: Path, method: SpeculativeMethod = "mtp", device: DeviceName = "cpu") -> str:
    """Return the config hash that a worker of this model tells gateways."""
    config = ProcessConfig(
        model=ModelConfig(path=str(path)),
        speculative=SpeculativeConfig(method, 0 if method == "none" else 3),
        engine=EngineConfig(device=device, max_model_len=64),
    )
    engine = build_engine(config)
    try:
        nowhere = _KvAddress("", "", "", ())
        return _worker_info(config, Role.PREFILL, engine, nowhere, "").config_hash
    finally:
        engine.close()


@pytest.mark.parametrize("method", ["mtp", "mtp_ngram"])
def test_workers_pair_whose_kv_is_of_as_many_draft_layers(
    folders: dict[int, Path], method: SpeculativeMethod
) -> None:
    hashes = {count: told(path, method) for count, path in folders.items()}
    assert hashes[1] == BY_DEVICE["cpu"]
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.parametrize(
    ("method", "device", "known"),
    [
        ("ngram", "cpu", BY_DEVICE["cpu"]),
        ("none", "cpu", "c0b8c57a12bd"),
        ("mtp", "sim", BY_DEVICE["sim"]),
    ],
)
def test_layers_that_do_not_draft_do_not_count(
    folders: dict[int, Path], method: SpeculativeMethod, device: DeviceName, known: str
) -> None:
    """A simulated model drafts with one layer, whatever the folder says."""
    assert told(folders[3], method, device) == known


@pytest.mark.parametrize("device", BY_DEVICE)
def test_one_layer_tells_the_hash_that_it_always_told(device: DeviceName) -> None:
    config = ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=SpeculativeConfig("mtp", 3),
        engine=EngineConfig(device=device),
    )
    assert process_config_hash(config, 1) == BY_DEVICE[device]
    assert process_config_hash(config, 2) != BY_DEVICE[device]
