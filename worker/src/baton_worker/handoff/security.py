"""CURVE on the KV channel: the same keys, files and ZAP rules as the record link.

Decode is the server: its public key travels in HELLO and reaches prefill inside SUBMIT. Which
prefill workers may send is the list in `link.curve.allowed_keys_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from baton_worker.config import CurveConfig
from baton_worker.link.curve import client_options, load_identity, server_options
from baton_worker.link.zap import AllowedKeys, ZapHandler

Socket = zmq.Socket[bytes]


def _nothing() -> None:
    """Do nothing: what there is to close when CURVE is off."""


@dataclass(frozen=True, slots=True)
class Security:
    """How sockets are secured; the defaults leave them open.

    Attributes:
        public_key: what peers must know to connect here; "" when CURVE is off.
        server: prepares the receiving socket before it binds.
        client: prepares a sending socket for the peer's public key before it connects.
        close: ends what `server` started; call it after the sockets are closed.
    """

    public_key: str = ""
    server: Callable[[Socket], None] = field(default=lambda socket: None)
    client: Callable[[Socket, str], None] = field(default=lambda socket, key: None)
    close: Callable[[], None] = field(default=_nothing)


def kv_security(
    config: CurveConfig,
    context: zmq.Context[Socket],
    on_refused: Callable[[str], None],
    *,
    takes_offers: bool,
) -> Security:
    """Return how this process secures its KV sockets.

    Args:
        on_refused: told the reason of each refused connection, on the ZAP handler's thread.

    Raises:
        ConfigError: a key file is missing, unreadable or not a key.
    """
    identity = load_identity(config, is_client=True)
    if identity is None:
        return Security()
    close = _nothing
    if takes_offers:
        allowed = AllowedKeys("link.curve.allowed_keys_file", config.allowed_keys_file)
        handler = ZapHandler(context, allowed, on_refused)
        handler.start()
        close = handler.close
    return Security(
        public_key=identity.pair.public.decode(),
        server=lambda socket: server_options(socket, identity),
        client=lambda socket, key: client_options(socket, identity, key.encode()),
        close=close,
    )
