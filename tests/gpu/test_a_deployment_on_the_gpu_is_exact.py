"""Processes of a deployment tell clients the same bits over HTTP, whichever they are and whichever
GPU of a kind they are on.

Prefill and decode are processes of their own: KV travels, or decode reads it in prefill's memory.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton_testing.exactness.small_models import VOCAB, write_small_model
from baton_testing.fp8_folder import quantise_folder
from baton_testing.gpus import some_gpus, two_gpus
from baton_testing.local_deployment import Deployment, start
from baton_testing.model_folder import write_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "exactness.md"
ON_GPU = ("--engine", "gpu", "--max-running", "64", "--gpu-memory", "0.4", "--kv-blocks", "4096")
PAIR = ("-k", "3", *ON_GPU)
MIXED = ("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0", *ON_GPU)
REQUESTS = 96
FAMILIES = ("glm4_moe", "glm4_moe-fp8", "deepseek_v3", "deepseek_v3-fp8")


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")


def ask(deployment: Deployment, number: int) -> Any:
    """Post one of the requests and return its ids, logprobs and alternatives."""
    choice = deployment.complete(
        prompt="The licensor grants to you " * (1 + number % 7),
        max_tokens=20 + number % 50,
        temperature=0.9 * (number % 3),
        top_p=1.0 - 0.1 * (number % 2),
        presence_penalty=0.5 * (number % 4 == 3),
        seed=number,
        logprobs=number % 6,
        ignore_eos=True,
        return_token_ids=True,
    )["choices"][0]
    return choice["token_ids"], choice["logprobs"]


WAYS = {"zmq": [], "nvlink": ["--share-kv"], "nixl": ["--nixl"]}


def test_a_pair_of_processes_says_what_one_says_and_texts_are_scored_as_sampled() -> None:
    with start(*PAIR) as pair, ThreadPoolExecutor(48) as clients:
        pair.wait_lines(3)
        found = list(clients.map(lambda n: ask(pair, n), range(REQUESTS)))
        pair.wait_at_least("prefill", "baton_handoff_sent_bytes_total", 1)
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
        (lines,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        exec(lines.replace("http://127.0.0.1:8000", pair.url), {})
    with start(*MIXED) as mixed:
        wanted = [ask(mixed, n) for n in range(REQUESTS)]
    differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert differing == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_of_a_family_says_what_one_process_says(tmp_path: Path, family: str) -> None:
    """Small models with experts, a draft layer, compressed rows or FP8 weights."""
    write_small_model(tmp_path, family.removesuffix("-fp8"))
    if family.endswith("-fp8"):
        quantise_folder(tmp_path, with_drafts=True)
    write_tokenizer(tmp_path, VOCAB)
    model = ("--model", str(tmp_path), "--served-name", "tiny-mtp")
    with start(*PAIR, *model, "--share-kv") as pair, ThreadPoolExecutor(48) as clients:
        pair.wait_lines(3)
        found = list(clients.map(lambda n: ask(pair, n), range(REQUESTS)))
        pair.wait_at_least("prefill", "baton_handoff_delivered_bytes_total", 1, transport="nvlink")
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
    with start(*MIXED, *model) as mixed:
        wanted = [ask(mixed, n) for n in range(REQUESTS)]
    differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert differing == []


@pytest.mark.parametrize("transport", WAYS)
def test_a_pair_on_two_gpus_says_what_one_process_says_on_the_second(transport: str) -> None:
    first, second = two_gpus()
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    flags = ("--gpus", f"{first},{second}", *WAYS[transport])
    with start(*PAIR, *flags) as pair, ThreadPoolExecutor(48) as clients:
        pair.wait_lines(3)
        found = list(clients.map(lambda n: ask(pair, n), range(REQUESTS)))
        delivered = {
            way: pair.metric("prefill", "baton_handoff_delivered_bytes_total", transport=way)
            for way in WAYS
        }
        assert [way for way, n_bytes in delivered.items() if n_bytes] == [transport]
        pair.wait_idle("prefill", "decode")
        for role in ("prefill", "decode"):
            pair.wait_metric(role, "baton_engine_kv_blocks_used", 0)
        seen = {
            role: Path(f"/proc/{pair.latest(role)['pid']}/environ").read_bytes().split(b"\0")
            for role in ("prefill", "decode")
        }
    assert f"CUDA_VISIBLE_DEVICES={first}".encode() in seen["prefill"]
    assert f"CUDA_VISIBLE_DEVICES={second}".encode() in seen["decode"]
    with start(*MIXED, "--gpus", second) as mixed:
        wanted = [ask(mixed, n) for n in range(REQUESTS)]
    differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert differing == []


@pytest.mark.parametrize("transport", ["nvlink", "nixl"])
def test_a_pair_of_two_ranks_each_says_what_one_worker_of_two_says(transport: str) -> None:
    gpus = some_gpus(4)
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    flags = ("--tp", "2", "--gpus", ",".join(gpus), *WAYS[transport])
    with start(*PAIR, *flags) as pair, ThreadPoolExecutor(48) as clients:
        pair.wait_lines(3)
        found = list(clients.map(lambda n: ask(pair, n), range(REQUESTS)))
        delivered = {
            way: pair.metric("prefill", "baton_handoff_delivered_bytes_total", transport=way)
            for way in WAYS
        }
        assert [way for way, n_bytes in delivered.items() if n_bytes] == [transport]
        pair.wait_idle("prefill", "decode")
        for role in ("prefill", "decode"):
            pair.wait_metric(role, "baton_engine_kv_blocks_used", 0)
    with start(*MIXED, "--tp", "2", "--gpus", ",".join(gpus[2:])) as mixed:
        wanted = [ask(mixed, n) for n in range(REQUESTS)]
    differing = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert differing == []
