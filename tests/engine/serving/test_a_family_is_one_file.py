"""What docs/add-a-family.md says: a family's own file is all that a new one needs to be served.

The family here is none that was published: it differs from each that was, in rotation, biases,
and names, order and input of its draft layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.families.registry import FAMILIES
from baton_worker.engine.model.naming import LayerKeys, MtpKeys

ENGINES = ("paddle", "device")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "add-a-family.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
FILES = ROOT / "worker/src/baton_worker/engine/model/families"


def nova_mtp(index: int, n_layers: int, tied: bool) -> MtpKeys:
    prefix = f"draft.{index}"
    return MtpKeys(
        emb_norm=f"{prefix}.token_layernorm.weight",
        hidden_norm=f"{prefix}.hidden_layernorm.weight",
        proj=f"{prefix}.input_proj.weight",
        layer=LayerKeys(prefix),
        final_norm=f"{prefix}.final_layernorm.weight",
        needs_final_norm=True,
    )


NOVA = Family(
    model_type="nova",
    architecture="NovaForCausalLM",
    rope_style="interleaved",
    has_qkv_bias=True,
    mtp_hidden="pre_norm",
    mtp_order="hidden_embedding",
    mtp_namings=(nova_mtp,),
)


def named_as_novas(tensors: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.startswith("model.mtp_layers.")]:
        tensors[key.replace("model.mtp_layers.", "draft.")] = tensors.pop(key)


def test_a_new_familys_checkpoint_is_served(
    monkeypatch: pytest.MonkeyPatch,
    make_checkpoint: Callable[..., Any],
    load_model: Any,
    make_bench: Any,
    make_prompts: Any,
) -> None:
    monkeypatch.setitem(FAMILIES, "nova", NOVA)
    made = make_checkpoint("nova", mtp="mimo", edit=named_as_novas, tie_word_embeddings=False)
    model = load_model(made.path)
    assert (model.shape.rope_style, model.shape.has_qkv_bias) == ("interleaved", True)
    bench = make_bench(model, n_draft=2)
    for number, prompt in enumerate(make_prompts(4, vocab_size=96)):
        key = bench.submit(number, prompt, temperature=0.0, max_tokens=12, logprobs_k=0)
        bench.drain()
        stream = bench.reader[key]
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        assert stream.tokens == expected.argmax(axis=1).tolist()
        np.testing.assert_allclose(stream.logprobs, expected.max(axis=1), rtol=0, atol=5e-5)


def test_every_family_has_a_file_and_a_row_with_its_source() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", MODELS, re.MULTILINE))
    assert listed == set(FAMILIES)
    for family in FAMILIES.values():
        found = [path for path in FILES.glob("*.py") if family.architecture in path.read_text()]
        assert len(found) == 1, family.model_type


def test_the_page_names_what_is_there() -> None:
    modules = re.findall(r"`(engine/[\w/]+\.py)`", PAGE)
    assert len(modules) > 5
    for name in modules:
        assert (ROOT / "worker/src/baton_worker" / name).exists(), name
    fields = re.findall(r"`Family\.(\w+)`", PAGE)
    assert set(fields) == set(Family.__dataclass_fields__), "and all that a family may need"


def test_a_mixture_that_reads_no_field_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="nova: experts and expert_fields go together"):
        replace(NOVA, experts=FAMILIES["qwen3_moe"].experts)
