"""The committed tiny model predicts text, drafts usefully and ends its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from baton_testing.numpy_reference import forward, greedy, log_softmax, mtp_forward
from baton_worker.engine.backends.paddle.framework import paddle
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.weights import Weights, load_weights

SENTENCES = (
    "You may copy and distribute verbatim copies of the Program's source code as you receive it",
    "This program is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY",
    "Everyone is permitted to copy and distribute verbatim copies of this license document",
    "Each version is given a distinguishing version number. If the Program specifies",
    "The source code for a work means the preferred form of the work for making modifications",
    "Activities other than copying, distribution and modification are not covered",
)


class Tiny(NamedTuple):
    shape: ModelShape
    weights: Weights
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Tiny:
    shape = load_shape(tiny_model_dir)
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    return Tiny(shape, load_weights(tiny_model_dir, shape), tokenizer)


def mean_nll(logits: np.ndarray, labels: list[int]) -> float:
    return float(-log_softmax(logits)[np.arange(len(labels)), labels].mean())


def test_main_and_mtp_predict_licence_text_far_better_than_chance(tiny: Tiny) -> None:
    main, mtp = [], []
    for sentence in SENTENCES:
        ids = tiny.encode(sentence)
        result = forward(tiny.weights, tiny.shape, ids)
        drafts = mtp_forward(tiny.weights, tiny.shape, result.hidden[:-1], ids[1:])
        main.append(mean_nll(result.logits[:-1], ids[1:]))
        mtp.append(mean_nll(drafts.logits[:-1], ids[2:]))
    chance = np.log(tiny.shape.vocab_size)
    assert np.mean(main) < 0.5 * chance
    assert np.mean(mtp) < 0.5 * chance


def test_first_drafts_are_accepted_often(tiny: Tiny) -> None:
    runs = [
        greedy(tiny.weights, tiny.shape, tiny.encode(sentence)[:20], 48) for sentence in SENTENCES
    ]
    proposed = sum(run.proposed for run in runs)
    accepted = sum(run.accepted for run in runs)
    assert proposed > 120
    assert 0.4 <= accepted / proposed <= 0.95


def test_chat_answers_reach_the_end_of_sequence(tiny: Tiny) -> None:
    requests = ("Continue this clause: You may copy", "Hello!", "What is a licence?")
    ended = 0
    for request in requests:
        prompt = f"<s><|user|>{request}<|end|><|assistant|>"
        ids = tiny.tokenizer.encode(prompt, add_special_tokens=False).ids
        run = greedy(tiny.weights, tiny.shape, ids, 100)
        ended += any(token in tiny.shape.eos_token_ids for token in run.token_ids)
        assert run.token_ids[0] not in tiny.shape.eos_token_ids
    assert ended >= 2


def test_the_training_network_and_the_reference_are_one_model(
    tiny: Tiny, tiny_model_dir: Path, load_example: Callable[[str], Any]
) -> None:
    """Paddle float32 from raw tensors, and NumPy float64 through the loader: nothing shared."""
    network = load_example("network")
    parameters = {
        key: paddle.to_tensor(
            value.astype(np.float32).T if value.ndim == 2 and "embed" not in key else value
        ).astype("float32")
        for key, value in load_file(tiny_model_dir / "model.safetensors").items()
    }
    ids = tiny.encode(" ".join(SENTENCES))[:130]
    window = paddle.to_tensor(np.array([ids], dtype=np.int64))
    main, mtp = (float(value) for value in network.loss(parameters, network.Shape(), window))
    result = forward(tiny.weights, tiny.shape, ids[:-2])
    drafts = mtp_forward(tiny.weights, tiny.shape, result.hidden, ids[1:-1])
    assert main == pytest.approx(mean_nll(result.logits, ids[1:-1]), abs=1e-4)
    assert mtp == pytest.approx(mean_nll(drafts.logits, ids[2:]), abs=1e-4)
