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
        # Read elsewhere, or of what is switched by a field that is read.
        "pad_token_id",
        "max_window_layers",
        "weight_share_add_bias",
    )
)


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
