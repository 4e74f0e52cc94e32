"""A Hugging Face checkpoint as a map from key to stored tensor, read without copying.

Owns the two file forms (one `model.safetensors`, or shards behind `model.safetensors.index.json`),
the storage dtypes and the checkpoint's identity. Knows no model: which keys there should be is
`naming`'s and `weights`' business.

The safetensors library validates each file; where tensors lie is then told by NumPy's views of it,
because the library's NumPy reader has no bfloat16, and `files` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from baton_ops.files import Number
from baton_worker.engine.model.e4m3 import decoded
from baton_worker.engine.model.files import MappedFile, ReadError
from baton_worker.engine.model.quantisation import E4M3

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAPPED_AS = _STORED_AS | {E4M3: "u1"}
_NUMBERS = {
    "F32": Number.FLOAT32,
    "F16": Number.FLOAT16,
    "BF16": Number.BFLOAT16,
    E4M3: Number.E4M3,
}
_WHOLE_HASH_BYTES = 256 << 10
_HASH_PAGES = 16
_HASH_PAGE_BYTES = 4096


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file or the key."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor in its file.

    `raw` is a read-only map of `shape`: uint16 for bfloat16, uint8 for e4m3, flat bytes for an
    unknown dtype. `file`: whose map that is, and who reads it; None for values that are in memory.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[Any]
    file: MappedFile | None = None

    def float32(
        self, rows: slice = slice(None), columns: slice = slice(None)
    ) -> npt.NDArray[np.float32]:
        """Return a float32 copy of these rows (and columns, of a matrix); nothing else is read.

        Raises:
            CheckpointError: the storage dtype is not F32, F16 or BF16, or the file cannot be read.
        """
        part = self.part(rows, columns)
        out = np.empty(part.shape, np.float32)
        part.write_to(out, slice(None))
        return out

    def e4m3(
        self, rows: slice = slice(None), columns: slice = slice(None)
    ) -> npt.NDArray[np.float32]:
        """Return the numbers of these rows and columns of an e4m3 matrix, without scales.

        Raises:
            CheckpointError: the storage dtype is another, or the file cannot be read.
        """
        self.require_e4m3()
        part = self.raw[rows, columns]
        if self.file is None:
            return decoded(part)
        out = np.empty(part.shape, np.float32)
        with self._telling():
            for block, values in self.file.blocks(part):
                out[block] = decoded(values)
        self.require_finite(out)
        return out

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> StoredTensor:
        """Return these rows (and columns, of a matrix) as a tensor of their own; nothing is read.

        Raises:
            CheckpointError: the storage dtype is not F32, F16, BF16 or F8_E4M3.
        """
        if self.dtype != E4M3:
            self.require_float()
        raw = self.raw[rows] if self.raw.ndim == 1 else self.raw[rows, columns]
        return dataclasses.replace(self, raw=raw, shape=raw.shape)

    def flat(self) -> StoredTensor:
        """Return its values in one row; nothing is read."""
        raw = self.raw.reshape(-1)
        return dataclasses.replace(self, raw=raw, shape=raw.shape)

    def write_to(self, out: npt.NDArray[Any], rows: slice) -> None:
        """Write these rows to `out`, contiguous: float32, or uint16 for the bits of bfloat16; of
        e4m3 numbers uint8, their bits.

        What is stored as it is wanted is read straight to `out`. Widening is exact; what bfloat16
        cannot hold is rounded to nearest, ties to even.

        Raises:
            CheckpointError: the storage dtype is another than that, the file cannot be read, or a
                number in it is not finite, or rounds to what is not.
        """
        if out.dtype == np.uint8:
            self.require_e4m3()
        else:
            self.require_float()
        part = self.raw[rows]
        if self.file is None:
            self._convert(part, out)
            self.require_finite(out)
            return
        with self._telling():
            is_finite = self.file.convert_to(out, part, _NUMBERS[self.dtype])
        if not is_finite:
            raise self._not_finite(out)

    def read(self, view: npt.NDArray[np.uint8]) -> bytes:
        """Return what a contiguous part of its bytes holds.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if self.file is None:
            return view.tobytes()
        with self._telling():
            return self.file.content(view)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except ReadError as error:
            raise CheckpointError(f"{self.key}: {self.dtype} {self.shape}: {error}") from error

    def _convert(self, part: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if out.dtype == np.uint16 and self.dtype == "BF16":
            np.copyto(out, part)
        elif out.dtype == np.uint16 and self.dtype == "F16":
            # Looked up, in a twelfth of the time. The mode matters: any other copies `out`.
            np.take(_rounded_halves(), part.view(np.uint16), out=out, mode="wrap")
        elif out.dtype == np.uint16:
            np.copyto(out, rounded(part))
        elif self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            np.left_shift(part, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(out, part)

    def require_finite(self, values: npt.NDArray[Any], made: str = "") -> None:
        """Refuse what was read of it, or made of that, where a number is not finite.

        Args:
            values: float32; uint16, the bits of bfloat16; uint8, those of e4m3.
            made: what was done with the numbers, for the message; "" for nothing.

        Raises:
            CheckpointError: one is not.
        """
        if not _are_finite(values):
            raise self._not_finite(values, made)

    def _not_finite(self, values: npt.NDArray[Any], made: str = "") -> CheckpointError:
        is_rounded = values.dtype == np.uint16 and (self.dtype == "F32" or made != "")
        beyond = ", or beyond what bfloat16 holds" if is_rounded else ""
        told = f"must be finite, and {made} is not" if made else "must be finite, and is not"
        return CheckpointError(f"{self.key}: {told}{beyond}{self.where}")

    def n_stored(self, rows: slice = slice(None)) -> int:
        """Return how many bytes of the file these rows are."""
        return int(self.raw[rows].nbytes)

    def require_e4m3(self) -> None:
        """Refuse a tensor that holds other numbers.

        Raises:
            CheckpointError: the storage dtype is not F8_E4M3.
        """
        if self.dtype != E4M3:
            raise CheckpointError(f"{self.key}: stored as {self.dtype}, wanted is {E4M3}")

    def require_float(self) -> None:
        """Refuse a tensor that holds other numbers.

        Raises:
            CheckpointError: the storage dtype is not F32, F16 or BF16.
        """
        if self.dtype not in _STORED_AS:
            hint = (
                ""
                if self.dtype != E4M3
                else (
                    "; decoder layers' matrices alone may be FP8, where quantization_config of "
                    "config.json says so"
                )
            )
            raise CheckpointError(
                f"{self.key}: stored as {self.dtype}, supported are {sorted(_STORED_AS)}{hint}"
                f"{self.where}"
            )

    @property
    def where(self) -> str:
        """Name its file, for the end of a message."""
        return "" if self.file is None else f" ({self.file.path})"


class _TensorInfo(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def open_checkpoint(model_dir: Path) -> Mapping[str, StoredTensor]:
    """Map every tensor of the checkpoint in `model_dir`; a single file wins over an index (as HF).

    Raises:
        CheckpointError: no checkpoint, a malformed or truncated file, or an index and its files
            that disagree about a key.
    """
    if (model_dir / SINGLE_FILE).exists():
        return dict(_tensors(model_dir / SINGLE_FILE))
    index_path = model_dir / INDEX_FILE
    if not index_path.exists():
        raise CheckpointError(f"{model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    try:
        encoded = index_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index_path}: {error.strerror}") from error
    index = _decode(encoded, _Index, index_path)
    return _sharded(model_dir, index.weight_map)


def identity(checkpoint: Mapping[str, StoredTensor]) -> str:
    """Return 32 hex digits naming these tensors, whatever files they are split into.

    Hashes every key, dtype and shape, and of the content all of a tensor up to 256 KiB, else 16
    evenly spaced pages of 4 KiB. That is 64 KiB a large tensor, 60 MB of a checkpoint with 1,000 of
    them, whatever their size. Two trainings, or a merged adapter, differ on every page; an edit of
    a few rows of a large matrix may fall between the pages and then goes unseen.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(checkpoint):
        tensor = checkpoint[key]
        digest.update(f"{key}\x1f{tensor.dtype}\x1f{tensor.shape}\x1e".encode())
        content = tensor.raw.reshape(-1).view(np.uint8)
        for page in _hashed_pages(content):
            digest.update(tensor.read(page))
    return digest.hexdigest()


def _are_finite(values: npt.NDArray[Any]) -> bool:
    if values.dtype == np.float32:
        return bool(np.isfinite(values).all())
    # All bits of the exponent are set; e4m3 has no infinity, and one NaN of each sign.
    mask = values.dtype.type(0x7F80 if values.dtype == np.uint16 else 0x7F)
    return not bool(((values & mask) == mask).any())


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the bfloat16 nearest to each value; NaN stays NaN."""
    bits = values.view(np.uint32)
    nearest = bits >> 16
    nearest &= 1
    nearest += np.uint32(0x7FFF)
    nearest += bits
    nearest >>= 16
    is_nan = np.isnan(values)
    if is_nan.any():  # its low bits may carry into infinity, or its sign
        nearest[is_nan] = (bits[is_nan] >> 16) | 0x40
    return nearest.astype(np.uint16)


@functools.cache
def _rounded_halves() -> npt.NDArray[np.uint16]:
    """Return for the bits of each float16 those of the bfloat16 nearest to it: u16[65536]."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    table = rounded(halves.astype(np.float32))
    table.flags.writeable = False
    return table


def _hashed_pages(content: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    if content.size <= _WHOLE_HASH_BYTES:
        yield content
        return
    for start in np.linspace(0, content.size - _HASH_PAGE_BYTES, _HASH_PAGES, dtype=np.int64):
        yield content[start : start + _HASH_PAGE_BYTES]


def _sharded(model_dir: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise CheckpointError(f"{INDEX_FILE}: {name!r} is not a plain file name")
        for key, tensor in _tensors(model_dir / name):
            if weight_map.get(key) != name:
                raise CheckpointError(
                    f"{key}: in {name}, but {INDEX_FILE} says {weight_map.get(key, 'nothing')!r}"
                )
            tensors[key] = tensor
    for key, name in weight_map.items():
        if key not in tensors:
            raise CheckpointError(f"{key}: {INDEX_FILE} says {name}, which does not hold it")
    return tensors


def _tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with path.open("rb"):  # first: the library says of what it may not open that it is missing
            pass
        with safe_open(path, framework="np"):
            pass
        file = MappedFile(path)
        body, header = _parts(file)
    except ReadError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}{_cut_off(path)}") from error
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        info = _decode(bytes(entry), _TensorInfo, path)
        stored = body[slice(*info.data_offsets)]
        if info.dtype in _MAPPED_AS:
            stored = stored.view(_MAPPED_AS[info.dtype]).reshape(info.shape)
        yield key, StoredTensor(key, info.dtype, info.shape, stored, file)


def _parts(file: MappedFile) -> tuple[npt.NDArray[np.uint8], dict[str, msgspec.Raw]]:
    """Return what is behind a file's header, and the header."""
    start = 8 + int.from_bytes(file.content(file.map[:8]), "little")
    header = file.content(file.map[8:start])
    return file.map[start:], _decode(header, dict[str, msgspec.Raw], file.path)


def _cut_off(path: Path) -> str:
    """Say which tensor is the first that a file does not hold to its end; "" if that is not why
    it was refused.
    """
    try:
        body, header = _parts(MappedFile(path))
        infos = {
            key: _decode(bytes(entry), _TensorInfo, path)
            for key, entry in header.items()
            if key != "__metadata__"
        }
    except (OSError, ValueError, ReadError):  # it is no such file at all, or not any more
        return ""
    cut = [(info.data_offsets[1], key) for key, info in infos.items()]
    for end, key in sorted(cut):
        if end > len(body):
            told = f"{key}, {infos[key].dtype} {infos[key].shape}"
            return f": {told}, ends {end - len(body)} bytes behind the file's end: it was cut off"
    return ""


def _decode(encoded: bytes, kind: Any, path: Path) -> Any:
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
