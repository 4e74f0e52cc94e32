"""Both ends over real sockets on loopback, nothing failing."""

from __future__ import annotations

import msgspec
import pytest

from baton_worker.config import ConfigError
from baton_worker.identity import make_handle
from baton_worker.link.api import (
    CommandReceived,
    GatewayLost,
    GatewayUp,
    Pressure,
    StepReceived,
    WorkerDown,
    WorkerUp,
)
from baton_worker.messages import Abort, Submit
from baton_worker.records.layout import SOFT_FRAME_BYTES
from baton_worker.sampling import SamplingParams


def test_rows_reach_the_gateway_once_and_in_order(pair, columns) -> None:
    gateway, worker = pair
    for step in range(500):
        worker.link.publish(77, columns(77, [2 * step, 2 * step + 1]), step)
    gateway.log.wait(lambda log: len(gateway.rows()) >= 1000)
    assert gateway.rows() == list(range(1000))
    seqs = [event.meta.seq for event in gateway.log.of(StepReceived)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_the_ring_empties_once_rows_are_applied(pair, columns, read_metric) -> None:
    gateway, worker = pair
    for step in range(100):
        worker.link.publish(77, columns(77, [step]), step)
    gateway.log.wait(lambda log: len(gateway.rows()) >= 100)
    worker.link.close(60.0)
    assert read_metric(worker.factory, "baton_link_discarded_frames_total") == 0
    sent = read_metric(worker.factory, "baton_link_sent_frames_total")
    assert read_metric(gateway.factory, "baton_link_applied_frames_total") == sent


def test_commands_reach_the_worker_once_and_in_order(pair) -> None:
    gateway, worker = pair
    commands = [
        Submit(make_handle(77, n), 0, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=n))
        for n in range(300)
    ]
    for command in commands:
        assert gateway.link.send("decode-0", command)
    received = worker.log.wait_for(CommandReceived, 300)
    assert [event.command for event in received] == commands
    assert {event.incarnation for event in received} == {77}


def test_a_command_for_an_unknown_worker_is_declined(pair) -> None:
    gateway, _ = pair
    assert not gateway.link.send("decode-9", Abort(make_handle(77, 1), 0))


def test_a_command_beyond_a_frame_is_an_error_at_once(pair) -> None:
    gateway, _ = pair
    prompt = tuple([70_000] * 300_000)
    with pytest.raises(ValueError, match="exceeds"):
        gateway.link.send(
            "decode-0",
            Submit(make_handle(77, 1), 0, prompt_token_ids=prompt, sampling=SamplingParams(seed=1)),
        )


def test_changed_info_is_told_again(pair, new_info) -> None:
    gateway, worker = pair
    worker.link.set_info(new_info(draining=True))
    first, second = gateway.log.wait_for(WorkerUp, 2)
    assert (first.info.draining, second.info.draining) == (False, True)
    assert first.epoch == second.epoch


def test_a_drained_worker_leaves_with_bye(pair, columns) -> None:
    gateway, worker = pair
    for step in range(200):
        worker.link.publish(77, columns(77, [step]), step)
    worker.link.close(60.0)
    (down,) = gateway.log.wait_for(WorkerDown)
    assert down.reason == "bye"
    assert gateway.rows() == list(range(200))
    assert worker.link.linked_gateways() == 0


def test_a_closing_gateway_is_lost_at_once(pair) -> None:
    gateway, worker = pair
    gateway.link.close()
    (lost,) = worker.log.wait_for(GatewayLost)
    assert (lost.incarnation, lost.reason) == (77, "bye")


def test_rows_for_an_unknown_gateway_are_counted_and_dropped(pair, columns, read_metric) -> None:
    _, worker = pair
    worker.link.publish(78, columns(78, [1, 2, 3]), 0)
    dropped = read_metric(worker.factory, "baton_link_dropped_rows_total", reason="unknown_gateway")
    assert dropped == 3
    assert worker.link.pressure(78) is Pressure.STALLED


def test_columns_beyond_a_frame_are_split_by_rows(pair, columns) -> None:
    gateway, worker = pair
    wide = columns(77, list(range(8000)), n_tokens=60)
    worker.link.publish(77, wide, 0)
    gateway.log.wait(lambda log: len(gateway.rows()) >= 8000)
    assert gateway.rows() == list(range(8000))
    steps = gateway.log.of(StepReceived)
    assert len(steps) > 1
    assert max(event.meta.frame_bytes for event in steps) <= SOFT_FRAME_BYTES


def test_one_worker_serves_several_gateways(start_gateway, start_worker, columns) -> None:
    gateways = [start_gateway(incarnation) for incarnation in (11, 12, 13)]
    worker = start_worker(*(gateway.link.endpoint for gateway in gateways))
    worker.log.wait_for(GatewayUp, 3)
    assert worker.link.linked_gateways() == 3
    for step in range(60):
        incarnation = 11 + step % 3
        worker.link.publish(incarnation, columns(incarnation, [step]), step)
    for index, gateway in enumerate(gateways):
        gateway.log.wait(lambda log, g=gateway: len(g.rows()) >= 20)
        assert gateway.rows() == list(range(index, 60, 3))


def test_a_taken_address_is_a_configuration_error(start_gateway, link_config) -> None:
    first = start_gateway()
    with pytest.raises(ConfigError, match=r"link\.bind"):
        start_gateway(bind=first.link.endpoint)


def test_info_survives_the_wire(pair, new_info) -> None:
    gateway, _ = pair
    (up,) = gateway.log.of(WorkerUp)
    assert msgspec.to_builtins(up.info) == msgspec.to_builtins(new_info())


def test_applying_what_was_not_received_is_the_callers_error(pair) -> None:
    gateway, _ = pair
    (up,) = gateway.log.of(WorkerUp)
    with pytest.raises(ValueError, match="applied 5 of decode-0"):
        gateway.link.applied("decode-0", up.epoch, 5)


def test_rows_left_at_close_are_counted(start_gateway, start_worker, columns, read_metric) -> None:
    gateway = start_gateway()
    gateway.applies = False
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    worker.link.publish(77, columns(77, [1]), 1)
    gateway.log.wait_for(StepReceived)
    worker.link.close(0.0)
    assert read_metric(worker.factory, "baton_link_discarded_frames_total") == 1
    worker.link.publish(77, columns(77, [2]), 2)
    dropped = read_metric(worker.factory, "baton_link_dropped_rows_total", reason="unknown_gateway")
    assert dropped == 1


def test_a_link_over_ipv6_works(start_gateway, start_worker, columns) -> None:
    try:
        gateway = start_gateway(bind="tcp://[::1]:0")
    except ConfigError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    worker.link.publish(77, columns(77, [1]), 1)
    gateway.log.wait_for(StepReceived)
