"""What the engine has to know of a model family, as data.

Owns the fields; each family fills them in a file of its own. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton_worker.engine.model.expert_fields import RawExperts
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.naming import MtpNaming, deepseek_mtp, ernie_mtp

RopeStyle = Literal["half", "interleaved"]
MtpHidden = Literal["pre_norm", "post_norm"]
MtpOrder = Literal["embedding_hidden", "hidden_embedding"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` means beyond its sizes; defaults are those of the family's HF config.

    Attributes:
        model_type, architecture: as config.json names them.
        rope_style: see `ModelShape.rope_style`.
        has_qk_norm: each query and key head is RMS-normed before it is rotated; None: `use_qk_norm`
            says, not if it is absent.
        has_qkv_bias: query, key and value projections have biases, the output's has none; None:
            `attention_bias` says, not if it is absent.
        has_mla: attention is over compressed rows, see `mla.Mla`.
        rotated_part: how much of each head rotates where `partial_rotary_factor` does not say.
        needs: fields without a safe default: HF's own does not follow from the other sizes.
        mtp_hidden, mtp_order: what the family's draft layers are fed, see `ModelShape`.
        mtp_namings: names of draft layers, the likelier first; which one a checkpoint has is told
            by its projection.
        experts: makes the mixture of a config with so many main layers; None for dense families.
        expert_fields: which of config.json's it reads; not None: the one value that it takes.
        choice_bias: the key of `Experts.has_choice_bias`, behind a layer's prefix; "" for none.
    """

    model_type: str
    architecture: str
    rope_style: RopeStyle = "half"
    has_qk_norm: bool | None = False
    has_qkv_bias: bool | None = False
    has_mla: bool = False
    rotated_part: float = 1.0
    ties_embeddings: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    needs: tuple[str, ...] = ()
    mtp_hidden: MtpHidden = "pre_norm"
    mtp_order: MtpOrder = "embedding_hidden"
    mtp_namings: tuple[MtpNaming, ...] = (ernie_mtp, deepseek_mtp)
    experts: Callable[[RawExperts, int], Experts] | None = None
    expert_fields: Mapping[str, object] = field(default_factory=dict)
    choice_bias: str = ""

    def __post_init__(self) -> None:
        """Refuse a family whose mixture would be read from no field: each of them would be refused
        in every config, as one that the family does not read.
        """
        if bool(self.experts) != bool(self.expert_fields):
            raise ValueError(f"{self.model_type}: experts and expert_fields go together")
