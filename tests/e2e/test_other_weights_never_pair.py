"""Two checkpoints of equal shapes, tokenizer and name: no KV goes from one to the other."""

from __future__ import annotations

import shutil

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton_testing.processes import wait_until
from baton_testing.unsupervised import unsupervised


@pytest.fixture
def retrained(tmp_path, model_dir):
    """The example with other values in one tensor, in a folder of its own."""
    folder = shutil.copytree(model_dir, tmp_path / "retrained")
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj.weight"
    tensors[key] = (tensors[key] * np.float16(1.5)).astype(tensors[key].dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_prefill_hands_over_to_its_own_weights_alone(tmp_path, retrained, patience):
    with (
        unsupervised(tmp_path, {"decode-0": retrained}, decode=2) as processes,
        httpx.Client(base_url=processes.url, timeout=patience, trust_env=False) as client,
    ):
        body = {"model": "tiny-mtp", "prompt": "The licensor", "max_tokens": 4, "temperature": 0}
        for _ in range(6):
            assert client.post("/v1/completions", json=body).status_code == 200
        for name, handed in (("decode-0", 0), ("decode-1", 6)):
            processes[name].wait_metric("baton_handoff_refused_total", 0)
            processes[name].wait_metric("baton_worker_requests_total", handed)
        processes.kill("decode-1")
        said = wait_until(
            "no pair is left",
            lambda: client.get("/readyz"),
            lambda answer: answer.status_code == 503,
        ).json()
        (reason,) = said["reasons"]
        assert reason.startswith("prefill-0 and decode-0 differ in model_fingerprint (")
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "model_fingerprint" in refused.text
