"""The implementation that is not ours, over weights that were trained: a GPU says what it says.

The weights come from a file, and where there is none these are skipped (`baton_testing.real_model`
says which): BATON_REAL_GGUF=FILE tools/gpu.py test tests/gpu/test_a_real_model_is_transformers.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import published_models as published
from baton_testing import real_model as real
from baton_testing.gguf_folder import write_gguf_folder
from baton_testing.local_deployment import Deployment, start

TOLERANCE = 5e-4
"""Of logits up to 25, of 30 layers in float32."""
NO_FARTHER = 1.05
TOKENS = 256

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

Logits = npt.NDArray[np.float32]
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, its weights exact in bfloat16, so that both dtypes compute one model."""
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    place = tmp_path_factory.mktemp("real") / real.NAME
    write_gguf_folder(real.real_gguf(), place, "bfloat16")
    return place


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Iterator[Any]:
    """Transformers' model of the folder, in float32."""
    import torch

    transformers = pytest.importorskip("transformers", reason="transformers is absent")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    yield model.to("cuda").eval()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    """A few hundred tokens: prose, a chat, and code."""
    return [
        *real.text_ids(folder, real.PARAGRAPH),
        *real.chat_ids(folder, real.CHATS["summarise"]),
        *real.text_ids(folder, real.CODE),
    ]


def ours(folder: Path, dtype: str) -> Any:
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    device.synchronise()
    return published.loaded(folder, device, OpsKernels(device), dtype)


def rms(error: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))


def perplexity(logits: Logits, tokens: list[int]) -> float:
    wide = logits[:-1].astype(np.float64)
    top = wide.max(1, keepdims=True)
    said = wide - top - np.log(np.exp(wide - top).sum(1, keepdims=True))
    return math.exp(-said[np.arange(len(tokens) - 1), tokens[1:]].mean())


def test_logits_of_real_text_are_transformers(folder: Path, theirs: Any, text: list[int]) -> None:
    wanted = published.published_logits(theirs, text)
    found = published.our_logits(ours(folder, "float32"), text)
    print(f"{len(text)} tokens, float32: {np.abs(found - wanted).max():.2g} at most", end=", ")
    print(f"logits from {wanted.min():.1f} to {wanted.max():.1f}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    rounded = published.published_logits(published.published_in_bfloat16(folder, "cuda"), text)
    in_bfloat16 = published.our_logits(ours(folder, "bfloat16"), text)
    far, as_far = rms(in_bfloat16 - wanted), rms(rounded - wanted)
    print(f"bfloat16: {far:.4f}, transformers {as_far:.4f}")
    assert as_far > 0
    assert far <= NO_FARTHER * as_far


def test_a_paragraph_is_as_likely_as_transformers_says(folder: Path, theirs: Any) -> None:
    tokens = real.text_ids(folder, real.PARAGRAPH)
    wanted = perplexity(published.published_logits(theirs, tokens), tokens)
    for dtype, within in zip(DTYPES, (1e-5, 0.02), strict=True):
        found = perplexity(published.our_logits(ours(folder, dtype), tokens), tokens)
        print(f"perplexity, {dtype}: {found:.5f}, transformers' float32 {wanted:.5f}")
        assert found == pytest.approx(wanted, rel=within)
    assert wanted < 30, "a model that cannot read English proves nothing"


@pytest.mark.parametrize("kind", real.CHATS)
def test_greedy_answers_are_transformers(folder: Path, theirs: Any, kind: str) -> None:
    prompt = real.chat_ids(folder, real.CHATS[kind])
    wanted = published.published_greedy(theirs, prompt, TOKENS)
    found = published.our_greedy(ours(folder, "float32"), prompt, TOKENS)
    print(f"{kind}: {real.tokenizer_of(folder).decode(found)[:200]!r}")
    same = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), TOKENS)
    if same < TOKENS:  # only where theirs are as good as equal may two float32 sums choose another
        last = published.published_logits(theirs, [*prompt, *wanted[:same]])[-1]
        assert last[wanted[same]] - last[found[same]] < TOLERANCE, f"they part at token {same}"
    print(f"{same} of {TOKENS} tokens are the same")


ON_GPU = ("--engine", "gpu", "--gpu-memory", "0.4", "--kv-blocks", "4096", "--max-running", "64")
PAIR = ("-k", "3", "--speculative-method", "ngram", *ON_GPU)
MIXED = ("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0", *ON_GPU)


def answers(deployment: Deployment, number: int) -> Any:
    """Return a chat's text and what each token and its alternatives are worth."""
    question = [*real.CHATS.values()][number % len(real.CHATS)]
    reply = deployment.post(
        "/v1/chat/completions",
        model=real.NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=64 + number,
        temperature=0.8 * (number % 8 > 3),
        seed=number,
        logprobs=True,
        top_logprobs=number % 6,
    )
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], choice["logprobs"], choice["finish_reason"]


@pytest.mark.e2e
def test_a_pair_that_drafts_answers_chats_with_the_bits_of_one_plain_process(folder: Path) -> None:
    model = ("--model", str(folder))
    with start(*model, *PAIR) as pair, ThreadPoolExecutor(32) as clients:
        pair.wait_lines(3)
        found = list(clients.map(lambda n: answers(pair, n), range(64)))
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
    with start(*model, *MIXED) as mixed:
        wanted = [answers(mixed, n) for n in range(64)]
    assert "Paris" in wanted[0][0]
    print(f"{wanted[0][0]!r}\n{wanted[1][0]!r}")
    differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert differing == []
