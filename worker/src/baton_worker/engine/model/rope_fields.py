"""What config.json says of rotation: its base, and how it is scaled to longer contexts.

Owns the two forms of the fields (`rope_theta` and `rope_scaling`, or `rope_parameters` in their
place) and refuses kinds and keys that no formula stands for. Knows no formula.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import NoReturn, TypeGuard

from baton_worker.engine.model.refusals import refuse
from baton_worker.engine.model.rope import (
    MAX_POSITIONS,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

Block = Mapping[str, object]

_NAMES = ("rope_scaling", "rope_parameters")
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_MOST_ATTENTION = 1000
"""YaRN's is 1.5 where it stretches a hundredfold; scores grow by its square, in float32."""
_LARGEST = sys.float_info.max
_KEYS = {
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_NOT_SCALED = (None, "none", "default")


def read_theta(
    rope_theta: float | None, rope_scaling: Block | None, parameters: Block | None, default: float
) -> float:
    """Return the base of the frequencies, which each of the three may tell.

    Raises:
        ModelShapeError: it is no number above 1, or two tell different ones.
    """
    told = _told("rope_theta", rope_theta, rope_scaling, parameters)
    for name, theta in told.items():
        if not _is_number(theta) or theta <= 1:
            refuse(name, theta, "a number > 1")
    return _agreed(told, default)


def read_rotated_part(
    part: float | None, rope_scaling: Block | None, parameters: Block | None, default: float
) -> float:
    """Return how much of each head rotates, which each of the three may tell.

    Raises:
        ModelShapeError: it is no number in 0..1, a family whose heads rotate whole has another one,
            or two tell different ones.
    """
    told = _told("partial_rotary_factor", part, rope_scaling, parameters)
    for name, value in told.items():
        if default == 1.0 and value != 1.0:
            refuse(name, value, "unset or 1")
        if not _is_number(value) or not 0.0 < value <= 1.0:
            refuse(name, value, "a number > 0 and <= 1")
    return _agreed(told, default)


def _told(
    key: str, plain: float | None, rope_scaling: Block | None, parameters: Block | None
) -> dict[str, object]:
    """Return what each place tells of a key, by its name there."""
    told: dict[str, object] = {key: plain} | {
        f"{name}.{key}": (block or {}).get(key)
        for name, block in zip(_NAMES, (rope_scaling, parameters), strict=True)
    }
    return {name: value for name, value in told.items() if value is not None}


def _agreed(told: dict[str, object], default: float) -> float:
    for name, value in told.items():
        for other, same in told.items():
            if value != same:
                refuse(name, value, f"unset or {same!r}, as {other} is")
    return next((float(value) for value in told.values() if _is_number(value)), default)


def read_scaling(rope_scaling: Block | None, parameters: Block | None) -> RopeScaling | None:
    """Return how frequencies are scaled, None where they are not.

    Raises:
        ModelShapeError: a kind, a key or a value that Baton does not know; both fields scale.
    """
    found = [
        (name, block)
        for name, block in zip(_NAMES, (rope_scaling or {}, parameters or {}), strict=True)
        if _kind(block) not in _NOT_SCALED
    ]
    for name, block in zip(_NAMES, (rope_scaling or {}, parameters or {}), strict=True):
        _refuse_two_kinds(name, block)
        if _kind(block) in _NOT_SCALED:
            _refuse_others(name, block, _COMMON)
    if not found:
        return None
    if len(found) > 1 and dict(found[0][1]) != dict(found[1][1]):
        refuse(_NAMES[0], rope_scaling, f"unset where {_NAMES[1]} scales too")
    name, block = found[-1]
    return _scaling(name, block)


def read_score_factor(rope_scaling: Block | None, parameters: Block | None) -> float:
    """Return what DeepSeek's scores are multiplied with, which must have been read as scaling:
    YaRN's growth by `mscale_all_dim`, squared, for it is not in the cosines then.

    Raises:
        ModelShapeError: a field is no number.
    """
    for name, block in zip(_NAMES, (rope_scaling or {}, parameters or {}), strict=True):
        if _kind(block) == "yarn":
            fields = _Fields(name, block)
            grown = _grown(fields.factor(), fields.number("mscale_all_dim", 0.0))
            if grown > _MOST_ATTENTION**0.5:
                fields.refuse("mscale_all_dim", block.get("mscale_all_dim"), "a smaller number")
            return grown**2
    return 1.0


def _kind(block: Block) -> object:
    kind = block.get("rope_type")
    return block.get("type") if kind is None else kind


def _refuse_two_kinds(name: str, block: Block) -> None:
    kind, older = _kind(block), block.get("type")
    if older is not None and older != kind:
        refuse(f"{name}.type", older, f"unset or {kind!r}, as {name}.rope_type is")


def _refuse_others(name: str, block: Block, known: set[str]) -> None:
    """Refuse what is told and no formula of the block's kind reads."""
    for key in sorted(block.keys() - known):
        if block[key] is not None:
            kind = _kind(block)
            of = "without a rope_type" if kind is None else f"for {kind!r}"
            refuse(f"{name}.{key}", block[key], f"unset {of}")


def _scaling(name: str, block: Block) -> RopeScaling:
    kind = _kind(block)
    if kind not in ("llama3", "yarn"):
        refuse(f"{name}.rope_type", kind, "'default', 'llama3' or 'yarn'")
    assert isinstance(kind, str)
    _refuse_others(name, block, _KEYS[kind] | _COMMON)
    fields = _Fields(name, block)
    return _llama3(fields) if kind == "llama3" else _yarn(fields)


class _Fields:
    """Numbers of one block, refused by name."""

    def __init__(self, name: str, block: Block) -> None:
        self._name = name
        self._block = block

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """Return a number above `least`, or the default for one that is not given."""
        value = self._block.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value) or not float(value) > least:
            refuse(f"{self._name}.{key}", value, f"a number > {least:g}")
        return float(value)

    def refuse(self, key: str, value: object, supported: str) -> NoReturn:
        """Raise ModelShapeError for a field, or what follows from several."""
        refuse(f"{self._name}.{key}", value, supported)

    def factor(self) -> float:
        """Return by how much the context is longer."""
        value = self.number("factor")
        if value < 1.0:
            self.refuse("factor", value, "a number >= 1")
        if value > MAX_POSITIONS:
            self.refuse("factor", value, f"<= {MAX_POSITIONS}")
        return value

    def positions(self) -> int:
        """Return the original context."""
        value = self._block.get(_ORIGINAL)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(_ORIGINAL, value, "a whole number >= 1")
        if value > MAX_POSITIONS:
            self.refuse(_ORIGINAL, value, f"<= {MAX_POSITIONS}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._block.get(key)
        if value is not None and not isinstance(value, bool):
            refuse(f"{self._name}.{key}", value, "true or false")
        return default if value is None else value

    def refuse_order(self, low: str, high: str, is_right: bool) -> None:
        """Refuse two bounds in the wrong order."""
        if not is_right:
            value = self._block.get(high)
            refuse(f"{self._name}.{high}", value, f"more than {low}")


def _llama3(fields: _Fields) -> Llama3Scaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    fields.refuse_order("low_freq_factor", "high_freq_factor", low < high)
    return Llama3Scaling(fields.factor(), low, high, fields.positions())


def _yarn(fields: _Fields) -> YarnScaling:
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    fields.refuse_order("beta_slow", "beta_fast", slow < fast)
    factor = fields.factor()
    sharper = fields.number("attention_factor", _attention_factor(fields, factor))
    if sharper > _MOST_ATTENTION:
        fields.refuse("attention_factor", sharper, f"a number in 0..{_MOST_ATTENTION}")
    return YarnScaling(
        factor=factor,
        original_positions=fields.positions(),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=sharper,
        truncate=fields.flag("truncate", True),
    )


def _attention_factor(fields: _Fields, factor: float) -> float:
    """Return the paper's, or DeepSeek's ratio of two, where a block has both of its numbers."""
    mscale, all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _grown(factor, mscale) / _grown(factor, all_dim)
    return _grown(factor, 1.0)


def _grown(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float64 holds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_LARGEST <= value <= _LARGEST
