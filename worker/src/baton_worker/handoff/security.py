"""CURVE on the KV channel: who may send KV, and to whom it can be sent.

Decode is the server, under a key pair that it makes at its start and never writes anywhere: the
public half travels in HELLO and reaches prefill inside SUBMIT, so KV that is meant for one process
can be read by no other, not even one that holds its role's keys. Prefill workers are known by the
keys of `link.curve`; which of them may send is the list in `link.curve.allowed_keys_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

from baton_worker.config import CurveConfig
from baton_worker.identity import Role
from baton_worker.link.curve import (
    CurveIdentity,
    KeyPair,
    client_options,
    load_identity,
    server_options,
)
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
        refused: returns why what this authenticated key sends is not taken any more, or "".
        close: ends what `server` started; call it after the sockets are closed.
    """

    public_key: str = ""
    server: Callable[[Socket], None] = field(default=lambda socket: None)
    client: Callable[[Socket, str], None] = field(default=lambda socket, key: None)
    refused: Callable[[str], str] = field(default=lambda user_id: "")
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
    client = partial(_as_client, identity)
    if not takes_offers:
        return Security(client=client)
    own = CurveIdentity(KeyPair(*zmq.curve_keypair()))
    allowed = _allowed(config)
    handler = ZapHandler(context, allowed, on_refused, partial(_may_hand_over, allowed))
    handler.start()
    return Security(
        public_key=own.pair.public.decode(),
        server=lambda socket: server_options(socket, own),
        client=client,
        refused=partial(_refusal, allowed),
        close=handler.close,
    )


def check_keys(config: CurveConfig, *, takes_offers: bool) -> None:
    """Read what `kv_security` and the link will read.

    Raises:
        ConfigError: a key file is missing, unreadable or not a key.
    """
    if load_identity(config, is_client=True) is not None and takes_offers:
        _allowed(config)


def _allowed(config: CurveConfig) -> AllowedKeys:
    return AllowedKeys("link.curve.allowed_keys_file", config.allowed_keys_file)


def _as_client(identity: CurveIdentity, socket: Socket, server_key: str) -> None:
    client_options(socket, identity, server_key.encode())


def _may_hand_over(allowed: AllowedKeys, user_id: str) -> bool:
    return allowed.role_of(user_id) in (None, Role.PREFILL)


def _refusal(allowed: AllowedKeys, user_id: str) -> str:
    """A live connection outlives its key, so whoever takes what it carries must look."""
    allowed.refresh()
    if user_id not in allowed:
        return "key_revoked"
    return "" if _may_hand_over(allowed, user_id) else "role_not_allowed"
