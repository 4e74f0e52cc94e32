"""Every checkpoint form lands in the same fused `[in, out]` float32 arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from baton_worker.engine.model.checkpoint import CheckpointError
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import Weights, load_weights


def load(made: Any) -> Weights:
    return load_weights(made.path, load_shape(made.path))


def arrays(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    yield from arrays_in("weights", weights)


def arrays_in(name: str, value: object) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from arrays_in(f"{name}[{i}]", part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from arrays_in(f"{name}.{field.name}", getattr(value, field.name))


@pytest.mark.parametrize("family", ["llama", "ernie4_5", "qwen2", "qwen3", "mimo"])
@pytest.mark.parametrize("storage", ["F32", "F16", "BF16"])
def test_projections_are_transposed_and_fused_exactly(
    make_checkpoint: Callable[..., Any], family: str, storage: str
) -> None:
    made = make_checkpoint(family=family, storage=storage)
    weights = load(made)
    for i, layer in enumerate(weights.layers):
        of = {
            key.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for key, value in made.tensors.items()
        }
        attention = [of[f"self_attn.{name}_proj"].T for name in "qkv"]
        np.testing.assert_array_equal(layer.qkv, np.concatenate(attention, axis=1))
        np.testing.assert_array_equal(layer.o, of["self_attn.o_proj"].T)
        mlp = [of[f"mlp.{name}_proj"].T for name in ("gate", "up")]
        np.testing.assert_array_equal(layer.mlp.gate_up, np.concatenate(mlp, axis=1))
        np.testing.assert_array_equal(layer.mlp.down, of["mlp.down_proj"].T)
        np.testing.assert_array_equal(layer.input_norm, of["input_layernorm"])
        np.testing.assert_array_equal(layer.post_norm, of["post_attention_layernorm"])
        norms = [of[f"self_attn.{n}"] for n in ("q_norm", "k_norm") if f"self_attn.{n}" in of]
        np.testing.assert_array_equal(layer.qk_norm or (), norms)
        assert (layer.qk_norm is not None) == (family == "qwen3")
        assert (layer.qkv_bias is not None) == (family in ("qwen2", "mimo"))
        if layer.qkv_bias is not None:
            biases = [of[f"self_attn.{name}_proj.bias"] for name in "qkv"]
            np.testing.assert_array_equal(layer.qkv_bias, np.concatenate(biases))
    np.testing.assert_array_equal(weights.embed, made.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.final_norm, made.tensors["model.norm.weight"])


def test_arrays_are_contiguous_float32_and_own_their_memory(
    make_checkpoint: Callable[..., Any],
) -> None:
    for name, value in arrays(load(make_checkpoint(storage="F32"))):
        assert value.dtype == np.float32, name
        assert value.flags.c_contiguous, name
        assert value.flags.writeable, f"{name} maps the file"


def test_ernie_mtp_names_fill_the_mtp_layer(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint(mtp="ernie")
    weights = load(made)
    (mtp,) = weights.mtp
    np.testing.assert_array_equal(mtp.emb_norm, made.tensors["model.mtp_emb_norm.0.weight"])
    np.testing.assert_array_equal(mtp.hidden_norm, made.tensors["model.mtp_hidden_norm.0.weight"])
    np.testing.assert_array_equal(mtp.proj, made.tensors["model.mtp_linear_proj.0.weight"].T)
    np.testing.assert_array_equal(
        mtp.layer.mlp.down, made.tensors["model.mtp_block.0.mlp.down_proj.weight"].T
    )
    assert mtp.final_norm is weights.final_norm


def test_deepseek_mtp_names_fill_the_mtp_layer_with_its_own_norm(
    make_checkpoint: Callable[..., Any],
) -> None:
    def add_head(tensors: dict[str, Any]) -> None:
        embed = tensors["model.embed_tokens.weight"]
        tensors["model.layers.2.shared_head.norm.weight"] = np.full(32, 0.5, np.float32)
        tensors["model.layers.2.shared_head.head.weight"] = embed.copy()
        tensors["model.layers.2.embed_tokens.weight"] = embed.copy()

    made = make_checkpoint(family="llama", mtp="deepseek", edit=add_head)
    (mtp,) = load(made).mtp
    np.testing.assert_array_equal(mtp.emb_norm, made.tensors["model.layers.2.enorm.weight"])
    np.testing.assert_array_equal(mtp.hidden_norm, made.tensors["model.layers.2.hnorm.weight"])
    np.testing.assert_array_equal(mtp.proj, made.tensors["model.layers.2.eh_proj.weight"].T)
    np.testing.assert_array_equal(
        mtp.layer.o, made.tensors["model.layers.2.self_attn.o_proj.weight"].T
    )
    np.testing.assert_array_equal(mtp.final_norm, np.full(32, 0.5, np.float32))


def test_mimos_mtp_names_fill_the_mtp_layer_with_its_own_norm(
    make_checkpoint: Callable[..., Any],
) -> None:
    made = make_checkpoint("mimo", num_nextn_predict_layers=2, tie_word_embeddings=False)
    weights = load(made)
    for i, mtp in enumerate(weights.mtp):
        of = {
            key.removeprefix(f"model.mtp_layers.{i}."): value for key, value in made.tensors.items()
        }
        np.testing.assert_array_equal(mtp.emb_norm, of["token_layernorm.weight"])
        np.testing.assert_array_equal(mtp.hidden_norm, of["hidden_layernorm.weight"])
        np.testing.assert_array_equal(mtp.proj, of["input_proj.weight"].T)
        np.testing.assert_array_equal(mtp.final_norm, of["final_layernorm.weight"])
        np.testing.assert_array_equal(mtp.layer.input_norm, of["input_layernorm.weight"])
        biases = [of[f"self_attn.{name}_proj.bias"] for name in "qkv"]
        np.testing.assert_array_equal(mtp.layer.qkv_bias, np.concatenate(biases))
    assert len(weights.mtp) == 2


@pytest.mark.parametrize("storage", ["F32", "BF16"])
@pytest.mark.parametrize("q_rank", [20, None])
def test_what_makes_compressed_rows_is_where_it_belongs(
    make_checkpoint: Callable[..., Any], q_rank: int | None, storage: str
) -> None:
    made = make_checkpoint("deepseek_v3", q_lora_rank=q_rank, storage=storage)
    weights = load(made)
    layers = [*weights.layers, weights.mtp[0].layer]
    assert len(layers) == 4
    for i, layer in enumerate(layers):
        of = {
            key.removeprefix(f"model.layers.{i}.self_attn.").removesuffix(".weight"): value
            for key, value in made.tensors.items()
        }
        query = of["q_a_proj"] if q_rank else of["q_proj"]
        both = np.concatenate([query, of["kv_a_proj_with_mqa"]]).T
        np.testing.assert_array_equal(layer.qkv, both)
        np.testing.assert_array_equal(layer.latent.kv_norm, of["kv_a_layernorm"])
        np.testing.assert_array_equal(layer.latent.kv_up, of["kv_b_proj"].reshape(4, 8 + 10, 16))
        np.testing.assert_array_equal(layer.o, of["o_proj"].T)
        assert (layer.latent.q_up is None) == (layer.latent.q_norm is None) == (q_rank is None)
        if q_rank:
            np.testing.assert_array_equal(layer.latent.q_norm, of["q_a_layernorm"])
            np.testing.assert_array_equal(layer.latent.q_up, of["q_b_proj"].T)


def test_deepseeks_draft_layer_may_repeat_embedding_and_head(
    make_checkpoint: Callable[..., Any],
) -> None:
    """As the published checkpoint does, at layer 61."""

    def add(tensors: dict[str, Any]) -> None:
        prefix = "model.layers.3"
        tensors[f"{prefix}.shared_head.norm.weight"] = np.full(32, 0.5, np.float32)
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()

    (mtp,) = load(make_checkpoint("deepseek_v3", edit=add)).mtp
    np.testing.assert_array_equal(mtp.final_norm, np.full(32, 0.5, np.float32))


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe", "glm4_moe", "deepseek_v3"])
def test_each_expert_and_its_router_are_where_they_belong(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    made = make_checkpoint(family)
    weights = load(made)
    experts = load_shape(made.path).experts

    def is_mlp(found: Any, prefix: str) -> None:
        halves = [made.tensors[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up")]
        np.testing.assert_array_equal(found.gate_up, np.concatenate(halves, axis=1))
        np.testing.assert_array_equal(found.down, made.tensors[f"{prefix}.down_proj.weight"].T)

    layers = {f"model.layers.{i}": layer for i, layer in enumerate(weights.layers)}
    draft = {
        "ernie4_5_moe": "model.mtp_block.0",
        "glm4_moe": "model.layers.3",
        "deepseek_v3": "model.layers.3",
    }.get(family)
    if draft is not None:
        layers[draft] = weights.mtp[0].layer
    mixed = {"qwen3_moe": (1, 2), "ernie4_5_moe": (1, 2)}.get(family, (1, 2, 3))
    assert sorted(i for i, layer in enumerate(layers.values()) if layer.mixture) == sorted(mixed)
    for prefix, layer in layers.items():
        if layer.mixture is None:
            is_mlp(layer.mlp, f"{prefix}.mlp")
            continue
        mixture = layer.mixture
        np.testing.assert_array_equal(mixture.router, made.tensors[f"{prefix}.mlp.gate.weight"].T)
        assert len(mixture.experts) == experts.count == 8
        for index, expert in enumerate(mixture.experts):
            is_mlp(expert, f"{prefix}.mlp.experts.{index}")
        assert (layer.mlp is None) == (mixture.choice_bias is None) == (family == "qwen3_moe")
        if layer.mlp is not None:
            is_mlp(layer.mlp, f"{prefix}.mlp.shared_experts")
            name = {"ernie4_5_moe": "moe_statics"}.get(family, "gate")
            bias = made.tensors[f"{prefix}.mlp.{name}.e_score_correction_bias"]
            np.testing.assert_array_equal(mixture.choice_bias, bias.ravel())


def test_both_mtp_namings_of_the_same_tensors_load_alike(
    make_checkpoint: Callable[..., Any],
) -> None:
    ernie = load(make_checkpoint(mtp="ernie", num_nextn_predict_layers=2, seed=3))
    deepseek = load(make_checkpoint(mtp="deepseek", num_nextn_predict_layers=2, seed=3))
    for (name, first), (_, second) in zip(arrays(ernie), arrays(deepseek), strict=True):
        np.testing.assert_array_equal(first, second, err_msg=name)


def test_a_tied_head_is_the_embedding_turned(make_checkpoint: Callable[..., Any]) -> None:
    weights = load(make_checkpoint(tie_word_embeddings=True))
    np.testing.assert_array_equal(weights.lm_head, weights.embed.T)


def test_an_untied_head_is_read_from_its_own_key(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint(tie_word_embeddings=False)
    weights = load(made)
    np.testing.assert_array_equal(weights.lm_head, made.tensors["lm_head.weight"].T)
    assert not np.array_equal(weights.lm_head, weights.embed.T)


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16"])
def test_shards_load_as_one_file_does_and_have_the_same_identity(
    make_checkpoint: Callable[..., Any], storage: str
) -> None:
    whole = load(make_checkpoint(storage=storage))
    sharded = load(make_checkpoint(storage=storage, shards=3))
    for (name, first), (_, second) in zip(arrays(whole), arrays(sharded), strict=True):
        np.testing.assert_array_equal(first, second, err_msg=name)
    assert whole.identity == sharded.identity


def test_identity_follows_every_tensor(make_checkpoint: Callable[..., Any]) -> None:
    def nudge(key: str) -> Callable[[dict[str, Any]], None]:
        def edit(tensors: dict[str, Any]) -> None:
            tensors[key].flat[-1] += 1.0

        return edit

    made = make_checkpoint()
    identities = {load(make_checkpoint(edit=nudge(key))).identity for key in made.tensors}
    assert len(identities) == len(made.tensors)
    assert load(made).identity not in identities


def test_identity_of_a_large_tensor_samples_its_whole_length(
    make_checkpoint: Callable[..., Any],
) -> None:
    def scale(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][9_000:] *= 1.5

    large = {"vocab_size": 10_000}
    made = make_checkpoint(**large)
    assert made.tensors["model.embed_tokens.weight"].nbytes > 1 << 20
    assert load(made).identity != load(make_checkpoint(edit=scale, **large)).identity


def test_rope_tables_of_old_exporters_are_ignored(make_checkpoint: Callable[..., Any]) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    assert load(make_checkpoint(family="llama", edit=add)).layers


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_draft_layers_that_nobody_wants_are_checked_and_not_kept(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    made = make_checkpoint(family, num_nextn_predict_layers=3)
    shape = load_shape(made.path)
    assert [len(load_weights(made.path, shape, n_mtp=n).mtp) for n in (0, 1, 3)] == [0, 1, 3]
    prefix = {"mimo": "model.mtp_layers.2"}.get(family, "model.layers.5")
    key = f"{prefix}.input_layernorm.weight"
    broken = make_checkpoint(
        family, num_nextn_predict_layers=3, edit=lambda tensors: tensors.pop(key)
    )
    with pytest.raises(CheckpointError, match=f"^{key}: missing key"):
        load_weights(broken.path, shape, n_mtp=1)
