"""What a request means that leaves a sampling field out: the model's own defaults.

Owns the fields of `generation_config.json` that are taken over, those of vLLM's: temperature,
top_p, top_k, min_p, repetition_penalty. `do_sample` is not looked at, as there: a temperature of 0
asks for greedy. Lengths stay the API's. Pure but for `read_defaults`, which reads the file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton_worker.config import ConfigError
from baton_worker.sampling import SAMPLING_BOUNDS

_FILE = "generation_config.json"


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
