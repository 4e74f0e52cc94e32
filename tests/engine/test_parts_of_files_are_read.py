"""Any part of a stored tensor is read from its file as NumPy would cut it from the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import TensorSpec, serialize_file

from baton_worker.engine.model import files
from baton_worker.engine.model.checkpoint import StoredTensor, open_checkpoint

ROWS, COLUMNS = 23, 17
VALUES = np.random.default_rng(5).standard_normal((ROWS, COLUMNS)).astype(np.float32)
AS_STORED = {
    "F32": VALUES,
    "F16": VALUES.astype(np.float16),
    "BF16": (VALUES.view(np.uint32) >> 16).astype(np.uint16),
}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredTensor]:
    """The same values in each form, of one file."""
    folder = tmp_path_factory.mktemp("parts")
    specs = {
        kind: TensorSpec(
            dtype=NAMES[kind],
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for kind, array in AS_STORED.items()
    }
    serialize_file(specs, folder / "model.safetensors", {})
    return dict(open_checkpoint(folder))


def cuts(size: int) -> st.SearchStrategy[slice]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(lambda pair: slice(min(pair), max(pair)))


@given(
    kind=st.sampled_from(sorted(AS_STORED)),
    rows=cuts(ROWS),
    columns=cuts(COLUMNS),
    block_bytes=st.integers(1, 2000),
)
def test_a_part_is_what_numpy_cuts(
    stored: dict[str, StoredTensor], kind: str, rows: slice, columns: slice, block_bytes: int
) -> None:
    tensor = stored[kind]
    in_memory = StoredTensor(kind, kind, tensor.shape, AS_STORED[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        found = tensor.float32(rows, columns)
        bits = np.zeros(found.shape, np.uint16)
        tensor.part(rows, columns).write_to(bits, slice(None))
    np.testing.assert_array_equal(found, in_memory.float32()[rows, columns])
    expected = np.zeros((ROWS, COLUMNS), np.uint16)
    in_memory.write_to(expected, slice(None))
    np.testing.assert_array_equal(bits, expected[rows, columns])
