"""Which part of a model a tensor-parallel rank has: heads, the MLP's width, rows of the head.

Owns the arithmetic of parts alone, so that whoever reads weights, sizes a pool or moves KV cuts
alike. Where ranks outnumber KV heads, neighbours have the same one. Knows no tensor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton_worker.engine.model.shape import ModelShape

_HEAD_ROWS = 8
"""Of an output head a rank has a multiple of so many rows: what the fast products take."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor-parallel group: heads and the intermediate width are split."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard rank {self.rank} is not in 0..{self.size - 1}")

    def part(self, width: int) -> slice:
        """Return this rank's of `width` rows or columns, which divide."""
        local = width // self.size
        return slice(self.rank * local, (self.rank + 1) * local)

    def kv_heads(self, count: int) -> slice:
        """Return this rank's of `count` KV heads: one that others have too if there are fewer."""
        local = max(count // self.size, 1)
        first = self.rank * count // self.size
        return slice(first, first + local)

    def vocabulary(self, count: int) -> slice:
        """Return the ids whose logits this rank computes, maybe none."""
        rows = head_rows(count, self.size)
        first = min(self.rank * rows, count)
        return slice(first, min(first + rows, count))


WHOLE = Shard()


def head_rows(vocab_size: int, size: int) -> int:
    """Return the rows of the output head that each rank has room for; the last ones' may be void.

    The whole head of one rank has no such rows.
    """
    if size == 1:
        return vocab_size
    return -(-vocab_size // (size * _HEAD_ROWS)) * _HEAD_ROWS


def local_shape(shape: ModelShape, size: int) -> ModelShape:
    """Return the shape that each of `size` ranks computes; the vocabulary stays whole."""
    return dataclasses.replace(
        shape,
        n_heads=shape.n_heads // size,
        n_kv_heads=max(shape.n_kv_heads // size, 1),
        intermediate_size=shape.intermediate_size // size,
        experts=shape.experts and shape.experts.part(size),
    )


def cut_sizes(shape: ModelShape) -> dict[str, int]:
    """Return what is cut into a part for each rank, under config.json's names."""
    sizes = {
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "intermediate_size": shape.intermediate_size,
    }
    if shape.mla is not None:  # every rank has the one row that all heads share
        del sizes["num_key_value_heads"]
    if shape.experts is not None:
        sizes["moe_intermediate_size"] = shape.experts.intermediate_size
        sizes["width of shared experts"] = shape.experts.shared_size
    return sizes


def split_groups(shape: ModelShape, size: int) -> str:
    """Say what a rank of `size` would have parts of groups of, "" for nothing.

    Of the products whose inputs are cut, attention's output and an MLP's second, ranks must have
    whole groups: a group has one scale, of its largest element, which no rank would know alone.
    """
    quantisation = shape.quantisation
    if size == 1 or quantisation is None:
        return ""
    head = "head_dim" if shape.mla is None else "v_head_dim"
    of_heads = ("num_attention_heads", "num_key_value_heads")
    cut = {f"num_attention_heads x {head}": shape.o_size}
    cut |= {name: width for name, width in cut_sizes(shape).items() if name not in of_heads}
    for name, width in cut.items():
        if width and (not quantisation.group or width // size % quantisation.group):
            of = quantisation.group or "all"
            return (
                f"{name} {width} over {size} ranks: the FP8 scales of activations are of {of} "
                "elements, which ranks must not share"
            )
    return ""


def check_divides(shape: ModelShape, size: int, may_repeat_heads: bool) -> None:
    """Refuse a number of ranks that a model cannot be cut for.

    Args:
        may_repeat_heads: whether several ranks may have the same KV head.

    Raises:
        ValueError: naming what does not divide, or whose groups of FP8 numbers would be cut.
    """
    for name, count in cut_sizes(shape).items():
        repeats = may_repeat_heads and name == "num_key_value_heads" and size % count == 0
        if count % size and not repeats:
            raise ValueError(f"{size}, which does not divide the model's {name} {count}")
    shared = split_groups(shape, size)
    if shared:
        raise ValueError(f"{size}, which cuts {shared}")
