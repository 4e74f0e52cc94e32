"""A random model as a folder in Hugging Face's layout, to be served.

Owns the files: shards written side by side, `config.json`, and a tokenizer with a token for each
id. Knows no GPU: `to_host` gives a tensor's bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceWeights
from baton_worker.engine.model import naming
from baton_worker.engine.model.families.registry import FAMILIES
from baton_worker.engine.model.shape import ModelShape

WRITERS = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"

ToHost = Callable[[Any], npt.NDArray[np.uint8]]
Named = Iterator[tuple[str, Any]]


def write_folder(folder: Path, shape: ModelShape, weights: DeviceWeights, to_host: ToHost) -> None:
    """Write a bfloat16 model of a family that `load_shape` knows, heads not tied.

    Args:
        to_host: returns the bytes of a contiguous tensor in host memory.
    """
    shards = {f"model-{i}.safetensors": part for i, part in enumerate(_shards(shape, weights))}
    with ThreadPoolExecutor(WRITERS) as threads:
        written = threads.map(
            lambda name: _write_shard(folder / name, shards[name], to_host), shards
        )
        list(written)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    _write_json(folder / "config.json", config_of(shape))
    write_tokenizer(folder, shape.vocab_size)


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return the `config.json` that `load_shape` reads as this shape."""
    return {
        "architectures": [FAMILIES[shape.model_type].architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_nextn_predict_layers": shape.n_mtp_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids),
        "torch_dtype": shape.dtype,
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the tiny model's tokenizer with as many words more as the vocabulary has ids left.

    No merge makes them, so no text is encoded to them; decoded they cost what words of a real
    tokenizer cost: a space and four letters each.
    """
    document = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    words = (word for word in map(_word, itertools.count()) if word not in vocab)
    vocab |= dict(zip(words, range(len(vocab), vocab_size), strict=False))
    _write_json(folder / "tokenizer.json", document)
    copyfile(TINY_MODEL / "tokenizer_config.json", folder / "tokenizer_config.json")


def _word(number: int) -> str:
    return "Ġ" + "".join(LETTERS[number // 26**i % 26] for i in range(4))


def _shards(shape: ModelShape, weights: DeviceWeights) -> Iterator[dict[str, Any]]:
    """Yield about as many shards as threads write, the embedding and the head apart."""
    yield {naming.EMBED: weights.embed}
    yield {naming.LM_HEAD: weights.lm_head, naming.FINAL_NORM: weights.final_norm}
    layers = [dict(_layer(i, layer, shape)) for i, layer in enumerate(weights.layers)]
    each = -(-len(layers) // WRITERS)
    for first in range(0, len(layers), each):
        yield {key: part for layer in layers[first : first + each] for key, part in layer.items()}
    for index, mtp in enumerate(weights.mtp):
        keys = FAMILIES[shape.model_type].mtp_namings[0](
            index, shape.n_layers, shape.tie_word_embeddings
        )
        parts = {keys.emb_norm: mtp.emb_norm, keys.hidden_norm: mtp.hidden_norm}
        if keys.final_norm:
            parts[keys.final_norm] = mtp.final_norm
        yield parts | {keys.proj: mtp.proj} | dict(_named(keys.layer, mtp.layer, shape))


def _layer(index: int, layer: DeviceLayer, shape: ModelShape) -> Named:
    return _named(naming.main_layer(index), layer, shape)


def _named(keys: naming.LayerKeys, layer: DeviceLayer, shape: ModelShape) -> Named:
    """Yield a layer's tensors as a checkpoint has them: those fused by rows apart again."""
    yield keys.input_norm, layer.input_norm
    q, kv, inner = shape.q_size, shape.kv_size, shape.intermediate_size
    rows = (slice(q), slice(q, q + kv), slice(q + kv, q + 2 * kv))
    yield from ((key, layer.qkv[part]) for key, part in zip(keys.qkv, rows, strict=True))
    yield keys.o, layer.o
    yield keys.post_norm, layer.post_norm
    gate, up = keys.mlp.gate_up
    yield gate, layer.gate_up[:inner]
    yield up, layer.gate_up[inner:]
    yield keys.mlp.down, layer.down
    if layer.qkv_bias is not None:
        yield from zip(keys.qkv_bias, (layer.qkv_bias[part] for part in rows), strict=True)
    if layer.qk_norm is not None:
        yield from zip(keys.qk_norm, layer.qk_norm, strict=True)


def _write_shard(path: Path, tensors: dict[str, Any], to_host: ToHost) -> None:
    """Write a safetensors file, tensor by tensor: no second copy of it is ever in memory."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + 2 * math.prod(tensor.shape)
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            left = memoryview(to_host(tensor))
            while left:
                left = left[file.write(left) :]


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False))
