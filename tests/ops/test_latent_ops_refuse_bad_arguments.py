"""What does not fit an op of compressed rows is refused by name; what fits comes to the driver.

Needs a library with CUDA code, and no driver: see `baton_testing.stub_device`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton_ops import latent
from baton_testing.stub_device import FIT, StubDevice, has_cuda_code
from baton_worker.engine.backends.device.operands import Places, Rotation

pytestmark = pytest.mark.skipif(
    not has_cuda_code(), reason="needs baton_ops with CUDA code on a machine without a GPU"
)

TOKENS, HEADS, RANK, ROPE, NOPE, VALUE = 6, 4, 32, 8, 16, 24
ROW, WIDTH = RANK + ROPE, HEADS * (NOPE + ROPE)


def tensor(*shape: int, dtype: Any = "bfloat16") -> Any:
    return StubDevice().empty(shape, dtype)


def ints(*shape: int) -> Any:
    return tensor(*shape, dtype="int32")


def fold(**changed: Any) -> None:
    given = {
        "queries": tensor(TOKENS, WIDTH),
        "kv_up": tensor(HEADS * (NOPE + VALUE), RANK),
        "nope_size": NOPE,
        "out": tensor(TOKENS, HEADS, ROW),
    } | changed
    latent.fold_into(**given)


def unfold(**changed: Any) -> None:
    given = {
        "attended": tensor(TOKENS, HEADS, RANK),
        "kv_up": tensor(HEADS * (NOPE + VALUE), RANK),
        "nope_size": NOPE,
        "out": tensor(TOKENS, HEADS * VALUE),
    } | changed
    latent.unfold_into(**given)


def _placed(given: dict[str, Any]) -> dict[str, Any]:
    """Put angles and places of a call together, as the ops take them."""
    angles = (given.pop("cos"), given.pop("sin"))
    places = Places(*(given.pop(name) for name in ("sequence", "position", "tables")))
    return given | {"rotation": Rotation(None, 1e-6, *angles, "half"), "places": places}


PLACED: dict[str, Any] = {
    "cos": tensor(50, ROPE // 2, dtype="float32"),
    "sin": tensor(50, ROPE // 2, dtype="float32"),
    "sequence": ints(TOKENS),
    "position": ints(TOKENS),
    "tables": ints(2, 5),
}


def rotate(**changed: Any) -> None:
    given = {
        "queries": tensor(TOKENS, WIDTH),
        "rope_size": ROPE,
        "query": tensor(TOKENS, HEADS, ROW),
    }
    latent.rotate_into(**_placed(given | PLACED | changed))


def store(**changed: Any) -> None:
    given = {
        "row": tensor(TOKENS, ROW),
        "norm": tensor(RANK),
        "kv": tensor(9, 2, 1, 1, 16, ROW),
        "layer": 1,
    }
    latent.store_into(**_placed(given | PLACED | changed))


def attend(**changed: Any) -> None:
    given = {
        "query": tensor(TOKENS, HEADS, ROW),
        "kv": tensor(9, 2, 1, 1, 16, ROW),
        "layer": 1,
        "tables": ints(2, 5),
        "contexts": ints(2),
        "scale": 0.2,
        "out": tensor(TOKENS, HEADS, RANK),
        "scratch": tensor(64, dtype="uint8"),
    } | changed
    latent.attend_into(**given)


@pytest.mark.parametrize("op", [fold, unfold, rotate, store, attend])
def test_what_fits_comes_to_the_driver(op: Any) -> None:
    with pytest.raises(RuntimeError, match=FIT):
        op()


@pytest.mark.parametrize(
    ("op", "changed", "message"),
    [
        (fold, {"queries": tensor(TOKENS, WIDTH + 1)}, f"queries.shape[1] must be {WIDTH}"),
        (fold, {"queries": tensor(TOKENS, WIDTH, dtype="int32")}, "queries must be bfloat16 or"),
        (fold, {"kv_up": tensor(HEADS * 40 + 1, RANK)}, "kv_up.shape[0] must be a multiple of"),
        (fold, {"kv_up": tensor(HEADS * 40, RANK, dtype="float32")}, "kv_up must be bfloat16"),
        (fold, {"nope_size": 41}, "nope_size[0] must be in [0, 40], got 41"),
        (fold, {"out": tensor(TOKENS, HEADS, RANK - 1)}, "out.shape[2] must be in [32,"),
        (unfold, {"attended": tensor(TOKENS, HEADS, RANK + 1)}, "attended.shape[2] must be 32"),
        (unfold, {"out": tensor(TOKENS, 1)}, f"out.shape[1] must be {HEADS * VALUE}"),
        (rotate, {"rope_size": 7}, "rope_size must be even, got 7"),
        (rotate, {"rope_size": ROW + 2}, "rope_size[0] must be in [0, 40], got 42"),
        (rotate, {"queries": tensor(TOKENS, WIDTH + 1)}, "queries.shape[1] must be a multiple of"),
        (rotate, {"queries": tensor(TOKENS, 4)}, "queries.shape[1] must be in [32,"),
        (rotate, {"cos": tensor(50, 3, dtype="float32")}, "cos.shape[1] must be 4"),
        (rotate, {"sequence": ints(TOKENS + 1)}, f"sequence.shape[0] must be {TOKENS}"),
        (store, {"row": tensor(TOKENS, ROW + 2)}, f"row.shape[1] must be {ROW}"),
        (store, {"norm": tensor(ROW + 2)}, "norm.shape[0] must be in [1, 40], got 42"),
        (store, {"norm": tensor(RANK - 1)}, "kv.shape[5] less norm.shape[0] must be even, got 9"),
        (store, {"kv": tensor(9, 2, 2, 1, 16, ROW)}, "kv.shape[2] must be 1"),
        (store, {"kv": tensor(9, 2, 1, 2, 16, ROW)}, "kv.shape[3] must be 1"),
        (store, {"layer": 2}, "layer must be in [0, 2), got 2"),
        (attend, {"kv": tensor(9, 2, 2, 1, 16, ROW)}, "kv.shape[2] must be 1"),
        (attend, {"query": tensor(TOKENS, HEADS, RANK)}, f"query.shape[2] must be {ROW}"),
        (attend, {"out": tensor(TOKENS, HEADS, ROW + 1)}, "out.shape[2] must be in [1, 40]"),
        (attend, {"contexts": ints(3)}, "contexts.shape[0] must be 2"),
        (attend, {"scratch": tensor(64)}, "scratch must be uint8"),
        (attend, {"query": tensor(5, HEADS, ROW)}, "query.shape[0] must be a multiple of"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    op: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        op(**changed)
