"""What `bench_gateway` is made of: a folder that is the model, and a phase in which all run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.arrivals import Arrivals
from baton_testing.exactness.random_model import qwen3_8b
from baton_testing.model_folder import write_folder, write_tokenizer
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceMtp, DeviceWeights
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights
from baton_worker.gateway.text.tokenizer import load_tokenizer

SHAPE = replace(
    qwen3_8b(n_layers=3),
    vocab_size=600,
    hidden_size=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    eos_token_ids=(1,),
)


def weights() -> DeviceWeights:
    rng = np.random.default_rng(0)

    def bits(*sizes: int) -> Any:
        """Of bfloat16 numbers near 1."""
        return rng.integers(0x3F00, 0x3F80, sizes).astype(np.uint16)

    hidden, inner = SHAPE.hidden_size, SHAPE.intermediate_size

    def layer() -> DeviceLayer:
        qkv = bits(SHAPE.q_size + 2 * SHAPE.kv_size, hidden)
        norms = bits(SHAPE.head_dim), bits(SHAPE.head_dim)
        o, gate_up, down = bits(hidden, SHAPE.q_size), bits(2 * inner, hidden), bits(hidden, inner)
        return DeviceLayer(bits(hidden), qkv, o, bits(hidden), gate_up, down, norms)

    final_norm = bits(hidden)
    return DeviceWeights(
        dtype="bfloat16",
        embed=bits(SHAPE.vocab_size, hidden),
        layers=tuple(layer() for _ in range(SHAPE.n_layers)),
        mtp=(DeviceMtp(bits(hidden), bits(hidden), bits(hidden, 2 * hidden), layer(), final_norm),),
        final_norm=final_norm,
        lm_head=bits(SHAPE.vocab_size, hidden),
        identity="",
    )


def test_the_folder_holds_the_model_bit_by_bit(tmp_path: Path) -> None:
    made = weights()
    write_folder(tmp_path, SHAPE, made, lambda part: part.reshape(-1).view(np.uint8))
    assert load_shape(tmp_path) == SHAPE
    read = open_checkpoint(tmp_path)
    for index, layer in enumerate(made.layers):
        of = f"model.layers.{index}"
        parts = [read[f"{of}.self_attn.{part}_proj.weight"].raw for part in "qkv"]
        assert np.array_equal(np.concatenate(parts), layer.qkv)
        parts = [read[f"{of}.mlp.{part}_proj.weight"].raw for part in ("gate", "up")]
        assert np.array_equal(np.concatenate(parts), layer.gate_up)
        assert np.array_equal(read[f"{of}.mlp.down_proj.weight"].raw, layer.down)
    assert np.array_equal(read["lm_head.weight"].raw, made.lm_head)
    assert len(load_weights(tmp_path, SHAPE).mtp) == 1, "with every key that the engine wants"


def test_every_id_has_a_token_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 20_000)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocabulary.size == 20_000
    assert tokenizer.vocabulary.text_bytes[19_999] != b""
    texts = [tokenizer.vocabulary.text_bytes[i] for i in range(600, 20_000)]
    assert len(set(texts)) == len(texts)


def arrivals(*streams: list[float]) -> Arrivals:
    """A token at each time."""
    told = [(time, number, 1) for number, times in enumerate(streams) for time in times]
    return Arrivals.of(*(np.array(column) for column in zip(*told, strict=True)))


def test_a_phase_begins_when_the_last_has_begun_and_ends_when_it_has_gone_on() -> None:
    late, early = [10.0 + i for i in range(10)], [7.0 + i for i in range(13)]
    phase = arrivals(late, early).steady(2, skip=2, length=4)
    assert (phase.begin, phase.end) == (11.0, 15.0)
    assert phase.tokens == 8
    assert phase.tokens_per_s == 2.0
    assert phase.mean_begin == (2 + 5) / 2


def test_a_phase_in_which_fewer_ran_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ended 2\.000 s before the phase did"):
        arrivals([10.0 + i for i in range(10)], [6.0 + i for i in range(8)]).steady(2, 2, 4)
    with pytest.raises(ValueError, match="request 1 has fewer than 6 tokens"):
        arrivals([1.0 * i for i in range(10)], [1.0, 2.0]).steady(2, 2, 4)


def test_tokens_that_come_together_are_counted_each() -> None:
    made = Arrivals.of([1.0, 2.0, 3.0, 3.5], [0, 0, 0, 0], [1, 3, 2, 1])
    assert made.totals(1).tolist() == [7]
    phase = made.steady(1, skip=1, length=4)
    assert (phase.tokens, phase.seconds) == (5, 2.0)
