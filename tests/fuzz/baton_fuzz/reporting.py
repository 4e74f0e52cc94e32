"""How a fuzzer says what it found, and what it did when it found nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

PRINTED_BYTES = 4096


def report(tally: Any, engine: str, seconds: float) -> None:
    """Print the summary line."""
    found = {field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)}
    print(json.dumps({"engine": engine, "seconds": round(seconds, 1), **found}), flush=True)


def guarded(check: Callable[[bytes], None], data: bytes) -> None:
    """Run one input; on anything that escapes, show it and end the process."""
    try:
        check(data)
    except Exception:  # noqa: BLE001 - anything that escapes is the finding
        traceback.print_exc()
        print(
            f"input ({len(data)} bytes): {data[:PRINTED_BYTES].hex()}", file=sys.stderr, flush=True
        )
        os._exit(1)
