"""A folder with biases, experts or MLA, or in FP8, serves a pair over HTTP as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_testing.exactness.small_models import VOCAB, write_small_model
from baton_testing.fp8_folder import quantise_folder
from baton_testing.model_folder import write_tokenizer

TEXTS = ["Who may copy this, and who may copy this?", "The", "1. Definitions. 2. Grant. 1."]
PLAIN = ("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0")
DRAFTED = {
    "mimo": ("-k", "2"),
    "qwen2": ("-k", "3", "--speculative-method", "ngram"),
    "glm4_moe": ("-k", "2"),
    "deepseek_v3": ("-k", "2"),
}


def said(deployment: Any, **body: Any) -> list[tuple[list[int], list[float]]]:
    reply = deployment.complete(
        prompt=TEXTS, max_tokens=40, return_token_ids=True, logprobs=2, ignore_eos=True, **body
    )
    ordered = sorted(reply["choices"], key=lambda choice: choice["index"])
    return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in ordered]


@pytest.mark.parametrize(
    ("family", "is_fp8", "n_mtp"),
    [
        *((family, False, 1) for family in DRAFTED),
        ("glm4_moe", True, 1),
        ("deepseek_v3", True, 1),
        pytest.param("mimo", False, 3, id="mimo-three-draft-layers"),
    ],
)
def test_a_pair_that_drafts_says_what_a_plain_process_says(
    start_deployment: Callable[..., Any], tmp_path: Path, family: str, is_fp8: bool, n_mtp: int
) -> None:
    write_small_model(tmp_path, family, n_mtp=n_mtp)
    if is_fp8:
        quantise_folder(tmp_path, with_drafts=True)
    write_tokenizer(tmp_path, VOCAB)
    defaults = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    model = ("--model", str(tmp_path), "--served-name", "tiny-mtp")
    with (
        start_deployment(*model, *DRAFTED[family], *(("-k", "4") if n_mtp > 1 else ())) as pair,
        start_deployment(*model, *PLAIN) as plain,
    ):
        pair.wait_lines(3)
        for sampling in ({"temperature": 0}, {"seed": 5}):
            ours, theirs = said(pair, **sampling), said(plain, **sampling)
            for (ids, logprobs), (want_ids, want_logprobs) in zip(ours, theirs, strict=True):
                assert len(ids) == 40
                assert ids == want_ids
                assert logprobs == pytest.approx(want_logprobs, abs=5e-5)
        told = said(plain, seed=5, temperature=0.7, top_p=0.9)
        assert said(plain, seed=5) == told, "what is left out is the model's"
        assert said(plain, seed=5, temperature=1.0) != told
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
