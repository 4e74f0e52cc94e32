"""Pieces of a checkpoint are read side by side, whoever is first, in memory that has a bound."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton_ops.files import StoredRows, read_rows
from baton_testing.numpy_device import NumpyDevice, on_device
from baton_worker.engine.backends.device import staging
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.staging import AHEAD, READERS, Staging
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model import checkpoint, files
from baton_worker.engine.model.checkpoint import CheckpointError, StoredTensor, open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.shards import Shard

PATIENCE_SECONDS = 60.0
ROWS = 5


class Recording(NumpyDevice):
    """Notes what page-locked memory is asked for, and the first number of each upload."""

    def __init__(self) -> None:
        super().__init__()
        self.host_bytes = 0
        self.uploaded: list[float] = []

    def host(self, n_bytes: int) -> Any:
        self.host_bytes += n_bytes
        return super().host(n_bytes)

    def upload(self, source: Any, to: Any) -> None:
        self.uploaded.append(float(source.flat[0]))
        super().upload(source, to)


class Noting(LoadProgress):
    """Keeps each number of bytes that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[int] = []

    def add(self, n_bytes: int) -> None:
        self.added.append(n_bytes)
        super().add(n_bytes)


class Tensors:
    """Stored tensors that hold their own number, and do something before they are read."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before = before
        self.begun: list[int] = []

    def stored(self, number: int) -> StoredTensor:
        test = self

        class Watched(StoredTensor):
            def write_to(self, out: Any, rows: slice) -> None:
                test.begun.append(number)
                test._before(number)
                super().write_to(out, rows)

        values = np.full((ROWS, 4), number, "<f4")
        return Watched(f"tensor {number}", "F32", values.shape, values)


def send_all(tensors: Tensors, count: int, device: NumpyDevice) -> Any:
    """Send tensors 0..count-1 to the rows of one, and return that."""
    to = device.empty((ROWS * count, 4), "float32")
    with Staging(device, lambda n_bytes: None) as pieces:
        for number in range(count):
            rows = device.rows(to, ROWS * number, ROWS * (number + 1))
            pieces.send(tensors.stored(number), rows, "float32")
        pieces.finish()
    return on_device(to)


def test_as_many_pieces_are_read_at_once_as_there_are_readers() -> None:
    together = threading.Barrier(READERS, timeout=PATIENCE_SECONDS)
    found = send_all(Tensors(lambda number: together.wait() and None), 2 * READERS, Recording())
    np.testing.assert_array_equal(found[::ROWS, 0], np.arange(2 * READERS))


def test_pieces_reach_the_device_in_order_though_the_last_is_read_first() -> None:
    done = [threading.Event() for _ in range(READERS + 1)]
    done[READERS].set()

    def last_first(number: int) -> None:
        assert done[number + 1].wait(PATIENCE_SECONDS)
        done[number].set()

    device = Recording()
    send_all(Tensors(last_first), READERS, device)
    assert device.uploaded == list(range(READERS))


def test_the_failure_that_is_told_is_the_first_in_order_not_in_time() -> None:
    later_failed = threading.Event()

    def fail(number: int) -> None:
        if number == 3:
            later_failed.set()
            raise CheckpointError("the later one")
        if number == 1:
            assert later_failed.wait(PATIENCE_SECONDS)
            raise CheckpointError("the earlier one")

    with pytest.raises(CheckpointError, match="the earlier one"):
        send_all(Tensors(fail), READERS, Recording())


def test_a_failure_ends_the_readers_and_nothing_more_is_begun() -> None:
    def fail(number: int) -> None:
        raise CheckpointError(f"tensor {number} is broken")

    tensors, before = Tensors(fail), threading.active_count()
    with pytest.raises(CheckpointError, match="tensor 0 is broken"):
        send_all(tensors, 100, Recording())
    assert threading.active_count() == before
    assert len(tensors.begun) <= READERS + AHEAD, "no more than there is memory for"


@pytest.mark.parametrize("count", [1, 200])
def test_page_locked_memory_has_a_bound_whatever_the_size_of_a_model(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    device = Recording()
    found = send_all(Tensors(lambda number: None), count, device)
    assert found.nbytes == count * ROWS * 16
    assert device.host_bytes == 64 * min(2 * count, READERS + AHEAD)


def test_a_read_converts_through_no_more_than_its_threads_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a block and a thread take is the library's: tests/ops/native/kernels_check.cc."""
    save_file({"x": np.ones((4096, 64), np.float16)}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)["x"]
    asked: list[tuple[int, int]] = []

    def noting(rows: StoredRows, out: Any, block_bytes: int, threads: int) -> Any:
        asked.append((block_bytes, threads))
        return read_rows(rows, out, block_bytes, threads)

    monkeypatch.setattr(files, "read_rows", noting)
    for part in (stored, stored.part(columns=slice(16, 32))):
        np.testing.assert_array_equal(part.float32(), np.ones(part.shape, np.float32))
    assert asked == [(1 << 20, files.THREADS)] * 2
    assert files.THREADS <= 4


def test_rows_that_python_converts_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x": np.ones((4096, 64), np.float16)}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)["x"].part(columns=slice(16, 32))
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    assert stored.file is not None
    blocks = [values for _, values in stored.file.blocks(stored.raw)]
    assert {values.base.nbytes for values in blocks} == {7 * 128}, "whole rows, seven at a time"
    assert sum(len(values) for values in blocks) == 4096


def test_a_rank_reads_its_rows_alone_and_of_columns_what_lies_between(
    make_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint("qwen3", storage="F32")
    shape, checkpoint = load_shape(made.path), open_checkpoint(made.path)
    read: dict[str, int] = {}
    write_to = StoredTensor.write_to
    lock, at_work = threading.Lock(), threading.local()

    def noting(self: StoredTensor, out: Any, rows: slice) -> None:
        at_work.key = self.key
        write_to(self, out, rows)

    def counting(rows: StoredRows, out: Any, *more: int) -> Any:
        n_bytes = (rows.rows - 1) * rows.pitch_bytes + 4 * rows.row_items
        with lock:
            read[at_work.key] = read.get(at_work.key, 0) + n_bytes
        return read_rows(rows, out, *more)

    monkeypatch.setattr(StoredTensor, "write_to", noting)
    monkeypatch.setattr(files, "read_rows", counting)
    load_device_weights(NumpyDevice(), checkpoint, shape, "float32", 1, Shard(1, 2))
    layer = "model.layers.0"
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"):
        key = f"{layer}.{name}.weight"
        assert 2 * read[key] == made.tensors[key].nbytes
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        key = f"{layer}.{name}.weight"
        whole = made.tensors[key]
        # Rank 1's columns end each row, so what lies before the first of them is not read.
        assert read[key] == whole.nbytes - whole[0].nbytes // 2


def test_the_bytes_of_a_rank_are_known_before_and_are_those_that_were_sent(
    make_checkpoint: Callable[..., Any],
) -> None:
    made = make_checkpoint("qwen3", storage="BF16", tie_word_embeddings=True)
    shape, checkpoint = load_shape(made.path), open_checkpoint(made.path)
    whole = 0
    for shard in (Shard(), Shard(0, 2)):
        progress = Noting()
        load_device_weights(NumpyDevice(), checkpoint, shape, "bfloat16", 0, shard, progress)
        known = progress.now()
        assert known.is_loaded
        assert sum(progress.added) == known.n_bytes > 0
        whole = whole or known.n_bytes
    assert known.n_bytes < whole


@pytest.mark.parametrize("on", ["device", "host"])
def test_a_file_that_is_cut_while_it_is_read_names_itself_the_key_and_the_shape(
    make_checkpoint: Callable[..., Any], on: str
) -> None:
    """A map would have ended the process."""
    made = make_checkpoint("qwen3", storage="BF16")
    shape, checkpoint = load_shape(made.path), open_checkpoint(made.path)
    last = max(checkpoint.values(), key=lambda stored: stored.raw.ctypes.data)
    path = made.path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 2)
    arguments = (NumpyDevice(), checkpoint, shape, "bfloat16", 1)
    load = partial(load_device_weights, *arguments) if on == "device" else last.float32
    expected = f"{last.key}: BF16 {last.shape}: {path}: ends at byte"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}.* 2 bytes early"):
        load()


def test_a_file_that_is_cut_while_it_is_opened_names_itself(
    make_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a download that begins anew; a map of the header would have ended the process."""
    made = make_checkpoint("qwen3")

    class Cut(files.MappedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            os.truncate(path, 0)

    monkeypatch.setattr(checkpoint, "MappedFile", Cut)
    expected = f"{made.path / 'model.safetensors'}: ends at byte 0, 8 bytes early"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}"):
        open_checkpoint(made.path)
