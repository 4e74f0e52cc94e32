"""CURVE keys: reading them, making them, and setting sockets up with them.

Owns the key files (Z85, one key a line) and which socket options carry them. Who may connect is
decided by `zap`. Bad files are configuration errors that name the field.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from baton_worker.config import ConfigError, CurveConfig
from baton_worker.link.sockets import Socket

KEY_CHARACTERS = 40
ZAP_DOMAIN = b"baton"
"""Not empty: libzmq asks the handler about a connection only in a named domain."""


class KeyPair(NamedTuple):
    """Z85 text of both halves."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True, repr=False)
class CurveIdentity:
    """This process's keys; `gateway_key` is the server's, where this process is a client."""

    pair: KeyPair
    gateway_key: bytes = b""


def generate_key_files(public: Path, secret: Path) -> KeyPair:
    """Write a fresh pair; only its owner can read the secret. Call it before any context runs.

    Raises:
        FileExistsError: one of them exists.
    """
    pair = KeyPair(*zmq.curve_keypair())
    for path, key, mode in ((secret, pair.secret, 0o600), (public, pair.public, 0o644)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
    return pair


def load_identity(config: CurveConfig, *, is_client: bool) -> CurveIdentity | None:
    """Return the keys that `config` names; None when CURVE is off.

    Raises:
        ConfigError: a file is missing or not a key, or the halves do not belong together.
    """
    if not config.enabled:
        return None
    public = read_key("link.curve.public_key_file", config.public_key_file)
    secret = read_key("link.curve.secret_key_file", config.secret_key_file)
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"link.curve.public_key_file: {config.public_key_file} is not the public half of "
            f"link.curve.secret_key_file {config.secret_key_file}"
        )
    gateway_key = b""
    if is_client:
        gateway_key = read_key("link.curve.gateway_public_key_file", config.gateway_public_key_file)
    return CurveIdentity(KeyPair(public, secret), gateway_key)


def read_key(field: str, path: str) -> bytes:
    """Return the Z85 key in a file.

    Raises:
        ConfigError: naming `field`, when the file cannot be read or holds no key.
    """
    if not path:
        raise ConfigError(
            f"{field} is empty, and link.curve.enabled is true: name a file (`baton-worker keygen` "
            "writes key pairs), or set enabled to false at both ends, on one machine only"
        )
    try:
        text = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}") from error
    if not is_key(text):
        raise ConfigError(f"{field}: {path} does not hold a Z85 key of {KEY_CHARACTERS} characters")
    return text


def is_key(text: bytes) -> bool:
    """Whether `text` is 32 bytes in Z85."""
    if len(text) != KEY_CHARACTERS:
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, OverflowError):
        return False


def server_options(socket: Socket, identity: CurveIdentity) -> None:
    """Make `socket` accept CURVE only; call it before binding, with a `zap` handler running."""
    socket.curve_server = 1
    socket.curve_secretkey = identity.pair.secret
    socket.curve_publickey = identity.pair.public
    socket.zap_domain = ZAP_DOMAIN


def client_options(socket: Socket, identity: CurveIdentity, server_key: bytes) -> None:
    """Make `socket` speak CURVE to the server that owns `server_key`; call it before connecting."""
    socket.curve_serverkey = server_key
    socket.curve_secretkey = identity.pair.secret
    socket.curve_publickey = identity.pair.public
