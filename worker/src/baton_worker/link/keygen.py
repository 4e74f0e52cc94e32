"""`baton-worker keygen`: a CURVE key pair in files, for a process of a deployment by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from baton_worker.config import ConfigError
from baton_worker.link.curve import generate_key_files


def run_keygen(out: Path, name: str) -> int:
    """Write NAME.public and NAME.secret into `out` and return the exit code.

    Raises:
        ConfigError: the name is no file's, a file is there, or none can be written.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} is no file's name: --out is for the folder")
    public, secret = (out / f"{name}.{half}" for half in ("public", "secret"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        pair = generate_key_files(public, secret)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} exists; keys are never overwritten") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.filename}: {error.strerror}") from error
    sys.stdout.write(f"{public}: {pair.public.decode()}\n{secret}: readable by its owner only\n")
    return 0
