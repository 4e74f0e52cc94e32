"""Why one end does not welcome the other: the words that travel in an ERROR without numbers.

Each is a metric label and stands in a refused worker's log and `/readyz`. Anything that is not
listed is a newer peer's, or a liar's: it is counted as `other`, so that no peer makes metrics grow.
"""

from __future__ import annotations

from typing import Final

NAME_TAKEN: Final = "name_taken"
KEY_BOUND: Final = "key_bound"
ENDPOINT_TAKEN: Final = "kv_endpoint_taken"
INCARNATION_TAKEN: Final = "incarnation_taken"
QUARANTINED: Final = "quarantined"
FLOOD: Final = "flood"
OTHER: Final = "other"
HANDSHAKE_ENDED: Final = "handshake_ended"
NO_COMMON_MECHANISM: Final = "no_common_mechanism"

WHY: Final = {
    NAME_TAKEN: "another live process has this worker_id: give each worker its own",
    KEY_BOUND: "a live process has this worker_id under another key",
    ENDPOINT_TAKEN: "a live worker takes KV at this handoff endpoint: give each worker its own",
    INCARNATION_TAKEN: "another gateway has the same incarnation; one of them takes another",
    QUARANTINED: "too many records of this worker were refused",
    "impersonation": "the key is bound to another worker_id",
    "role_not_allowed": "the key belongs to another role",
    "key_revoked": "the key is no longer allowed",
    "renamed": "one connection spoke for two workers",
    "too_many_workers": "the gateway knows as many workers as it can",
    "field_range": "a number or text was out of range",
    FLOOD: "more was said than a worker has to say",
    "hello_body": "what this worker says of itself was not understood",
    "kv_endpoint": "the handoff endpoint is no tcp://host:port",
    "kv_public_key": "the handoff key is no Z85 key",
    "wire_version": "no record layout is common to both",
    "role": "the role is not known",
    "replaced": "another process took over this worker_id",
    "silent": "nothing was heard of this worker",
    "disconnected": "the connection had ended",
    "bye": "this worker had said goodbye",
    "commands_unread": "this worker did not take its commands",
    "link_failed": "the gateway's link ended",
    HANDSHAKE_ENDED: "the gateway ended the handshake: its link.curve.allowed_keys_file has no line"
    " for this worker's key, link.curve.gateway_public_key_file does not hold the gateway's, or"
    " link.curve.enabled is not the same at both ends",
    NO_COMMON_MECHANISM: "link.curve.enabled is not the same at both ends",
}
"""Every reason that this version gives, in words for people."""

SHORT_LIVED: Final = frozenset({NAME_TAKEN, KEY_BOUND, ENDPOINT_TAKEN, INCARNATION_TAKEN})
"""What passes as soon as another process is gone: worth asking again every heartbeat."""


def label(reason: str) -> str:
    """Return the reason as a metric label: one of the known, or `other`."""
    return reason if reason in WHY else OTHER
