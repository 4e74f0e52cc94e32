"""A Llama in a GGUF file as the folder that transformers would have of it.

    python -m baton_testing.gguf_folder FILE FOLDER [--dtype float32]

Owns names, the order of rotating rows, and the tokenizer's files. NumPy alone, as `gguf`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.gguf import GgufFile

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
ARCHITECTURE, TOKENIZER, PRE = "llama", "gpt2", "smollm"
CONTROL = 3
"""A token's kind: special."""

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def write_gguf_folder(path: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write config.json, model.safetensors, the tokenizer's files and generation_config.json.

    Args:
        dtype: of the weights, `float32` as the file's numbers are, or `bfloat16`, rounded to even.

    Raises:
        ValueError: it is no GGUF file, no Llama, or has a tokenizer of another kind than SmolLM2's.
    """
    file = GgufFile(path)
    told = file.metadata
    known = (
        ("general.architecture", ARCHITECTURE),
        ("tokenizer.ggml.model", TOKENIZER),
        ("tokenizer.ggml.pre", PRE),
    )
    for field, wanted in known:
        if told.get(field) != wanted:
            raise ValueError(f"{path}: {field} is {told.get(field)!r}, not {wanted!r}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder / "model.safetensors", file, dtype)
    ends = {
        f"{name}_token_id": told[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    documents = {
        "config.json": _config(file, dtype) | ends,
        "generation_config.json": ends,
        "tokenizer.json": _tokenizer(told),
        "tokenizer_config.json": _tokenizer_config(told),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1))


def _config(file: GgufFile, dtype: str) -> dict[str, Any]:
    told = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": told["embedding_length"],
        "intermediate_size": told["feed_forward_length"],
        "num_hidden_layers": told["block_count"],
        "num_attention_heads": told["attention.head_count"],
        "num_key_value_heads": told["attention.head_count_kv"],
        "head_dim": told["rope.dimension_count"],
        "rms_norm_eps": told["attention.layer_norm_rms_epsilon"],
        "rope_theta": told["rope.freq_base"],
        "rope_scaling": None,
        "max_position_embeddings": told["context_length"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def _key(name: str) -> str:
    """Return a tensor's published name."""
    kind, _, weight = name.rpartition(".")
    if kind in OUTSIDE:
        return f"{OUTSIDE[kind]}.{weight}"
    _, index, part = kind.split(".")
    return f"model.layers.{index}.{LAYER[part]}.{weight}"


def _in_published_order(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    """Return a tensor, its rows in the published order.

    GGUF's Llamas rotate neighbours, the published ones an element of each half of a head.
    """
    tensor = file.tensor(name)
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return tensor
    width = file.metadata["llama.rope.dimension_count"]
    rows, columns = tensor.shape
    heads = tensor.reshape(rows // width, width // 2, 2, columns)
    return heads.swapaxes(1, 2).reshape(rows, columns)


def _write_tensors(path: Path, file: GgufFile, dtype: str) -> None:
    """Write a safetensors file, tensor by tensor: the model is never in memory whole."""
    size = 4 if dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in file.tensors.items():
        begin, end = end, end + size * math.prod(stored.shape)
        header[_key(name)] = {
            "dtype": DTYPES[dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in file.tensors:
            tensor = _in_published_order(file, name)
            out.write(np.ascontiguousarray(_rounded(tensor, dtype)).data)


def _rounded(tensor: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return little-endian float32, or the upper halves of it, to the nearest, ties to even."""
    if dtype == "float32":
        return tensor.astype("<f4", copy=False)
    bits = tensor.astype("<f4", copy=False).view("<u4")
    halves: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return halves


def _tokenizer(told: Any) -> dict[str, Any]:
    tokens, kinds = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL
    ]
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_],
        },
        "post_processor": None,
        "decoder": bytes_ | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": told["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(told: Any) -> dict[str, Any]:
    tokens = told["tokenizer.ggml.tokens"]
    named = {
        f"{name}_token": tokens[told[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    return named | {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": told["llama.context_length"],
        "chat_template": told["tokenizer.chat_template"],
    }


def main() -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    write_gguf_folder(options.file, options.folder, options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
