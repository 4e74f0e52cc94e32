"""The Secret with CURVE keys: one pair a role, and the list of keys that may connect, each with the
only role that its owner may have.

Keys are made once. The Secret is created, never applied: applying would replace the keys of a
running deployment and cut its links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import zmq

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest


class KeyPair(NamedTuple):
    """Z85 text of both halves."""

    public: str
    secret: str


def make_pair() -> KeyPair:
    """Return a fresh pair, made by libzmq itself."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def curve_secret(owner: Owner, make_pair: Callable[[], KeyPair]) -> Manifest:
    """Return the Secret with fresh keys from `make_pair`."""
    pairs = {role: make_pair() for role in names.PROCESS_ROLES}
    data = {f"{role}.public": pair.public + "\n" for role, pair in pairs.items()}
    data |= {f"{role}.secret": pair.secret + "\n" for role, pair in pairs.items()}
    data["workers.allowed"] = "".join(
        f"{pairs[role].public} role={role}\n" for role in names.WORKER_ROLES
    )
    return manifest(
        owner,
        "v1",
        "Secret",
        names.curve_secret(owner.name),
        type="Opaque",
        stringData=data,
    )
