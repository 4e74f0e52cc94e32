"""What the host can see of a bad call to a decoder's op, it refuses by name."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton_ops import decoder


class Calls:
    """Correct calls, any argument of which can be replaced."""

    def __init__(self, torch: ModuleType) -> None:
        def bf16(*shape: int) -> Any:
            return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")

        def ints(*shape: int) -> Any:
            return torch.zeros(*shape, dtype=torch.int32, device="cuda")

        angles, kv, heads = (
            torch.zeros(8, 8, device="cuda"),
            bf16(4, 2, 2, 2, 4, 16),
            bf16(6, 4, 16),
        )
        self.arguments: dict[str, dict[str, Any]] = {
            "embed": {"table": bf16(5, 8), "tokens": ints(3), "out": bf16(3, 8)},
            "gather": {"x": bf16(5, 8), "rows": ints(3), "out": bf16(3, 8)},
            "add_norm": {
                "x": bf16(3, 8),
                "residual": bf16(3, 8),
                "weight": bf16(8),
                "eps": 1e-6,
                "out": bf16(3, 8),
            },
            "silu_mul": {"gate_up": bf16(3, 16), "out": bf16(3, 8)},
            "broken_rows": {"x": bf16(3, 8), "out": torch.zeros(3).byte().cuda()},
            "matmul": {"x": bf16(3, 8), "weight": bf16(5, 8), "out": bf16(3, 5)},
            "gate_up_silu": {"x": bf16(3, 8), "weight": bf16(32, 8), "out": bf16(3, 16)},
            "attend": {
                "query": heads,
                "kv": kv,
                "layer": 1,
                "tables": ints(3, 2),
                "contexts": ints(3),
                "scale": 1.0,
                "out": heads.clone(),
                "scratch": torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"),
            },
            "rope_store": {
                "qkv": bf16(6, 128),
                "bias": bf16(128),
                "query_norm": bf16(16),
                "key_norm": bf16(16),
                "eps": 1e-6,
                "cos": angles,
                "sin": angles.clone(),
                "style": "half",
                "sequence": ints(6),
                "position": ints(6),
                "tables": ints(3, 2),
                "kv": kv,
                "layer": 1,
                "query": heads,
            },
        }

    def call(self, op: str, **changed: Any) -> None:
        given = {**self.arguments[op], **changed}
        if op != "rope_store":
            getattr(decoder, f"{op}_into")(**given)
            return
        norms = (given["query_norm"], given["key_norm"])
        rotation = SimpleNamespace(
            norms=norms, **{k: given[k] for k in ("bias", "eps", "cos", "sin", "style")}
        )
        places = SimpleNamespace(**{k: given[k] for k in ("sequence", "position", "tables")})
        decoder.rope_store_into(
            given["qkv"], rotation, places, given["kv"], given["layer"], given["query"]
        )


OPS = [
    "embed",
    "gather",
    "add_norm",
    "silu_mul",
    "broken_rows",
    "matmul",
    "gate_up_silu",
    "attend",
    "rope_store",
]


@pytest.mark.parametrize("op", OPS)
def test_a_correct_call_passes(torch: ModuleType, op: str) -> None:
    Calls(torch).call(op)
    torch.cuda.synchronize()


def spoiled(torch: ModuleType, value: Any) -> dict[str, Any]:
    """A tensor, wrong in one way each."""
    return {
        "on the host": value.cpu(),
        "of another dtype": value.double(),
        "of another rank": value[None],
        "of a wrong size": torch.cat([value, value]),
    }


@pytest.mark.parametrize("wrong", ["on the host", "of another dtype", "of another rank"])
@pytest.mark.parametrize("op", OPS)
def test_each_tensor_is_refused_by_name(torch: ModuleType, op: str, wrong: str) -> None:
    calls = Calls(torch)
    for name, value in calls.arguments[op].items():
        if not isinstance(value, torch.Tensor):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b|first argument"):
            calls.call(op, **{name: spoiled(torch, value)[wrong]})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("embed", n) for n in ("tokens", "out")),
        *(("add_norm", n) for n in ("x", "weight", "out")),
        *(("silu_mul", n) for n in ("gate_up", "out")),
        ("broken_rows", "out"),
        ("matmul", "out"),
        *(("gate_up_silu", n) for n in ("x", "weight", "out")),
        *(("attend", n) for n in ("out", "contexts")),
        *(
            ("rope_store", n)
            for n in ("qkv", "bias", "query_norm", "key_norm", "sin", "sequence", "query")
        ),
    ],
)
def test_a_wrong_size_is_refused(torch: ModuleType, op: str, name: str) -> None:
    calls = Calls(torch)
    value = calls.arguments[op][name]
    with pytest.raises(ValueError, match="must"):
        calls.call(op, **{name: spoiled(torch, value)["of a wrong size"]})


@pytest.mark.parametrize("op", ["attend", "rope_store"])
@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_the_pool_lacks(torch: ModuleType, op: str, layer: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        Calls(torch).call(op, layer=layer)


def test_one_norm_without_the_other(torch: ModuleType) -> None:
    with pytest.raises(ValueError, match="key_norm"):
        Calls(torch).call("rope_store", key_norm=None)


def test_an_unknown_style(torch: ModuleType) -> None:
    with pytest.raises(ValueError, match="style"):
        Calls(torch).call("rope_store", style="spiral")


def test_queries_that_no_number_of_sequences_shares(torch: ModuleType) -> None:
    calls = Calls(torch)
    tables, contexts = (calls.arguments["attend"][n] for n in ("tables", "contexts"))
    with pytest.raises(ValueError, match="query"):
        calls.call("attend", tables=tables.repeat(2, 1)[:4], contexts=contexts.repeat(2)[:4])
