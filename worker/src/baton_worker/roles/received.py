"""What a decode worker tells at its start of the room that it has for KV that is sent."""

from __future__ import annotations

import logging

from baton_worker.config import ProcessConfig
from baton_worker.engine.engine import StepEngine
from baton_worker.handoff.places import PlaceLimits

log = logging.getLogger(__name__)

_GIB = 1 << 30


def tell_room(config: ProcessConfig, engine: StepEngine) -> None:
    """Log how many of the longest requests the room takes, with slots and pool for them, unless no
    KV may be sent at all.
    """
    if config.handoff.require != "any":
        return
    longest, room = engine.options.max_model_len, config.handoff.receive_bytes
    kv_bytes = engine.handoff_bytes(longest)
    n = PlaceLimits.of(config, engine.load().kv_blocks_total).at_once(kv_bytes, longest)
    log.info(
        "KV that is sent: handoff.receive_bytes is %.3g GiB, of which one prefill worker gets room "
        "for requests of engine.max_model_len %d, %.3g GiB each, at once: %d",
        room / _GIB,
        longest,
        kv_bytes / _GIB,
        n,
        extra={"receive_bytes": room, "longest_bytes": kv_bytes, "longest_received": n},
    )
