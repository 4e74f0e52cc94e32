"""CURVE key pairs, made by libzmq itself."""

from __future__ import annotations

import zmq

from baton_operator.children.resources.credentials import KeyPair


def make_pair() -> KeyPair:
    """Return a fresh pair as Z85 text."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())
