"""A deployment over two hosts: the gateway, a prefill and a decode here, another decode there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton_faults.fleet import Fleet, Start, fleet
from baton_faults.network import LEFT, RIGHT, Network, network
from baton_faults.steady import ENGINE
from baton_worker.config import HttpConfig

AWAY = "decode-0"


@contextlib.contextmanager
def two_hosts(folder: Path, **options: Any) -> Iterator[tuple[Fleet, Network]]:
    """Start the deployment with `AWAY` on the right host."""
    with network() as between:

        def placed(name: str, start: Start) -> Start:
            config = start.config
            port = config.link.bind.rpartition(":")[2]
            gateway = f"tcp://{LEFT}:{port}"
            link = msgspec.structs.replace(config.link, gateways=(gateway,), bind=gateway)
            host = RIGHT if name == AWAY else LEFT
            handoff = msgspec.structs.replace(config.handoff, bind=f"tcp://{host}:0")
            config = msgspec.structs.replace(
                config, link=link, handoff=handoff, health=HttpConfig(host, 0)
            )
            under = between.under_right if name == AWAY else ()
            return replace(start, config=config, under=under)

        plain = {"decode": 2, "num_speculative_tokens": 2, "engine": ENGINE}
        with fleet(folder, placed, **{**plain, **options}) as running:
            yield running, between
