"""What a request means that leaves a sampling field out: the model's own defaults.

Owns the fields of `generation_config.json` that are taken over, those of vLLM's: temperature,
top_p, top_k, min_p, repetition_penalty. `do_sample` is not looked at, as there: a temperature of 0
asks for greedy. Lengths stay the API's. What the file asks for beyond is told by name, since it
would make other text. Pure but for what reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from baton_worker.config import ConfigError
from baton_worker.sampling import SAMPLING_BOUNDS

_FILE = "generation_config.json"


_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "assistant_early_exit": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "frequency_penalty": (0,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "max_length": (20,),
    "max_new_tokens": (),
    "max_tokens": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "presence_penalty": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Fields that would make other text and are not taken over, with the values, beside null, that ask
for nothing. Some are Baton's parameters too; a request may set them."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values of fields that a request leaves out; as they stand here, the API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _File(msgspec.Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults of the model in `folder`; the API's own where its file tells none.

    Raises:
        ConfigError: the file is malformed, or a value is none that a request could ask for.
    """
    path = folder / _FILE
    if not path.exists():
        return SamplingDefaults()
    try:
        told = msgspec.to_builtins(msgspec.json.decode(path.read_bytes(), type=_File))
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    given = {name: value for name, value in told.items() if value is not None}
    given["top_k"] = max(given.get("top_k", 0), 0)  # -1 and 0 are no limit
    for name, value in given.items():
        bounds = SAMPLING_BOUNDS[name]
        if not bounds.hold(value):
            raise ConfigError(
                f"model.path: {path}: {name} is {value}: it must be {bounds}; correct it, or set "
                "gateway.generation_config to 'none'"
            )
    return SamplingDefaults(**given)


def not_taken_over(folder: Path) -> dict[str, Any]:
    """Return what the file of the model in `folder` asks for and nobody gets, by name.

    Raises:
        ConfigError: the file is malformed.
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    return {
        name: value
        for name, value in told.items()
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]
    }
