"""Where the committed model is: small, trained, and with draft layers."""

from __future__ import annotations

from pathlib import Path

TINY_MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny-mtp"
