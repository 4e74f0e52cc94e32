"""The preStop hook: a pod leaves when nothing needs it any more, through the contract's /drain.

Python, because every worker image has it and a preStop HTTP hook can only GET. It asks for the
drain, then waits until two reads in a row report nothing remaining: a request may be on its way
between the first read and the routers' notice. An answer that does not come is asked for again: a
hook that fails would end the pod with its requests.
"""

from __future__ import annotations

from baton_operator.names import PORT_HEALTH

EXIT_HEADROOM_SECONDS = 15
"""Beyond the drain budget: SIGTERM, closing links, process exit."""

_SCRIPT = """\
import json, time, urllib.request
url, end, idle, method = "http://127.0.0.1:{port}/drain", time.monotonic() + {budget}, 0, "POST"
while idle < 2 and time.monotonic() < end:
    try:
        ask = urllib.request.Request(url, method=method)
        left = json.load(urllib.request.urlopen(ask, timeout=5))["remaining"]
    except (OSError, ValueError):
        idle = 0
    else:
        idle = idle + 1 if left == 0 and method == "GET" else 0
        method = "GET"
    time.sleep({poll})
"""


def drain_command(
    budget_seconds: int, port: int = PORT_HEALTH, poll_seconds: float = 0.5
) -> list[str]:
    """Return the hook's command; it gives up after `budget_seconds`."""
    script = _SCRIPT.format(port=port, budget=budget_seconds, poll=poll_seconds)
    return ["python3", "-c", script]
