"""Train a draft layer for a model that has none, on what the model itself says.

    python3 tools/gpu.py run tests/gpu/train_draft_layer.py FOLDER OUT [--chats N] [--steps N]

FOLDER is a dense model as transformers reads it, of Llama's parts (`model.layers`, `rotary_emb`),
with a chat template; OUT becomes the same folder with one MTP layer more, in DeepSeek-V3's names,
which Baton drafts with (`--speculative-method mtp -k 3`). Needs a GPU, PyTorch and transformers. No
text is needed: the model asks itself (Xu et al., Magpie, arXiv 2406.08464), and its answers are
what the layer will have to foresee. The layer is begun as a copy of the last one and learns the
main model's distribution of the next token but one and of the two behind, each fed by its own
output as when it drafts (Li et al., EAGLE-3, arXiv 2503.01840, section 3.1).

Owns the chats and the training; the layer is `draft_layer`'s.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402
from draft_layer import DEPTH, Chat, DraftLayer, of_main, walks, write_folder  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig  # noqa: E402
from baton_worker.engine.build import build_engine  # noqa: E402
from baton_worker.identity import make_handle  # noqa: E402
from baton_worker.messages import Submit  # noqa: E402
from baton_worker.records.rows import rows  # noqa: E402
from baton_worker.sampling import SamplingParams  # noqa: E402

WEIGHTS = (1.0, 0.8, 0.6)
"""What each of them counts in the loss."""
LONGEST = 384
"""Tokens of a chat that it is shown."""
BATCH, RATE, WARM_STEPS = 24, 1e-3, 50
ANSWER = 224
"""Tokens of an answer, at most."""
HELD_OUT = 96
"""Chats that it never sees, answered greedily."""
OPENINGS = ("", "", "", "", "Write a Python function that", "Fix this code:", "Write a short")
"""How a user's question begins; the model goes on."""
TASKS = (
    "Tell me in one sentence what this says.",
    "Copy this text.",
    "Which names and numbers are in this text?",
    "Explain this text to a child.",
)
"""Of an answer given before, one chat in six."""


def said(
    folder: Path, prompts: Sequence[Sequence[int]], sampling: Callable[[int], SamplingParams]
) -> list[tuple[int, ...]]:
    """Return what the model says behind each prompt, by Baton's engine."""
    limits = EngineConfig(device="gpu", max_running=256, max_waiting=len(prompts) + 1,
                          max_model_len=2048, kv_blocks=16384,
                          gpu_memory_utilization=0.5)  # fmt: skip
    engine = build_engine(ProcessConfig(ModelConfig(str(folder)), engine=limits,
                                        speculative=SpeculativeConfig("none", 0)))  # fmt: skip
    first = make_handle(1, 0)
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(make_handle(1, number), 0, prompt_token_ids=tuple(prompt),
                             sampling=sampling(number)))  # fmt: skip
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for row in rows(engine.step().columns):
            found[row.handle - first] += row.tokens
    engine.close()
    return [*map(tuple, found)]


def asked_itself(folder: Path, count: int, seed: int) -> list[Chat]:
    """Return chats whose questions and answers are the model's own; the first `HELD_OUT` of them,
    and half of the others, are answered greedily.
    """
    drawn, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(folder)

    def rendered(question: str, asks: bool = True) -> str:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return str(text)

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    before = rendered("<<>>", asks=False).partition("<<>>")[0]
    openings = [drawn.choice(OPENINGS) for _ in range(count)]
    asks = said(folder, [encoded(before + opening) for opening in openings],
                lambda n: SamplingParams(temperature=1.0, max_tokens=96, seed=n))  # fmt: skip
    questions = [
        (opening + tokenizer.decode(ids[:-1])).strip()
        for opening, ids in zip(openings, asks, strict=True)
        if 4 < len(ids) < 96  # it ended the question itself
    ]
    questions = [*dict.fromkeys(questions)]

    def answered(questions: list[str], begin: int) -> list[Chat]:
        prompts = [encoded(rendered(question)) for question in questions]

        def sampling(number: int) -> SamplingParams:
            is_greedy = begin + number < HELD_OUT or number % 2 == 0
            return SamplingParams(temperature=0.0 if is_greedy else 0.8, max_tokens=ANSWER,
                                  seed=seed + begin + number)  # fmt: skip

        answers = said(folder, prompts, sampling)
        return [Chat(tuple(p), a) for p, a in zip(prompts, answers, strict=True)]

    chats = answered(questions, 0)
    texts = [tokenizer.decode(chat.answer[:100]) for chat in chats[HELD_OUT::5]]
    chats += answered([f"{drawn.choice(TASKS)}\n\n{text}" for text in texts], len(chats))
    return [chat for chat in chats if len(chat.prompt) < LONGEST // 2 and len(chat.answer) > DEPTH]


class Shown(NamedTuple):
    """A batch: tokens `[B, T]`, and which of them are an answer's."""

    tokens: Any
    answers: Any


def batches(chats: Sequence[Chat], size: int, device: Any) -> Iterator[Shown]:
    """Yield chats of like lengths together, the rest of each line filled up with zeros."""
    lines = sorted(chats, key=lambda chat: len(chat.prompt) + len(chat.answer))
    groups = [lines[i : i + size] for i in range(0, len(lines), size)]
    random.shuffle(groups)
    for group in groups:
        longest = min(max(len(c.prompt) + len(c.answer) for c in group), LONGEST)
        tokens = torch.zeros(len(group), max(longest, DEPTH + 2), dtype=torch.long)
        answers = torch.zeros_like(tokens, dtype=torch.bool)
        for line, chat in enumerate(group):
            ids = (chat.prompt + chat.answer)[:longest]
            tokens[line, : len(ids)] = torch.tensor(ids)
            answers[line, len(chat.prompt) : len(ids)] = True
        yield Shown(tokens.to(device), answers.to(device))


def loss_of(model: Any, layer: DraftLayer, shown: Shown) -> Any:
    """Return the cross entropy of drafts against the main model, weighted, where it answers."""
    hidden = of_main(model, shown.tokens)
    n, head = shown.tokens.shape[1] - DEPTH, model.lm_head.weight
    total = torch.zeros((), device=hidden.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        drafted = layer.unrolled(model, hidden, shown.tokens)
        for j, out in enumerate(drafted):
            foretold = functional.pad(shown.answers, (0, 1))[:, 2 + j : 2 + j + n]
            with torch.no_grad():
                wanted = (hidden[:, 1 + j : 1 + j + n][foretold].bfloat16() @ head.T).float()
            given = (out[foretold].bfloat16() @ head.T).float()
            total = total + WEIGHTS[j] * functional.cross_entropy(given, wanted.softmax(-1))
    return total / sum(WEIGHTS)


def trained(model: Any, chats: Sequence[Chat], steps: int) -> DraftLayer:
    """Return the layer after so many steps of Adam, the rate rising, then falling to nothing."""
    layer, done, began = DraftLayer(model), 0, time.monotonic()
    adam = torch.optim.AdamW(layer.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    while done < steps:
        for shown in batches(chats, BATCH, model.device):
            share = done / steps
            rate = RATE * min((done + 1) / WARM_STEPS, 1.0) * (1 - share)
            for group in adam.param_groups:
                group["lr"] = rate
            loss = loss_of(model, layer, shown)
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            adam.step()
            done += 1
            if done % 100 == 0 or done == steps:
                say(f"step {done} of {steps}, {time.monotonic() - began:.0f} s: loss {loss:.3f}")
            if done == steps:
                break
    layer.eval()
    return layer


def say(text: str) -> None:
    """Tell what goes on."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Make the chats, train, tell how drafts fare on chats never seen, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--chats", type=int, default=6000, help="questions to ask itself")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write how drafts fared to this file")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already")
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    began = time.monotonic()
    chats = asked_itself(options.folder, options.chats, options.seed)
    held_out, shown = chats[:HELD_OUT], chats[HELD_OUT:]
    tokens = sum(len(chat.answer) for chat in shown)
    say(f"{len(shown)} chats, {tokens:,} tokens of answers in {time.monotonic() - began:.0f} s")
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to("cuda").eval().requires_grad_(False)
    layer = trained(model, shown, options.steps).rounded()
    found = walks(model.float(), layer, held_out, ANSWER)
    for one in found:
        share = f"{one.accepted}/{one.proposed} = {one.accepted / max(one.proposed, 1):.2f}"
        say(f"K = {one.k}: {one.tokens_per_row:.2f} tokens a row, {share} of chats never seen")
    write_folder(options.folder, options.out, layer)
    if options.json:
        told = {"chats": len(shown), "answer_tokens": tokens, "steps": options.steps,
                "held_out": len(held_out), "walks": [*map(asdict, found)]}  # fmt: skip
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
