"""Sixteen times what decode can run, all at once: it takes longer, and nothing else happens."""

from __future__ import annotations

import json

import httpx
import pytest

SLOTS = 4
N_REQUESTS = 16 * SLOTS
SIM = ("--engine", "sim", "--sim", "decode_step_seconds=0.01", "-k", "0")


def stream(deployment, n_prompts: int, max_tokens: int, patience: float):
    """Return the order of first tokens, tokens by choice, and the errors of one streamed answer."""
    firsts, n_tokens, errors = [], {}, []
    body = {
        "model": "tiny-mtp",
        "prompt": [f"Request {n} asks" for n in range(n_prompts)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }
    with (
        httpx.Client(timeout=patience, trust_env=False) as client,
        client.stream("POST", f"{deployment.url}/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                errors.append(event)
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or ()
                if tokens and choice["index"] not in n_tokens:
                    firsts.append(choice["index"])
                n_tokens[choice["index"]] = n_tokens.get(choice["index"], 0) + len(tokens)
    return firsts, n_tokens, errors


@pytest.mark.parametrize("n_pairs", [1, 2])
def test_nothing_fails_or_is_recomputed_and_first_tokens_keep_the_order(
    start_deployment, patience, n_pairs
):
    pairs = ("--decode", str(n_pairs), "--prefill", str(n_pairs))
    with start_deployment("--max-running", str(SLOTS), *pairs, *SIM) as deployment:
        deployment.wait_lines(1 + 2 * n_pairs)
        firsts, n_tokens, errors = stream(deployment, n_pairs * N_REQUESTS, 40, patience)
        assert errors == []
        assert n_tokens == dict.fromkeys(range(n_pairs * N_REQUESTS), 40)
        if n_pairs == 1:
            assert firsts == list(range(N_REQUESTS))
        assert deployment.metric("gateway", "baton_gateway_retries_total") == 0
        for role in ("prefill", "decode"):
            assert deployment.metric(role, "baton_worker_refused_total") == 0
            assert deployment.metric(role, "baton_handoff_resent_total") == 0
            assert deployment.metric(role, "baton_engine_preemptions_total") == 0
        prefilled = deployment.metric("prefill", "baton_handoff_place_seconds_count")
        assert prefilled > 0
        # What prefill is told of its last handoffs may come behind their last tokens.
        deployment.wait_metric("prefill", "baton_handoff_outcomes_total", prefilled)
