"""`local --engine sim`: real processes, links and HTTP around a model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAST = ("--engine", "sim", "--sim", "decode_step_seconds=0.002", "--sim", "seed=5")
ASK: dict[str, Any] = {
    "prompt": "The licensor grants",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0.0,
    "logprobs": 3,
    "return_token_ids": True,
}


def test_a_simulated_pair_serves_what_a_simulated_mixed_worker_serves(start_deployment):
    with start_deployment("-k", "3", *FAST) as pair:
        pair.wait_lines(3)
        found = pair.complete(**ASK)
        pair.wait_at_least("prefill", "baton_handoff_sent_bytes_total", 1)
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
        pair.wait_at_least("decode", "baton_logprob_rows_total", 59, k="1-5")
        for role in ("prefill", "decode"):
            maps = Path(f"/proc/{pair.latest(role)['pid']}/maps").read_text()
            assert "paddle" not in maps, f"{role} loaded an accelerator stack"
    with start_deployment(
        "--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0", *FAST
    ) as mixed:
        wanted = mixed.complete(**ASK)
    (one,), (other,) = found["choices"], wanted["choices"]
    assert len(one["token_ids"]) == 60
    assert one["token_ids"] == other["token_ids"]
    assert one["text"] == other["text"]
    assert one["logprobs"] == other["logprobs"]
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
