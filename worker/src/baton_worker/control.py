"""`baton-worker control`: give a worker on this machine an order through its control socket."""

from __future__ import annotations

import http.client
import json
import socket
import sys

from baton_worker.config import ConfigError

_TIMEOUT_SECONDS = 10.0

ORDERS = ("status", "drain", "undrain", "speculative")
_DRAIN_METHODS = {"status": "GET", "drain": "POST", "undrain": "DELETE"}


def run_control(path: str, order: str, num_speculative_tokens: int | None) -> int:
    """Send one order, print the answer; return 0 if it was taken, else 1.

    Raises:
        ConfigError: nobody listens on the socket, or `speculative` alone has no number.
    """
    if (order == "speculative") != (num_speculative_tokens is not None):
        raise ConfigError("speculative, and it alone, takes a number of draft tokens")
    link = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_SECONDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link.sock:
        link.sock.settimeout(_TIMEOUT_SECONDS)
        try:
            link.sock.connect(path)
            _send(link, order, num_speculative_tokens)
            answer = link.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{path}: no worker takes orders there: {error}. Name a worker's control.socket; "
                "`baton-worker local` prints those of its workers"
            ) from error
    (sys.stdout if answer.status < 300 else sys.stderr).write(text + "\n")
    return 0 if answer.status < 300 else 1


def _send(link: http.client.HTTPConnection, order: str, count: int | None) -> None:
    if count is None:
        link.request(_DRAIN_METHODS[order], "/drain")
        return
    body = json.dumps({"num_speculative_tokens": count})
    link.request("POST", "/speculative", body, {"content-type": "application/json"})
