"""Whoever calls again and again to be cut off is counted each time, and logged once in a while."""

from __future__ import annotations

import msgspec

from baton_worker import logs
from baton_worker.identity import GatewayIdentity
from baton_worker.link.gateway_end import GatewaySettings
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.worker_table import WorkerTable
from baton_worker.records.control import Hello
from baton_worker.records.errors import RecordError, RefusalReason

LIE = RecordError(RefusalReason.FIELD_RANGE, "lie")


def test_a_line_for_strangers_and_one_for_workers(
    new_info, new_factory, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    limits = OutboxLimits(1 << 20, 64)
    settings = GatewaySettings(GatewayIdentity(77), InboxPolicy(), 1.0, 3.0, 0.5, limits)
    table = WorkerTable(settings, GatewayLinkMetrics(new_factory("gateway")))
    for n in range(50):
        worker, stranger = b"w%d" % n, b"s%d" % n
        body = msgspec.msgpack.encode(new_info(worker_id=f"w-{n}"))
        table.hello(worker, "", Hello(100 + n, 1, 1, 1, 0, body), 0.0)
        table.malformed(worker, LIE, 0.0)
        table.malformed(stranger, LIE, 0.0)
        table.flooded(stranger)
    assert len(table.expelled) == 150
    ended = [record for record in caplog.records if "is ended" in record.getMessage()]
    assert [(record.worker, record.error) for record in ended] == [
        ("w-0", str(LIE)),
        ("", str(LIE)),
        ("", "more messages than any worker has to say"),
    ]
