"""`quantization_config` of config.json: the two ways to say FP8 that are read, all else refused.

`fp8` is DeepSeek-V3's way (arXiv 2412.19437, section 3.3.2), which Qwen3's FP8 checkpoints share:
weights in blocks of 128 x 128, activations in groups of 128 of each token. `compressed-tensors` can
say the same, and one scale for each output and for each token (GLM-4.5-FP8). Fields are those of
`FineGrainedFP8Config` in transformers 5.17 and `QuantizationConfig` in compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.refusals import refuse

FIELD = "quantization_config"
BLOCK = 128

Fields = Mapping[str, object]

_SAY_NOTHING: tuple[object, ...] = (None, False, {}, [])
_FP8_FIELDS = {
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "scale_fmt": ("float", None),
}
"""What is read, and the values that it may have; null is what older configs leave out."""
_FP8_LISTS = ("modules_to_not_convert", "ignored_layers")
_NUMBERS = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
_OF_WEIGHTS = _NUMBERS | {"dynamic": (False,)}
_OF_ACTIVATIONS = _NUMBERS | {"dynamic": (True,)}
_STRATEGIES: dict[tuple[object, object], int] = {("block", "group"): BLOCK, ("channel", "token"): 0}
_INFORMS = frozenset(
    ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "block_structure")
)
"""How a checkpoint was made, or what its strategy decides."""


def read_quantisation(fields: Fields | None) -> Fp8 | None:
    """Return what a config says of quantised weights, None for nothing.

    Raises:
        ModelShapeError: it says something that Baton cannot run; the message names field and value.
    """
    if not fields:
        return None
    method = fields.get("quant_method")
    if method == "fp8":
        return _read_fp8(fields)
    if method != "compressed-tensors":
        refuse(f"{FIELD}.quant_method", method, "'fp8' or 'compressed-tensors' (FP8 both)")
    return _read_compressed(fields)


def _read_fp8(fields: Fields) -> Fp8:
    for name, allowed in _FP8_FIELDS.items():
        _require(FIELD, fields, name, allowed)
    _refuse_others(FIELD, fields, {"quant_method", *_FP8_FIELDS, *_FP8_LISTS})
    kept = [each for field in _FP8_LISTS for each in _patterns(fields, field, _module_pattern)]
    return Fp8(BLOCK, BLOCK, "weight_scale_inv", tuple(kept))


def _read_compressed(fields: Fields) -> Fp8:
    _require(FIELD, fields, "format", ("float-quantized",))
    _require(FIELD, fields, "quantization_status", ("compressed", None))
    _refuse_others(
        FIELD,
        fields,
        {
            *("quant_method", "format", "quantization_status", "config_groups", "ignore"),
            *("version", "global_compression_ratio"),
        },
    )
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        refuse(f"{FIELD}.config_groups", groups, "a group of 'Linear'")
    found = {_read_group(f"{FIELD}.config_groups.{name}", group) for name, group in groups.items()}
    if len(found) > 1:
        refuse(f"{FIELD}.config_groups", sorted(groups), "groups that say the same")
    group = found.pop()
    kept = _patterns(fields, "ignore", _ignored_pattern)
    return Fp8(group, BLOCK if group else 1, "weight_scale", tuple(kept))


def _read_group(path: str, group: object) -> int:
    """Return how many elements have a scale of their own, 0 for a whole row."""
    fields = _mapping(path, group)
    _require(path, fields, "targets", (["Linear"],))
    _require(path, fields, "format", ("float-quantized", None))
    _refuse_others(path, fields, {"targets", "format", "weights", "input_activations"})
    weights = _mapping(f"{path}.weights", fields.get("weights"))
    inputs = _mapping(f"{path}.input_activations", fields.get("input_activations"))
    _check_arguments(f"{path}.weights", weights, _OF_WEIGHTS)
    _check_arguments(f"{path}.input_activations", inputs, _OF_ACTIVATIONS)
    strategies = (weights.get("strategy"), inputs.get("strategy"))
    size = next((size for known, size in _STRATEGIES.items() if known == strategies), None)
    if size is None:
        what = f"{path}, strategies of weights and input_activations,"
        refuse(what, strategies, f"one of {sorted(_STRATEGIES)}")
    if size:
        _require(f"{path}.weights", weights, "block_structure", ([size, size],))
        _require(f"{path}.input_activations", inputs, "group_size", (size,))
    return size


def _check_arguments(path: str, fields: Fields, allowed: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in allowed.items():
        _require(path, fields, name, values)
    _refuse_others(path, fields, {*allowed, *_INFORMS, "strategy"})


def _require(path: str, fields: Fields, name: str, allowed: tuple[object, ...]) -> None:
    value = fields.get(name)
    if not any(value == each and type(value) is type(each) for each in allowed):
        said = " or ".join("unset" if each is None else repr(each) for each in allowed)
        refuse(f"{path}.{name}", value, said)


def _refuse_others(path: str, fields: Fields, known: set[str]) -> None:
    for name, value in fields.items():
        if name not in known and value not in _SAY_NOTHING:
            refuse(f"{path}.{name}", value, "unset")


def _mapping(path: str, value: object) -> Fields:
    if not isinstance(value, dict):
        refuse(path, value, "an object of its fields")
    return value


_REPEATED = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_REPEATED = 4
"""Of a pattern: each one more may take as many tries as a module's name has characters."""


def _patterns(fields: Fields, field: str, pattern_of: Callable[[str], str]) -> list[str]:
    names = fields.get(field)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(f"{FIELD}.{field}", names, "a list of names")
    return [_checked(f"{FIELD}.{field}", name, pattern_of(name)) for name in names]


def _checked(path: str, name: str, pattern: str) -> str:
    """Refuse what is no regular expression, or one that may try for ever on a name."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        refuse(path, name, f"a name or a regular expression ({error})")
    if _REPEATED_GROUP.search(name) or len(_REPEATED.findall(name)) > _MOST_REPEATED:
        refuse(path, name, f"an expression with {_MOST_REPEATED} repetitions at most, of no group")
    return pattern


def _module_pattern(name: str) -> str:
    """A module, all below one, or all whose last words are these; `model.layers.1` is not 10."""
    return rf"(.*\.)?(?:{name})(\.|$)"


def _ignored_pattern(name: str) -> str:
    """A module by its whole name, or behind `re:` one whose name begins with a match."""
    return name[3:] if name.startswith("re:") else f"{re.escape(name)}$"
