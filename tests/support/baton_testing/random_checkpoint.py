"""Checkpoints of random numbers in published sizes, in several shards, as large as is asked for.

Owns the tensors of a dense model and how many bytes of noise are drawn: a few MiB, which repeat at
a length that no row divides, so that writing 16 GB takes as long as the disk does. Knows no device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.model.shape import load_shape

SHARDS = 4
NOISE_VALUES = (1 << 22) - 3
SCALE = 0.02
MOST_NORM = 1 << 14
"""Values of a norm's weight, at most."""

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a layer of a dense model is made of, and how many there are as published."""

    model_type: str
    n_layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int = 4096
    has_qk_norm: bool = True

    @property
    def layer_values(self) -> int:
        """Of its matrices."""
        projections = 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        return self.hidden * (projections + 3 * self.width)

    def layers_of(self, gigabytes: float) -> int:
        """Return how many layers make about so much of two bytes a value, embedding and head
        included.
        """
        values = gigabytes * 5e8 - 2 * self.vocab * self.hidden
        return max(round(values / self.layer_values), 1)

    def config(self, n_layers: int) -> dict[str, Any]:
        """Return the fields of config.json."""
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": n_layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "rope_theta": 1e6,
        }

    def tensors(self, n_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield keys and shapes."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for index in range(n_layers):
            at = f"model.layers.{index}"
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield f"{at}.self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            for name in ("q", "k") if self.has_qk_norm else ():
                yield f"{at}.self_attn.{name}_norm.weight", (self.head_dim,)
            for name in ("gate", "up"):
                yield f"{at}.mlp.{name}_proj.weight", (self.width, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.width)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}.{name}.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


SMALL = Sizes("qwen3", 8, 2048, 6144, 16, 8, 128, 65_536)
QWEN3_8B = Sizes("qwen3", 36, 4096, 12_288, 32, 8, 128, 151_936, 40_960)
LLAMA_31_8B = Sizes("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, has_qk_norm=False)


def write_checkpoint(
    folder: Path, sizes: Sizes, n_layers: int, storage: str = "BF16", **config: Any
) -> list[Path]:
    """Write a checkpoint and return its files, which are on the disk then.

    Args:
        storage: BF16 or F16.
        config: fields of config.json beside those of the sizes, or in their place.
    """
    (folder / "config.json").write_text(json.dumps(sizes.config(n_layers) | config))
    load_shape(folder)  # what is not supported is told before gigabytes are written
    every = list(sizes.tensors(n_layers))
    step = -(-len(every) // SHARDS)
    shards = [every[number * step : (number + 1) * step] for number in range(SHARDS)]
    names = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as writers:
        written = [
            writers.submit(_write_shard, folder / names[number], shards[number], storage, number)
            for number in range(SHARDS)
        ]
        for each in written:
            each.result()
    weight_map = {key: name for name, own in zip(names, shards, strict=True) for key, _ in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sorted(folder.glob("*.safetensors"))


def _write_shard(
    path: Path, own: list[tuple[str, tuple[int, ...]]], storage: str, seed: int
) -> None:
    header: dict[str, Any] = {}
    end = 0
    for key, shape in own:
        start, end = end, end + 2 * int(np.prod(shape))
        header[key] = {"dtype": storage, "shape": shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    drawn = np.random.default_rng(seed).normal(0.0, SCALE, NOISE_VALUES).astype(np.float32)
    noise, norms = _stored(drawn, storage), _stored(1 + drawn[:MOST_NORM], storage)
    at = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, shape in own:
            if len(shape) == 1:
                file.write(norms[: shape[0]].data)
            else:
                at = _write_noise(file, noise, at, int(np.prod(shape)))
        file.flush()
        os.fsync(file.fileno())


def _write_noise(file: IO[bytes], noise: Values, at: int, count: int) -> int:
    """Write so many values, from a place of the noise on; return the next place."""
    while count:
        part = noise[at : at + count]
        file.write(part.data)
        count -= len(part)
        at = (at + len(part)) % len(noise)
    return at


def _stored(values: npt.NDArray[np.float32], storage: str) -> Values:
    if storage == "F16":
        return values.astype(np.float16)
    return np.ascontiguousarray(values.view(np.uint16)[1::2])  # cut, not rounded: noise it is


def drop_from_cache(files: list[Path]) -> None:
    """Have the next read come from the disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
