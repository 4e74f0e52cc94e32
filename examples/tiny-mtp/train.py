"""Train the tiny model with one MTP layer and write it as a Hugging Face folder.

Everything comes from this machine: text that ships with the system, Paddle on the CPU. One run
takes one to two minutes on one core. The same machine and seed give the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# MKL picks a slow path on AMD processors unless told so before it loads (measured: 36 against 96
# GFLOP/s). The variable is undocumented and changes last bits, so only training sets it.
os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")

with warnings.catch_warnings():
    # Paddle warns on import when ccache is not installed; nothing is compiled here.
    warnings.filterwarnings("ignore", message="No ccache found", category=UserWarning)
    import paddle

import numpy as np
from measure import measure_acceptance
from network import Parameters, Shape, init_parameters, loss, to_checkpoint
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from vocabulary import BOS_ID, END_ID, EOS_ID, render_chat, save_tokenizer, train_tokenizer

from corpus import SOURCES, Document, load_documents, make_chat, sentences

MTP_LOSS_WEIGHT = 0.3
PROGRESS_EVERY_STEPS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train: `window` tokens of context, `chat_share` of the windows are chats."""

    steps: int
    batch: int
    window: int
    peak_rate: float
    chat_share: float
    seed: int


class Samples:
    """Draws training windows: prose at random places, or chats packed one after the other."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, plan: Plan) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._rng = random.Random(plan.seed)  # noqa: S311  a training set, not a secret
        self._prose = [_encode(tokenizer, "\n".join(doc.paragraphs)) for doc in documents]
        self._weights = [len(ids) for ids in self._prose]
        self._sentences = sentences(documents)

    def batch(self) -> np.ndarray:
        """Return int64 `[batch, window + 2]`."""
        return np.array([self._window() for _ in range(self._plan.batch)], dtype=np.int64)

    def _window(self) -> list[int]:
        size = self._plan.window + 2
        if self._rng.random() >= self._plan.chat_share:
            ids = self._rng.choices(self._prose, self._weights)[0]
            start = self._rng.randrange(max(1, len(ids) - size))
            body = ids[start : start + size - 1]
            return [BOS_ID, *body, *[EOS_ID] * (size - 1 - len(body))]
        packed: list[int] = []
        while len(packed) < size:
            chat = render_chat(make_chat(self._rng.choice(self._sentences), self._rng))
            packed += _encode(self._tokenizer, chat)
        return packed[:size]


def train(samples: Samples, shape: Shape, plan: Plan) -> Parameters:
    """Run AdamW with warm-up and a cosine decay to a tenth; print progress."""
    parameters = init_parameters(shape, plan.seed)
    rate = paddle.optimizer.lr.LambdaDecay(1.0, lambda step: _rate(step, plan))
    optimizer = paddle.optimizer.AdamW(
        learning_rate=rate,
        beta2=0.98,
        weight_decay=0.05,
        parameters=list(parameters.values()),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    cpu_start = time.process_time()
    for step in range(1, plan.steps + 1):
        main, mtp = loss(parameters, shape, paddle.to_tensor(samples.batch()))
        (main + MTP_LOSS_WEIGHT * mtp).backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        if step % PROGRESS_EVERY_STEPS == 0 or step == plan.steps:
            cpu_seconds = time.process_time() - cpu_start
            print(
                f"step {step}/{plan.steps}  main {float(main):.2f}  mtp {float(mtp):.2f}  "
                f"{step * plan.batch * plan.window / cpu_seconds:.0f} tokens per CPU-second",
                flush=True,
            )
    print(f"trained in {time.process_time() - cpu_start:.0f} CPU-seconds")
    return parameters


def save(parameters: Parameters, tokenizer: Tokenizer, shape: Shape, folder: Path) -> None:
    """Write weights, configuration and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_checkpoint(parameters), folder / "model.safetensors", metadata={"format": "np"})
    _write_json(folder / "config.json", _config(shape))
    ids = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID]}
    _write_json(folder / "generation_config.json", ids)
    save_tokenizer(tokenizer, folder, shape.max_positions)


def main() -> None:
    """Parse the command line, train, save, and measure what was saved."""
    arguments = _parse_arguments()
    plan = Plan(
        steps=arguments.steps,
        batch=arguments.batch,
        window=arguments.window,
        peak_rate=arguments.rate,
        chat_share=arguments.chat_share,
        seed=arguments.seed,
    )
    shape = Shape()
    documents = load_documents(arguments.corpus)
    characters = sum(len(text) for doc in documents for text in doc.paragraphs)
    print(f"corpus: {len(documents)} documents, {characters} characters")
    texts = [text for doc in documents for text in doc.paragraphs]
    tokenizer = train_tokenizer(texts, shape.vocab)
    parameters = train(Samples(documents, tokenizer, plan), shape, plan)
    save(parameters, tokenizer, shape, arguments.out)
    print(f"wrote {arguments.out}")
    print(measure_acceptance(arguments.out, texts, arguments.seed))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--corpus", choices=SOURCES, default="auto", help="text to train on")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--window", type=int, default=96, help="tokens of context per window")
    parser.add_argument("--rate", type=float, default=1.5e-2, help="peak learning rate")
    parser.add_argument("--chat-share", type=float, default=0.4, help="share of chat windows")
    parser.add_argument("--seed", type=int, default=1, help="of weights and samples")
    return parser.parse_args()


def _rate(step: int, plan: Plan) -> float:
    warm_up = min(1.0, (step + 1) / 50)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / plan.steps)))
    return plan.peak_rate * warm_up * (0.1 + 0.9 * cosine)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": True,
        "use_bias": False,
        "baton_mtp_hidden": "pre_norm",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float16",
    }


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
