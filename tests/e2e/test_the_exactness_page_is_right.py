"""The five lines of docs/exactness.md hold as they stand, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from baton_testing.local_deployment import Deployment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exactness.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def test_a_text_is_scored_as_it_was_sampled_over_http(pair: Deployment) -> None:
    (lines,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 5
    assert ADDRESS in lines
    told: dict[str, object] = {}
    exec(lines.replace(ADDRESS, pair.url), told)
    assert len(told["said"]["token_ids"]) == 200  # type: ignore[index]
