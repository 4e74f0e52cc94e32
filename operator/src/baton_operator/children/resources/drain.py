"""The preStop hook: a pod leaves when nothing needs it any more, through the contract's /drain.

Python, because every worker image has it and a preStop HTTP hook can neither POST nor open a Unix
socket, which is where the worker takes orders. It asks for the drain, then waits until two reads in
a row report nothing remaining: a request may be on its way between the first read and the routers'
notice. An answer that does not come is asked for again: a hook that fails would end the pod with
its requests.
"""

from __future__ import annotations

from baton_operator.children.resources.config import CONTROL_SOCKET

EXIT_HEADROOM_SECONDS = 15
"""Beyond the drain budget: SIGTERM, closing links, process exit."""

_SCRIPT = """\
import http.client, json, socket, time
end, idle, method = time.monotonic() + {budget}, 0, "POST"
while idle < 2 and time.monotonic() < end:
    link = http.client.HTTPConnection("localhost")
    try:
        with socket.socket(socket.AF_UNIX) as link.sock:
            link.sock.settimeout(5)
            link.sock.connect({path!r})
            link.request(method, "/drain")
            left = json.load(link.getresponse())["remaining"]
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        idle = 0
    else:
        idle = idle + 1 if left == 0 and method == "GET" else 0
        method = "GET"
    time.sleep({poll})
"""


def drain_command(
    budget_seconds: int, path: str = CONTROL_SOCKET, poll_seconds: float = 0.5
) -> list[str]:
    """Return the hook's command; it gives up after `budget_seconds`."""
    script = _SCRIPT.format(path=path, budget=budget_seconds, poll=poll_seconds)
    return ["python3", "-c", script]
