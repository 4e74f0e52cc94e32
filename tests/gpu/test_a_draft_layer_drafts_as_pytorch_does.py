"""Drafts of a layer that PyTorch and transformers compute are those that Baton's engine makes.

Over weights that were trained, which come from a file: where there is none, as where PyTorch or
transformers is absent, these are skipped (`baton_testing.real_model`). The layer is trained for a
few steps on the very answers that it drafts: some of its drafts are right, some wrong, and both
must be the same ones. On a machine without a GPU the CPU's engine is asked.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from baton_testing import real_model as real
from baton_testing.gguf_folder import write_gguf_folder
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.build import build_engine
from baton_worker.identity import make_handle
from baton_worker.messages import Submit
from baton_worker.records.rows import rows
from baton_worker.sampling import SamplingParams

TOKENS, STEPS = 48, 40

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model in float32, without a draft layer."""
    pytest.importorskip("torch", reason="PyTorch is absent")
    pytest.importorskip("transformers", reason="transformers is absent")
    place = tmp_path_factory.mktemp("real") / real.NAME
    write_gguf_folder(real.real_gguf(), place, "float32")
    return place


def answers(folder: Path, prompts: list[tuple[int, ...]], k: int) -> tuple[list[Any], int, int]:
    """Return greedy answers, and how many drafts were proposed and accepted."""
    import torch

    device = EngineConfig(device="gpu", dtype="float32", kv_blocks=512, max_model_len=512)
    limits = device if torch.cuda.is_available() else EngineConfig(max_model_len=512)
    speculative = SpeculativeConfig("mtp" if k else "none", k)
    config = ProcessConfig(ModelConfig(str(folder)), speculative=speculative, engine=limits)
    said: list[list[int]] = [[] for _ in prompts]
    proposed = accepted = 0
    with closing(build_engine(config)) as engine:
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
            handle = make_handle(1, number)
            engine.submit(Submit(handle, 0, prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work():
            result = engine.step()
            proposed += int(result.stats.proposed_by_position.sum())
            accepted += int(result.stats.accepted_by_position.sum())
            for row in rows(result.columns):
                said[row.handle - make_handle(1, 0)] += row.tokens
    return said, proposed, accepted


def test_as_many_drafts_are_accepted_as_along_pytorchs(folder: Path, tmp_path: Path) -> None:
    import torch
    import transformers
    from draft_layer import Chat, walks, write_folder
    from train_draft_layer import trained

    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    prompts = [tuple(real.chat_ids(folder, question)) for question in real.CHATS.values()]
    plain, *_ = answers(folder, prompts, 0)
    chats = [Chat(prompt, tuple(a)) for prompt, a in zip(prompts, plain, strict=True)]
    layer = trained(model, chats, STEPS).rounded()
    write_folder(folder, tmp_path / "drafting", layer)
    for walk in walks(model, layer, chats, TOKENS):
        said, proposed, accepted = answers(tmp_path / "drafting", prompts, walk.k)
        print(f"K = {walk.k}: {accepted}/{proposed}, PyTorch's {walk.accepted}/{walk.proposed}")
        assert said == plain
        assert (proposed, accepted) == (walk.proposed, walk.accepted)
        assert 0 < accepted < proposed, "a layer that is always wrong, or right, proves little"
