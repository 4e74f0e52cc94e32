"""`/health` tells clients that wait for vLLM's server when to begin, and nobody anything else."""

import httpx
import pytest

from baton_worker.config import HttpConfig


def test_it_is_200_with_workers_for_requests_and_needs_no_key(start_gateway, tmp_path):
    (tmp_path / "keys").write_text("sk-one\n")
    gateway = start_gateway(api_keys_file=str(tmp_path / "keys"), health=HttpConfig())
    answer = httpx.get(f"{gateway.url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("workers", ["", "p", "d"])
def test_it_is_503_without_and_names_no_worker(start_gateway, workers):
    gateway = start_gateway(workers=workers)
    answer = httpx.get(f"{gateway.url}/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "not_ready"})
    assert httpx.get(f"{gateway.url}/healthz").status_code == 200
