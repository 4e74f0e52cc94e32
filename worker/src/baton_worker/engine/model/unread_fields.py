"""Fields of config.json that nothing here reads: what a model might mean and Baton does not know.

Owns which of them are known to change no number. Refuses nothing: a field that Baton knows and
cannot run is `config`'s matter.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton_worker.engine.model.config import RawConfig
from baton_worker.engine.model.expert_fields import RawExperts, says_nothing
from baton_worker.engine.model.refusals import ModelShapeError

_HARMLESS = frozenset(
    (
        # Who wrote the file, and for what code.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "auto_map",
        "transformers_version",
        "unsloth_version",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "use_flash_attention",
        "is_decoder",
        "is_llama_config",
        "unsloth_fixed",
        "chunk_size_feed_forward",
        "return_dict_in_generate",
        "tf_legacy_loss",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "tokenizer_class",
        "is_encoder_decoder",
        "tie_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        # Of training alone.
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "initializer_range",
        "gradient_checkpointing",
        "pretraining_tp",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "moe_use_aux_free",
        "moe_capacity",
        "multi_token_pred_lambda",
        # How to generate, which older transformers wrote here: generation_config.json says it now.
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "diversity_penalty",
        "early_stopping",
        "typical_p",
        "prefix",
        "decoder_start_token_id",
        "sep_token_id",
        # Read elsewhere, or of what is switched by a field that is read.
        "pad_token_id",
        "max_window_layers",
        "weight_share_add_bias",
    )
)


_HARMLESS_AS = {
    "attn_factor": b"1.0",
    "is_quantized": b"false",
    "moe_gate": b'"topk"',
    "pruned_heads": b"{}",
    "rope_interleaved": b"false",
    "scale_attn_weights": b"true",
}
"""Fields that change no number while they have this value, as it is written."""


def unread_fields(model_dir: Path, has_experts: bool) -> tuple[str, ...]:
    """Return the fields of `config.json` that are set, not read and not known to be harmless.

    Args:
        model_dir: a folder whose config.json `shape.load_shape` has taken.
        has_experts: of the model; without, what tells of experts is not read.

    Raises:
        ModelShapeError: the file is not what was taken, or a field's name is no text.
    """
    told = _values(model_dir / "config.json")
    known = _HARMLESS.union(RawConfig.__struct_fields__)
    known |= {name for name, value in _HARMLESS_AS.items() if told.get(name) == value}
    if not has_experts:
        known -= {name for name in RawExperts.__struct_fields__ if _tells(name, told)}
    return tuple(sorted(name for name in told.keys() - known if told[name] != b"null"))


def _tells(name: str, told: dict[str, bytes]) -> bool:
    """Whether a field of experts says what it would not without them."""
    return name in told and not says_nothing(name, msgspec.json.decode(told[name]))


def _values(path: Path) -> dict[str, bytes]:
    """Return each field's value as it is written: nobody reads it, so it need not be one."""
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, ValueError, RecursionError) as error:
        raise ModelShapeError(f"{path}: {error}") from error
    return {name: bytes(value).strip() for name, value in told.items()}
