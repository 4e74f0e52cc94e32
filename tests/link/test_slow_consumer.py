"""A gateway that reads slowly: nothing is lost, and memory stays within the configured bounds."""

from __future__ import annotations

import threading

from baton_worker.link.api import GatewayUp, Pressure, RowsRefused, StepReceived

RING_BYTES = 256 << 10
CREDIT_FRAMES = 8


def test_a_slow_consumer_loses_nothing_and_holds_back_the_sender(
    start_gateway, start_worker, columns, read_metric
) -> None:
    gateway = start_gateway(credit_frames=CREDIT_FRAMES)
    gateway.applies = False
    worker = start_worker(gateway.link.endpoint, ring_bytes=RING_BYTES)
    worker.log.wait_for(GatewayUp)
    done = threading.Event()
    most_held = 0

    def consume() -> None:
        nonlocal most_held
        n_applied = 0
        while not done.is_set():
            steps = gateway.log.of(StepReceived)
            most_held = max(most_held, len(steps) - n_applied)
            for step in steps[n_applied : n_applied + 2]:
                gateway.link.applied(step.worker_id, step.meta.epoch, step.meta.seq)
                n_applied += 1
            done.wait(0.01)

    consumer = threading.Thread(target=consume)
    consumer.start()
    outbox = worker.link._peers[gateway.link.endpoint].end.outbox
    most_bytes, rungs, row = 0, set(), 0
    while row < 60_000:
        rung = worker.link.pressure(77)
        rungs.add(rung)
        if rung >= Pressure.PAUSE:
            done.wait(0.005)
            continue
        worker.link.publish(77, columns(77, list(range(row, row + 20))), row)
        most_bytes = max(most_bytes, outbox.n_bytes)
        row += 20
    gateway.log.wait(lambda log: len(gateway.rows()) >= 60_000)
    done.set()
    consumer.join()
    assert gateway.rows() == list(range(60_000))
    assert worker.log.of(RowsRefused) == []
    assert most_bytes <= RING_BYTES
    assert most_held <= CREDIT_FRAMES + 1
    assert Pressure.STOP_ADMITTING in rungs
    assert read_metric(worker.factory, "baton_link_coalesced_steps_total") > 0


def test_a_lagging_consumer_shrinks_the_credit_it_gives(
    start_gateway, start_worker, columns
) -> None:
    gateway = start_gateway(credit_frames=64)
    gateway.applies = False
    gateway.link.set_lag(1.0)
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    for row in range(50):
        worker.link.publish(77, columns(77, [row]), row)
    gateway.log.wait_for(StepReceived, 3)
    first = gateway.log.of(StepReceived)
    assert len(first) <= 4, "a second of lag leaves 64 * 0.05 frames, and WELCOME one more"
    gateway.link.set_lag(0.0)
    gateway.applies = True
    for step in first:
        gateway.link.applied(step.worker_id, step.meta.epoch, step.meta.seq)
    gateway.log.wait(lambda log: len(gateway.rows()) >= 50)
    assert gateway.rows() == list(range(50))


def test_a_gateway_that_applies_nothing_is_a_stall_not_a_loss(
    start_gateway, start_worker, columns
) -> None:
    # A gateway that is silent for as long is lost: it speaks far more often.
    gateway = start_gateway(heartbeat_seconds=0.1)
    gateway.applies = False
    worker = start_worker(gateway.link.endpoint, heartbeat_seconds=0.1, stalled_abort_seconds=5.0)
    worker.log.wait_for(GatewayUp)
    worker.link.publish(77, columns(77, [0]), 0)
    (step,) = gateway.log.wait_for(StepReceived)
    worker.log.wait_until(lambda: worker.link.pressure(77) is Pressure.STALLED)
    assert worker.link.linked_gateways() == 1
    gateway.link.applied(step.worker_id, step.meta.epoch, step.meta.seq)
    worker.log.wait_until(lambda: worker.link.pressure(77) is Pressure.OPEN)
