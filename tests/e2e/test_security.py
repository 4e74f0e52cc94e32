"""With CURVE on, links and KV transfer work for those with keys; API keys guard the gateway."""

from __future__ import annotations

import httpx
import openai
import pytest


def test_a_pair_with_curve_serves_and_hands_over(start_deployment):
    with start_deployment("--curve") as deployment:
        deployment.wait_lines(3)
        reply = deployment.complete(prompt="The license", max_tokens=12, logprobs=1, seed=1)
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"]
        deployment.wait_at_least("decode", "baton_handoff_received_bytes_total", 1)


def test_an_api_key_is_asked_for_and_checked(start_deployment, tmp_path, patience):
    keys = tmp_path / "keys"
    keys.write_text("secret-one\nsecret-two\n")
    with start_deployment("--api-keys-file", str(keys)) as deployment:
        refused = httpx.post(
            deployment.url + "/v1/completions",
            json={"model": "tiny-mtp", "prompt": "a"},
            timeout=patience,
        )
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=deployment.url + "/v1", api_key="secret-two") as client:
            reply = client.completions.create(model="tiny-mtp", prompt="a", max_tokens=2)
            assert reply.usage.completion_tokens >= 1
        with (
            openai.OpenAI(base_url=deployment.url + "/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
