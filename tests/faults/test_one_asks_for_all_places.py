"""Somebody asks one decode worker for all places that there are, and uses none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from baton_faults.fleet import Start, fleet, wait_until
from baton_faults.steady import ENGINE, assert_whole_at_once, steady
from baton_worker.handoff.frames import Ask, encode_ask
from baton_worker.identity import make_handle
from baton_worker.ports import port_of, reserve_port

pytestmark = pytest.mark.e2e

N_ASKS = 2_000
N_REQUESTS = 40
TAKEN, WAITING = "baton_handoff_places_taken", "baton_handoff_waiting_asks"


@contextmanager
def greedy(endpoint: str) -> Iterator[None]:
    """Ask for places from a host of its own, as who holds one prefill worker can."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint.replace("tcp://", "tcp://127.0.0.9:0;"))
        for n in range(N_ASKS):
            ask = Ask(make_handle(9, n), 0, kv_bytes=1, n_tokens=1, priority=-(2**31))
            socket.send_multipart(encode_ask(ask))
        yield


def test_the_others_requests_are_served_beside_it(tmp_path: Path) -> None:
    with reserve_port("127.0.0.1") as port:
        endpoint = f"tcp://127.0.0.1:{port_of(port)}"

        def listening_there(name: str, start: Start) -> Start:
            if start.role != "decode":
                return start
            handoff = msgspec.structs.replace(start.config.handoff, bind=endpoint)
            return replace(start, config=msgspec.structs.replace(start.config, handoff=handoff))

        engine = msgspec.structs.replace(ENGINE, max_running=8)
        with fleet(tmp_path, listening_there, engine=engine) as running, greedy(endpoint):
            decode = running["decode-0"]
            decode.wait_metric(TAKEN, 16)
            wait_until("its line is full", lambda: decode.metric(WAITING), lambda n: n > 1000)
            with steady(running, at_least=N_REQUESTS, n_open=4) as load:
                pass
            assert_whole_at_once(load)
            assert decode.metric("baton_handoff_places_expired_total") == 0
