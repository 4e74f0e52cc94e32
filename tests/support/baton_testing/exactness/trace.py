"""Where two runs of a model first differ: the tensor, its layer, and the token's position.

Owns a `Kernels` that keeps what each call writes, by the token that it is of, and the comparison of
two runs. Graphs are replayed by calling their work again, so that every step is seen. For tests of
few and short requests: everything is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Peek = Callable[[Any], Array]
"""Returns a copy of a device's tensor, once its work is done; bfloat16 as float32."""

NAMES = {
    ("matmul", 1): "output projection",
    ("add_norm", 1): "norm after attention",
    ("gate_up_silu", 1): "gate, up and activation",
    ("matmul", 2): "down",
    ("add_norm", 2): "the next layer's norm",
    ("matmul", 3): "the next layer's queries, keys and values, or the head",
}
"""What a call is, by how many of its kind came since the last heads were rotated."""
FIRST = {
    ("add_norm", 1): "layer 0: norm",
    ("matmul", 1): "layer 0: queries, keys and values",
}
"""What it is before any were, in a pass of the main model."""


class Spot(NamedTuple):
    """Where a row stands in a pass: the number of the call, and what it is called."""

    call: int
    name: str


@dataclass
class Notes:
    """What a run computed of each sequence: `rows[first block][position][spot]`, and its tokens.

    A position that is computed again, behind a rejected draft or a preemption, is noted anew.
    """

    rows: dict[int, dict[int, dict[Spot, Array]]] = field(default_factory=dict)
    tokens: dict[int, dict[int, int]] = field(default_factory=dict)

    def of_text(self, text: Sequence[int]) -> dict[int, dict[Spot, Array]]:
        """Return the rows, by position, of the sequence that was fed this text."""

        def alike(block: int) -> int:
            fed = self.tokens[block]
            return sum(fed.get(place) == token for place, token in enumerate(text))

        return self.rows[max(self.tokens, key=alike)]


class EagerDevice:
    """A device whose graphs are their work, called again."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def capture(self, work: Callable[[], None]) -> Any:
        """Return what replays by calling `work`."""
        return _Again(work)


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class TracingKernels:
    """`Kernels` that notes what each call of the decoder writes."""

    def __init__(self, kernels: Any, peek: Peek) -> None:
        self._kernels = kernels
        self._peek = peek
        self._written: list[tuple[str, Array]] = []
        self._counts: dict[str, int] = {}
        self._layer: int | None = None
        self._drafts = False
        self._fed: Array = np.zeros(0, np.int32)
        self._places: tuple[Array, Array, Array] | None = None
        self._gathered: Array | None = None
        self._spreads = False
        self._taken: Notes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def begin(self) -> Notes:
        """Begin to take notes."""
        self._taken = Notes()
        return self._taken

    def end(self) -> None:
        """Note the last pass."""
        self._flush()
        self._taken = None

    def embed(self, table: Any, tokens: Any, out: Any) -> None:
        """A pass begins."""
        self._kernels.embed(table, tokens, out)
        if self._taken is None:
            return
        self._flush()
        self._fed = self._peek(tokens)
        self._write("embedding", out)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.matmul`."""
        self._kernels.matmul(x, weight, out)
        name = self._name("matmul")
        if self._layer is not None and self._counts["matmul"] == 1:
            self._write(f"layer {self._layer}: attention", x)  # of all groups of sequences
        self._write(name, out)

    def gate_up_silu(self, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.gate_up_silu`."""
        self._kernels.gate_up_silu(x, weight, out)
        self._write(self._name("gate_up_silu"), out)

    def scaled_matmul(self, x: Any, weight: Any, out: Any) -> None:
        """See `ScaledKernels.scaled_matmul`: named as any product."""
        self._kernels.scaled_matmul(x, weight, out)
        self._write(self._name("matmul"), out)

    def scaled_gate_up_silu(self, x: Any, weight: Any, out: Any) -> None:
        """See `ScaledKernels.scaled_gate_up_silu`."""
        self._kernels.scaled_gate_up_silu(x, weight, out)
        self._write(self._name("gate_up_silu"), out)

    def quantise_matmul(self, x: Any, room: Any, weight: Any, out: Any) -> None:
        """See `ScaledKernels.quantise_matmul`: named as any product."""
        self._kernels.quantise_matmul(x, room, weight, out)
        self._write(self._name("matmul"), out)

    def quantise_gate_up_silu(self, x: Any, room: Any, weight: Any, out: Any) -> None:
        """See `ScaledKernels.quantise_gate_up_silu`."""
        self._kernels.quantise_gate_up_silu(x, room, weight, out)
        self._write(self._name("gate_up_silu"), out)

    def add_norm(self, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
        """See `Kernels.add_norm`."""
        self._kernels.add_norm(x, residual, weight, eps, out)
        self._write_norm(residual, out)

    def _write_norm(self, residual: Any, out: Any) -> None:
        name = self._name("add_norm")
        self._write(f"{name}: residual", residual)
        self._write(name, out)

    def rope_store(
        self, qkv: Any, rotation: Any, places: Any, kv: Any, layer: int, query: Any
    ) -> None:
        """A layer begins; the step's places are known by now."""
        self._kernels.rope_store(qkv, rotation, places, kv, layer, query)
        self.begin_layer(places, layer)
        self.write_of_layer("rotated queries", query)

    @property
    def latent(self) -> Any:
        """Those of compressed rows."""
        return _TracingLatent(self._kernels.latent, self)

    def begin_layer(self, places: Any, layer: int) -> None:
        """Note that what comes is of this layer, and of tokens that stand there."""
        if self._taken is None:
            return
        self._places = tuple(map(self._peek, places))  # type: ignore[assignment]
        self._drafts = self._layer is None and layer > 0
        self._layer, self._counts = layer, {}

    def write_of_layer(self, name: str, out: Any) -> None:
        """Note what was written in a layer that has begun."""
        self._write(f"layer {self._layer}: {name}", out)

    def norm_route(self, x: Any, residual: Any, norm: Any, normed: Any, *given: Any) -> None:
        """A norm, and a mixture begins: what it gathers are tokens for its experts."""
        self._kernels.norm_route(x, residual, norm, normed, *given)
        self._write_norm(residual, normed)
        self._spreads = True

    def gather(self, x: Any, rows: Any, out: Any) -> None:
        """From here on rows are those that were gathered, unless a mixture did that."""
        self._kernels.gather(x, rows, out)
        if self._taken is not None and not self._spreads:
            self._gathered = self._peek(rows)

    def combine(self, *given: Any) -> None:
        """A mixture ends."""
        self._kernels.combine(*given)
        self._spreads = False

    def combine_norm(self, sum_: Any, residual: Any, norm: Any, out: Any) -> None:
        """A mixture ends, and a norm."""
        self._kernels.combine_norm(sum_, residual, norm, out)
        self._spreads = False
        self._write_norm(residual, out)

    def rank_sum_norm(
        self, part: Any, exchange: Any, room: Any, residual: Any, norm: Any, out: Any
    ) -> None:
        """A norm, of what all ranks computed."""
        self._kernels.rank_sum_norm(part, exchange, room, residual, norm, out)
        self._spreads = False
        self._write_norm(residual, out)

    def _name(self, kind: str) -> str:
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._layer is None:
            return FIRST.get((kind, count), f"before the first layer: {kind} {count}")
        return f"layer {self._layer}: {NAMES.get((kind, count), f'{kind} {count}')}"

    def _write(self, name: str, out: Any) -> None:
        if self._taken is not None:
            self._written.append((name, self._rows(self._peek(out))))

    def _rows(self, array: Array) -> Array:
        """Return a row for each token that was fed; NaN for those that were not gathered."""
        if self._gathered is None:
            return array
        spread = np.full((len(self._fed), *array.shape[1:]), np.nan, array.dtype)
        for place, row in zip(self._gathered, array, strict=False):
            if 0 <= place < len(spread):
                spread[place] = row
        return spread

    def _flush(self) -> None:
        """Give what the pass wrote to the sequences and positions that it was of."""
        written, self._written = self._written, []
        places, self._places = self._places, None
        self._layer, self._counts, self._gathered = None, {}, None
        if self._taken is None or places is None:
            return
        sequences, positions, tables = places
        kind = "draft " if self._drafts else ""
        for row in range(min(len(self._fed), len(sequences))):
            if (sequence := int(sequences[row])) < 0:
                continue
            block, position = int(tables[sequence, 0]), int(positions[row])
            if not self._drafts:  # the draft layer is fed the token behind
                self._taken.tokens.setdefault(block, {})[position] = int(self._fed[row])
            noted = self._taken.rows.setdefault(block, {}).setdefault(position, {})
            for call, (name, array) in enumerate(written):
                if row < len(array) and not np.isnan(np.ravel(array[row])[:1]).all():
                    noted[Spot(call, kind + name)] = np.array(array[row])


class _TracingLatent:
    """`LatentKernels` that notes a layer's beginning, its queries and what was attended."""

    def __init__(self, kernels: Any, notes: TracingKernels) -> None:
        self._kernels = kernels
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def store(self, row: Any, norm: Any, rotation: Any, places: Any, kv: Any, layer: int) -> None:
        """See `LatentKernels.store`: the first of a layer's."""
        self._kernels.store(row, norm, rotation, places, kv, layer)
        self._notes.begin_layer(places, layer)

    def rotate(self, queries: Any, rotation: Any, places: Any, mla: Any, query: Any) -> None:
        """See `LatentKernels.rotate`: behind what folds."""
        self._kernels.rotate(queries, rotation, places, mla, query)
        self._notes.write_of_layer("folded and rotated queries", query)

    def unfold(self, attended: Any, kv_up: Any, mla: Any, out: Any) -> None:
        """See `LatentKernels.unfold`."""
        self._kernels.unfold(attended, kv_up, mla, out)
        self._notes.write_of_layer("what was attended", attended)


def first_differing(one: Notes, other: Notes, text: Sequence[int], past: Iterable[int] = ()) -> str:
    """Return where the two runs' computation of a text first differs, "" for nowhere.

    Positions are compared in order, and the tensors of each as they were computed.

    Args:
        past: positions to leave out.
    """
    ours, theirs = one.of_text(text), other.of_text(text)
    for position in sorted(set(ours) & set(theirs) - set(past)):
        mine = {spot.name: row for spot, row in sorted(ours[position].items())}
        for name, row in mine.items():
            found = {spot.name: r for spot, r in theirs[position].items()}.get(name)
            if found is not None and row.tobytes() != found.tobytes():
                return f"position {position}, {name}: {_told(row, found)}"
    return ""


def _told(one: Array, other: Array) -> str:
    if one.shape != other.shape:
        return f"shapes {one.shape} and {other.shape}"
    unequal = np.flatnonzero(one.ravel() != other.ravel())
    most = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    at = int(unequal[0]) if len(unequal) else 0
    values = f"{one.ravel()[at]:.9g} and {other.ravel()[at]:.9g}"
    return f"{len(unequal)} of {one.size} values differ, by {most:.3g} at most; [{at}] is {values}"
