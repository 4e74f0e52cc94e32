"""A command whose request no record can name is counted and dropped: no row could answer it."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, LinkConfig
from baton_worker.identity import incarnation_of
from baton_worker.link.api import CommandReceived
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.link.worker_end import CommandBytes
from baton_worker.messages import Abort, Reserve, Submit, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.sampling import SamplingParams

INFO = WorkerInfo("w", 3, 1, 1, 1, "c", "", "m", 512, 512, 20, 8, 8, 4096)


def commands(handle: int, attempt: int) -> list[object]:
    return [
        Submit(handle, attempt, prompt_token_ids=(1, 2), sampling=SamplingParams()),
        Reserve(handle, attempt, 2, 16, 10.0),
        Abort(handle, attempt),
    ]


@pytest.mark.parametrize(
    ("handle", "attempt", "is_taken"),
    [
        (1, 0, True),
        ((1 << 64) - 1, 255, True),
        (0, 0, False),
        (-1, 0, False),
        (-(1 << 63), 0, False),
        (5, 256, False),
        (5, -1, False),
        (5, (1 << 64) - 1, False),
    ],
)
def test_only_a_u64_handle_and_a_u8_attempt_reach_the_engine(handle, attempt, is_taken):
    registry = CollectorRegistry()
    config = LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False))
    link = ZmqWorkerLink(config, INFO, MetricFactory(registry, "m", "mixed"))
    incarnation = incarnation_of(max(handle, 0))  # of another's requests nothing is taken at all
    events: list[object] = []
    link._on_event = events.append
    for command in commands(handle, attempt):
        link._tell_command(None, CommandBytes(incarnation, msgspec.msgpack.encode(command)))
    taken = [CommandReceived(incarnation, c) for c in commands(handle, attempt)]
    wanted = taken if is_taken else []
    assert events == wanted
    labels = {"model": "m", "role": "mixed", "reason": "command_body"}
    dropped = registry.get_sample_value("baton_link_malformed_messages_total", labels) or 0.0
    assert dropped == (0 if is_taken else 3)
