"""`quantization_config` says FP8 in one of the published ways, or is refused by field and value."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from baton_testing.fp8_folder import said
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.quantisation_fields import read_quantisation
from baton_worker.engine.model.refusals import ModelShapeError
from baton_worker.engine.model.shape import fingerprint, load_shape

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
GROUP = "quantization_config.config_groups.group_0"


def keeps(quantisation: Fp8 | None, module: str) -> bool:
    assert quantisation is not None
    return any(pattern.match(module) for pattern in quantisation.patterns())


@pytest.mark.parametrize("fields", [None, {}])
def test_nothing_said_is_nothing_quantised(fields: Any) -> None:
    assert read_quantisation(fields) is None


def test_deepseeks_and_qwens_way_is_blocks_and_groups_of_128() -> None:
    found = read_quantisation(DEEPSEEK)
    assert found == Fp8(128, 128, "weight_scale_inv")
    assert found.scale_key("model.layers.0.mlp.up_proj.weight") == (
        "model.layers.0.mlp.up_proj.weight_scale_inv"
    )
    assert found.scale_shape((300, 129)) == (3, 2)


@pytest.mark.parametrize(
    ("strategy", "group", "rows", "shape"),
    [("block", 128, 128, (3, 2)), ("channel", 0, 1, (300, 1))],
)
def test_compressed_tensors_is_blocks_or_a_scale_for_each_output(
    strategy: Any, group: int, rows: int, shape: tuple[int, int]
) -> None:
    found = read_quantisation(said(strategy))
    assert found is not None
    assert (found.group, found.rows, found.scale) == (group, rows, "weight_scale")
    assert found.scale_shape((300, 129)) == shape
    assert [found.group_of(width) for width in (50, 400)] == [group or 50, group or 400]


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_to_not_convert_are_kept_by_name_by_their_last_words_and_below(field: str) -> None:
    listed = ["lm_head", "model.layers.1", "mlp.gate", "model.layers.3.self_attn.q_proj"]
    found = read_quantisation(DEEPSEEK | {field: listed})
    for module in (
        "lm_head",
        "model.layers.1.mlp.up_proj",
        "model.layers.7.mlp.gate",
        "model.layers.3.self_attn.q_proj",
    ):
        assert keeps(found, module), module
    for module in (
        "model.layers.10.mlp.up_proj",
        "model.layers.7.mlp.gate_proj",
        "model.layers.3.self_attn.k_proj",
    ):
        assert not keeps(found, module), module


def test_ignored_modules_are_whole_names_or_expressions() -> None:
    fields = said("channel") | {"ignore": ["lm_head", "model.layers.0.mlp", "re:.*layers[.]2[.]"]}
    found = read_quantisation(fields)
    assert keeps(found, "lm_head")
    assert keeps(found, "model.layers.2.mlp.up_proj")
    assert not keeps(found, "model.layers.0.mlp.up_proj")
    assert not keeps(found, "model.layers.20.mlp.up_proj")


FP8_REFUSED: list[tuple[str, Any, str]] = [
    ("quant_method", "gptq", "'fp8' or 'compressed-tensors'"),
    ("quant_method", "awq", "'fp8' or 'compressed-tensors'"),
    ("quant_method", "bitsandbytes", "'fp8' or 'compressed-tensors'"),
    ("quant_method", "mxfp4", "'fp8' or 'compressed-tensors'"),
    ("quant_method", "fbgemm_fp8", "'fp8' or 'compressed-tensors'"),
    ("quant_method", None, "'fp8' or 'compressed-tensors'"),
    ("fmt", "e5m2", "'e4m3'"),
    ("activation_scheme", "static", "'dynamic'"),
    ("activation_scheme", None, "'dynamic'"),
    ("weight_block_size", [64, 128], "[128, 128]"),
    ("weight_block_size", [128], "[128, 128]"),
    ("weight_block_size", None, "[128, 128]"),
    ("scale_fmt", "ue8m0", "'float' or unset"),
    ("dequantize", True, "unset"),
    ("modules_to_convert", ["embed_tokens"], "unset"),
    ("kv_cache_quant", {"bits": 8}, "unset"),
    ("modules_to_not_convert", "lm_head", "a list of names"),
    ("modules_to_not_convert", [3], "a list of names"),
    (
        "modules_to_not_convert",
        ["((\\w|\\.)+)+!"],
        "an expression with 4 repetitions at most, of no group",
    ),
    ("modules_to_not_convert", [".*a.*b.*c.*d.*"], "an expression with 4 repetitions"),
    ("modules_to_not_convert", ["a{99999999999999999999}"], "a name or a regular expression"),
    ("modules_to_not_convert", ["(" * 5000], "a name or a regular expression"),
    ("ignored_layers", ["(lm_head"], "a name or a regular expression"),
]


@pytest.mark.parametrize(("field", "value", "supported"), FP8_REFUSED)
def test_what_fp8_says_otherwise_is_refused(field: str, value: Any, supported: str) -> None:
    shown = value[0] if supported.startswith(("a name", "an expression")) else value
    message = f"quantization_config.{field} is {shown!r}, supported is {supported}"
    with pytest.raises(ModelShapeError, match=f"^{re.escape(message)}"):
        read_quantisation(DEEPSEEK | {field: value})


COMPRESSED_REFUSED: list[tuple[tuple[str, ...], Any, str]] = [
    (("format",), "pack-quantized", "format is 'pack-quantized', supported is 'float-quantized'"),
    (("format",), "int-quantized", "format is 'int-quantized'"),
    (("quantization_status",), "frozen", "quantization_status is 'frozen'"),
    (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is {'num_bits': 8}"),
    (("sparsity_config",), {"format": "2:4"}, "sparsity_config is {'format': '2:4'}"),
    (("transform_config",), {"a": 1}, "transform_config is {'a': 1}"),
    (("config_groups",), {}, "config_groups is {}, supported is a group of 'Linear'"),
    (("config_groups", "group_0"), 3, f"{GROUP} is 3"),
    (("config_groups", "group_0", "targets"), ["re:.*q"], f"{GROUP}.targets is ['re:.*q']"),
    (("config_groups", "group_0", "weights"), None, f"{GROUP}.weights is None"),
    (("config_groups", "group_0", "input_activations"), None, "input_activations is None"),
    (("config_groups", "group_0", "output_activations"), {"a": 1}, "output_activations is"),
    (("config_groups", "group_0", "weights", "num_bits"), 4, "weights.num_bits is 4"),
    (("config_groups", "group_0", "weights", "type"), "int", "weights.type is 'int'"),
    (("config_groups", "group_0", "weights", "symmetric"), False, "weights.symmetric is False"),
    (("config_groups", "group_0", "weights", "actorder"), "group", "actorder is 'group'"),
    (("config_groups", "group_0", "weights", "strategy"), "tensor", "('tensor', 'token')"),
    (("config_groups", "group_0", "weights", "strategy"), ["channel"], "(['channel'], 'token')"),
    (
        ("config_groups", "group_0", "input_activations", "dynamic"),
        False,
        "input_activations.dynamic is False, supported is True",
    ),
    (("config_groups", "group_0", "input_activations", "strategy"), "tensor", "'tensor')"),
    (("ignore",), "lm_head", "ignore is 'lm_head'"),
]


@pytest.mark.parametrize(("path", "value", "message"), COMPRESSED_REFUSED)
def test_what_compressed_tensors_says_otherwise_is_refused(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    fields = copy.deepcopy(said("channel"))
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ModelShapeError, match=re.escape(message)):
        read_quantisation(fields)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("weights", "block_structure", [64, 64]),
        ("weights", "block_structure", "128x128"),
        ("input_activations", "group_size", 64),
    ],
)
def test_other_blocks_and_groups_of_compressed_tensors_are_refused(
    part: str, field: str, value: Any
) -> None:
    fields = copy.deepcopy(said("block"))
    fields["config_groups"]["group_0"][part][field] = value
    with pytest.raises(ModelShapeError, match=re.escape(f"{part}.{field} is {value!r}")):
        read_quantisation(fields)


def test_groups_that_say_different_things_are_refused() -> None:
    fields = copy.deepcopy(said("channel"))
    fields["config_groups"]["group_1"] = said("block")["config_groups"]["group_0"]
    with pytest.raises(ModelShapeError, match="groups that say the same"):
        read_quantisation(fields)


def test_a_refusal_names_the_file(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint("qwen3", quantization_config=DEEPSEEK | {"fmt": "e5m2"})
    path = made.path / "config.json"
    with pytest.raises(ModelShapeError, match=re.escape(f"{path}: quantization_config.fmt is")):
        load_shape(made.path)


def test_other_quantisation_is_another_model_for_a_pair(make_checkpoint: Any) -> None:
    """KV differs; a model without any is named as it was before there was any."""
    made = make_checkpoint("qwen3")
    plain = load_shape(made.path)
    names = {fingerprint(plain, "same")}
    for fields in (DEEPSEEK, said("channel")):
        text = json.dumps(made.config | {"quantization_config": fields})
        (made.path / "config.json").write_text(text)
        names.add(fingerprint(load_shape(made.path), "same"))
    assert len(names) == 3
