"""Write the dashboards' JSON into the chart; with --check, fail when a file is out of date.

Run as `python -m baton_mixin.generate` with charts/mixin on the path (`make dashboards`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from baton_mixin.dashboards import every

OTHER = {
    "baton-serving": ("baton-mtp-logprobs", "MTP and logprobs"),
    "baton-mtp-logprobs": ("baton-serving", "Serving"),
}
TARGET = Path(__file__).resolve().parents[2] / "baton" / "dashboards"


def text_of(dashboard: Dashboard) -> str:
    """Return a dashboard as JSON, its panels numbered from 1 in order."""
    tree = json.loads(JSONEncoder(sort_keys=True).encode(dashboard))
    for number, panel in enumerate(tree["panels"], 1):
        panel["id"] = number
    return json.dumps(_linked(tree), indent=1, sort_keys=True) + "\n"


def _linked(tree: dict[str, Any]) -> dict[str, Any]:
    """Point each panel of the workload's dashboards at the other one, with the same choices."""
    uid, title = OTHER.get(tree["uid"], ("", ""))
    url = f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}"
    for panel in tree["panels"] if uid else ():
        if panel["type"] != "row":
            panel["links"] = [{"title": title, "url": url, "targetBlank": False}]
    return tree


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    is_check = parser.parse_args().check
    stale = []
    for name, dashboard in every().items():
        path, text = TARGET / name, text_of(dashboard)
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    for name in stale:
        sys.stderr.write(f"charts/baton/dashboards/{name} is out of date: run make dashboards\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
