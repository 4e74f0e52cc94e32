"""Where decode takes KV, as it tells prefill: an address that others can connect to.

Owns the rule that an address which means "every address of mine" is told to nobody. Knows no
socket.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from baton_worker.addresses import host_of_bind, is_every_host, may_be_host, tcp_endpoint
from baton_worker.config import ConfigError, HandoffConfig
from baton_worker.config_errors import bad_bind


def check_advertised(config: HandoffConfig) -> None:
    """Refuse, before anything is loaded or bound, what no prefill worker could connect to.

    Raises:
        ConfigError: naming `handoff.bind` or `handoff.advertise_host`, its value and the fix.
    """
    host = host_of_bind(config.bind)
    if not host:
        raise ConfigError(bad_bind("handoff.bind", config.bind))
    if config.advertise_host:
        if is_every_host(config.advertise_host):
            raise ConfigError(
                f"handoff.advertise_host is {config.advertise_host!r}, which nobody can connect "
                "to: it must be this worker's own address or name"
            )
        if not may_be_host(config.advertise_host.strip("[]")):
            raise ConfigError(
                f"handoff.advertise_host is {config.advertise_host!r}, which no host can be "
                "called: each part between dots has 1 to 63 characters, and none is a blank"
            )
    elif is_every_host(host):
        raise ConfigError(
            f"handoff.bind is {config.bind!r}, which listens on every address and names none that "
            "prefill workers could connect to: set handoff.advertise_host, or BATON_POD_IP, to "
            "this worker's address"
        )


def advertised(config: HandoffConfig, bound: str) -> str:
    """Return the endpoint that prefill workers connect to; `bound` is what the socket got."""
    at = urlsplit(bound)
    assert at.hostname is not None, "a bound TCP socket"
    assert at.port is not None, "a bound TCP socket"
    return tcp_endpoint(config.advertise_host or at.hostname, at.port)
