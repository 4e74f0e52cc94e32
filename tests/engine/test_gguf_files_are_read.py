"""The reader of GGUF that makes a real model's folder: numbers, order of rows, what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from baton_testing.gguf import F32, Q4_1, Q8_0, GgufFile
from baton_testing.gguf_folder import write_gguf_folder

STRING, UINT32, FLOAT32, INT32, ARRAY = 8, 4, 6, 5, 9
HEADS, WIDTH, HIDDEN = 2, 4, 32


def written(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a file; tensors are (shape, kind, bytes)."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(it: Any) -> bytes:
        if isinstance(it, list):
            of = STRING if isinstance(it[0], str) else INT32
            parts = [string(one) if of == STRING else struct.pack("<i", one) for one in it]
            return struct.pack("<IIQ", ARRAY, of, len(it)) + b"".join(parts)
        if isinstance(it, str):
            return struct.pack("<I", STRING) + string(it)
        if isinstance(it, float):
            return struct.pack("<If", FLOAT32, it)
        return struct.pack("<II", UINT32, it)

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    head += b"".join(string(key) + value(it) for key, it in fields.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_numbers_of_each_kind_are_scaled(tmp_path: Path) -> None:
    four = struct.pack("<ee16B", 0.5, -3.0, *((15 - i) << 4 | i for i in range(16)))
    eight = struct.pack("<e32b", 0.25, *range(-16, 16))
    plain = np.arange(6, dtype="<f4")
    tensors = {
        "four": ((1, 32), Q4_1, four),
        "eight": ((2, 16), Q8_0, eight),
        "plain": ((2, 3), F32, plain.tobytes()),
    }
    file = GgufFile(written(tmp_path / "it", {"pi": 3.25, "of": ["ä", "b"]}, tensors))
    assert file.metadata == {"pi": 3.25, "of": ["ä", "b"]}
    low = [0.5 * i - 3 for i in range(16)]
    assert file.tensor("four").tolist() == [low + low[::-1]]
    assert file.tensor("eight").ravel().tolist() == [0.25 * i for i in range(-16, 16)]
    assert file.tensor("plain").tolist() == plain.reshape(2, 3).tolist()


def llama(**changed: Any) -> dict[str, Any]:
    tokens = ["<|a|>", "<|b|>", "c", "d"]
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.rope.freq_base": 1e4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": WIDTH,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 1],
        "tokenizer.ggml.merges": ["c d"],
        "tokenizer.chat_template": "{{ messages }}",
    }
    kinds = ("bos", "eos", "unknown", "padding")
    return fields | {f"tokenizer.ggml.{kind}_token_id": 1 for kind in kinds} | changed


def test_rows_that_rotate_are_halves_in_the_folder(tmp_path: Path) -> None:
    rows = np.repeat(np.arange(HEADS * WIDTH, dtype="<f4")[:, None], HIDDEN, axis=1)
    shape = (HEADS * WIDTH, HIDDEN)
    tensors = {
        "token_embd.weight": ((4, HIDDEN), F32, np.full((4, HIDDEN), 1.00390625, "<f4").tobytes()),
        "blk.0.attn_q.weight": (shape, F32, rows.tobytes()),
        "blk.0.attn_v.weight": (shape, F32, rows.tobytes()),
    }
    path = written(tmp_path / "it", llama(), tensors)
    write_gguf_folder(path, tmp_path / "wide", "float32")
    found = load_file(tmp_path / "wide" / "model.safetensors")
    layer = "model.layers.0.self_attn"
    assert found[f"{layer}.q_proj.weight"][:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert found[f"{layer}.v_proj.weight"][:, 0].tolist() == [*range(8)]
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"]
    write_gguf_folder(path, tmp_path / "narrow", "bfloat16")
    data = (tmp_path / "narrow" / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    assert data[size : size + 2] == b"\x80\x3f", "1 + 2^-8 is rounded to even"


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="is no GGUF file of version 3"):
        GgufFile(path)
    whole = written(path, llama(), {}).read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(ValueError, match="ends within its head"):
        GgufFile(path)
    written(path, llama(**{"tokenizer.ggml.pre": "llama-bpe"}), {})
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is 'llama-bpe', not 'smollm'"):
        write_gguf_folder(path, tmp_path / "folder")
    written(path, llama(), {"odd": ((1, 32), 2, bytes(18))})
    with pytest.raises(ValueError, match="odd: numbers of kind 2"):
        GgufFile(path).tensor("odd")
