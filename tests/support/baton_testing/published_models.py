"""Models as transformers makes them: random weights in small shapes, written as its folders are.

Owns the shapes of each family and the way from such a folder to the device runner. Transformers
and PyTorch are imported only where a model is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.engine_bench import Clock
from baton_worker.engine.backends.device.decoder import Decoder, Fed, Group
from baton_worker.engine.backends.device.engine import DeviceEngine, LoadedModel
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.seam import Places
from baton_worker.engine.backends.device.workspace import Sizes, Workspace
from baton_worker.engine.kv.pool import TRASH_BLOCK
from baton_worker.engine.model.checkpoint import SINGLE_FILE, open_checkpoint
from baton_worker.engine.model.families.registry import family_of
from baton_worker.engine.model.naming import main_layer
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.options import NO_DRAFTS, EngineOptions
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

_BLOCK = 16

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 199,
    },
    "mqa": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 256,
    },
    "mha": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 200,
        "vocab_size": 320,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


STRETCHED = YARN | {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.8}
DEEPSEEK: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_key_value_heads": None,  # as many as there are heads
    "head_dim": 8,  # what rotates: transformers' name for the size that angles are made for
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class Published:
    """A family as transformers has it, and what its config says beside the sizes."""

    config_class: str
    fields: dict[str, Any]


FAMILIES: dict[str, Published] = {
    "llama": Published("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-llama3": Published(
        "LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}
    ),
    "qwen2": Published("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen2-tied": Published("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn": Published("Qwen2Config", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "qwen3": Published("Qwen3Config", {"tie_word_embeddings": False}),
    "ernie4_5": Published("Ernie4_5Config", {"tie_word_embeddings": True, "use_bias": False}),
    "qwen3_moe": Published(
        "Qwen3MoeConfig",
        {
            "tie_word_embeddings": False,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe-unnormed": Published(
        "Qwen3MoeConfig",
        {
            "tie_word_embeddings": False,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "ernie4_5_moe": Published(
        "Ernie4_5_MoeConfig",
        {
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_num_experts": 16,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
        },
    ),
    "glm4_moe": Published(
        "Glm4MoeConfig",
        {
            "tie_word_embeddings": False,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v3": Published("DeepseekV3Config", DEEPSEEK | {"rope_parameters": STRETCHED}),
    "deepseek_v3-whole-queries": Published(
        "DeepseekV3Config", DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False}
    ),
}


TWO_LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
REAL: dict[str, dict[str, Any]] = {
    "llama-llama3": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "rms_norm_eps": 1e-5,
    },
    "qwen2": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "rms_norm_eps": 1e-6,
    },
    "ernie4_5": {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 3072,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
    },
    "ernie4_5_moe": {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 12_288,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
    },
    "glm4_moe": {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10_944,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "rms_norm_eps": 1e-5,
    },
    "deepseek_v3": {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "head_dim": 64,
        "intermediate_size": 18_432,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,  # of 256, for room
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
    },
}
"""Sizes of Llama-3.1-8B, Qwen2.5-7B, Qwen3-8B, ERNIE-4.5-0.3B, Qwen3-30B-A3B, ERNIE-4.5-21B-A3B,
GLM-4.5-Air and DeepSeek-V3, as their config.json have them.
"""


def published_model(family: str, shape: str, folder: Path, seed: int = 0) -> Any:
    """Return transformers' float32 model of random weights, which it has also saved in `folder`.

    Biases and norms are random too: as initialised they would be zeros and ones, and prove nothing.
    Weights are large enough that the likeliest token is seldom a near-tie.
    """
    fields = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    model = _random_model(family, fields | SHAPES[shape] | FAMILIES[family].fields, "cpu", seed)
    model.save_pretrained(folder)
    return model


def published_two_layers(family: str, folder: Path, device: str) -> Any:
    """Return transformers' float32 model of two layers in the real shape, whose weights are exact
    in bfloat16; the folder has them so.
    """
    import torch

    fields = FAMILIES[family].fields | REAL[family] | TWO_LAYERS
    model = _random_model(family, fields, device, seed=0)
    with torch.no_grad():  # one by one: rotation's frequencies are no weights, and stay float32
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    rounded = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=rounded)
    return model


def published_in_bfloat16(folder: Path, device: str) -> Any:
    """Return transformers' model of a folder, computing in bfloat16."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model.to(device).eval()


def _random_model(family: str, fields: dict[str, Any], device: str, seed: int) -> Any:
    import torch
    import transformers

    config = getattr(transformers, FAMILIES[family].config_class)(**fields)
    source = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3, generator=source)
            elif name.endswith("e_score_correction_bias"):
                weight.normal_(0.0, 0.1, generator=source)
            else:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5, generator=source)
    return model


def published_logits(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return f32[T, V] of transformers' model."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        found: npt.NDArray[np.float32] = model(ids).logits[0].float().cpu().numpy()
    return found


def published_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers' own `generate` says, endings ignored."""
    import torch

    ids = torch.tensor([prompt], device=model.device)
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
    with torch.no_grad():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **options
        )
    found: list[int] = said[0, len(prompt) :].tolist()
    return found


def loaded(folder: Path, device: Any, kernels: Any, dtype: Any = "float32") -> LoadedModel:
    """Return a folder's model on a device."""
    model_shape = load_shape(folder)
    weights = load_device_weights(device, open_checkpoint(folder), model_shape, dtype, 0)
    return LoadedModel(device, kernels, model_shape, weights)


def our_logits(model: LoadedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return f32[T, V] of the runner's decoder, the text fed at once."""
    device, kernels, model_shape, weights = model[:4]
    n, width = len(tokens), -(-len(tokens) // _BLOCK)
    space = Workspace(
        device, kernels, model_shape, weights.dtype, Sizes(n, 1, n, n, width * _BLOCK, n)
    )
    kv = device.zeros((TRASH_BLOCK + 1 + width, *model_shape.kv_block(_BLOCK)), weights.dtype)
    decoder = Decoder(device, kernels, model_shape, weights, kv, space.attention, width * _BLOCK)

    def put(values: Any) -> Any:
        array = np.ascontiguousarray(values, np.int32)
        tensor = device.empty(array.shape, "int32")
        device.upload(array, tensor)
        device.synchronise()
        return tensor

    table = put(np.arange(width)[None] + TRASH_BLOCK + 1)
    places = Places(put(np.zeros(n)), put(np.arange(n)), table)
    fed = Fed(put(tokens), places, (Group(0, n, table, put([n])),))
    part = space.tokens(n)
    decoder.run(fed, part)
    out = device.empty((n, model_shape.vocab_size), "float32")
    decoder.logits(part.final, out)
    host = np.empty((n, model_shape.vocab_size), np.float32)
    device.download(out, host).wait()
    return host


def our_greedy(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Return what the engine says, a token a step."""
    longest = len(prompt) + count + 1
    options = EngineOptions(
        block_size=_BLOCK,
        n_blocks=-(-longest // _BLOCK),
        max_running=1,
        max_waiting=1,
        max_model_len=longest,
        prefill_tokens=longest,
        n_draft=0,
        use_mtp=False,
        max_top_k=0,
        overlap=False,
        drafts=NO_DRAFTS,
        prefix_caching=False,
    )
    engine = DeviceEngine(model, options, Clock())
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(1, 0, prompt_token_ids=tuple(prompt), sampling=sampling, logprobs_k=-1))
    said: list[int] = []
    while engine.has_work():
        said += engine.step().columns.token.tolist()
    engine.close()
    return said


def add_draft_layer(folder: Path, model_shape: ModelShape, seed: int = 5) -> None:
    """Add the weights of a draft layer to a folder that transformers wrote without: random ones,
    under the keys that are published.
    """
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / SINGLE_FILE)
    keys = family_of(model_shape.model_type).mtp_namings[0](0, model_shape.n_layers, False)
    of_main = main_layer(model_shape.n_layers - 1).prefix
    source = np.random.default_rng(seed)
    hidden = model_shape.hidden_size
    shapes = {keys.proj: (hidden, 2 * hidden)}
    shapes |= dict.fromkeys((keys.emb_norm, keys.hidden_norm, keys.final_norm), (hidden,))
    for key, value in tensors.items():
        if key.startswith(f"{of_main}."):
            shapes[keys.layer.prefix + key.removeprefix(of_main)] = value.shape
    for key, shape in shapes.items():
        is_norm = key.endswith("norm.weight")
        scale = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        tensors[key] = (is_norm + source.normal(0.0, scale, shape)).astype(np.float32)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def published_draft(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return f32[V] of transformers' draft layer for the token behind `tokens`, the last of which
    the main model has not been fed.
    """
    import torch
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    # Transformers knows draft layers by their numbers in the published models, 46 and 92.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{len(model.model.layers)}\."]
    drafts = MtpModel.from_pretrained(model).eval()
    ids = torch.tensor([tokens], device=model.device)
    fed = torch.arange(1, len(tokens), device=model.device)[None]
    with torch.no_grad():
        _, logits, _ = drafts(
            input_ids=ids[:, 1:],
            last_hidden_states=model.model(ids[:, :-1]).last_hidden_state,
            attention_mask=torch.ones_like(fed),
            position_ids=fed,
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    found: npt.NDArray[np.float32] = logits[0, 0].float().cpu().numpy()
    return found
