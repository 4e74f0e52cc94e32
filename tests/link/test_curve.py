"""CURVE on: who holds the right keys is linked, everybody else is refused and counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from baton_worker import logs
from baton_worker.config import ConfigError, CurveConfig
from baton_worker.identity import Role
from baton_worker.link import zap
from baton_worker.link.api import GatewayLost, GatewayUp, StepReceived, WorkerDown, WorkerUp
from baton_worker.link.curve import client_options, generate_key_files, is_key, load_identity
from baton_worker.link.refusals import WHY
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.link.zap import AllowedKeys
from baton_worker.records.control import Hello, encode_control


class Keys:
    """A folder of key pairs, and the list that the gateway reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed = folder / "allowed"
        self.allowed.write_text("# workers\n\n")
        self.public = {name: self.make(name) for name in ("gateway", "worker", "stranger")}
        self.allow("worker")

    def make(self, name: str) -> str:
        pair = generate_key_files(self.folder / f"{name}.pub", self.folder / f"{name}.sec")
        return pair.public.decode()

    def allow(self, *names: str, bound_to: str = "") -> None:
        lines = [f"{self.public[name]} {bound_to}" for name in names]
        # Renaming into place is how mounted Secrets change.
        fresh = self.allowed.with_suffix(".new")
        fresh.write_text("\n".join(["# workers", *lines]) + "\n")
        fresh.rename(self.allowed)

    def config(self, name: str, server: str = "gateway") -> CurveConfig:
        return CurveConfig(
            enabled=True,
            public_key_file=str(self.folder / f"{name}.pub"),
            secret_key_file=str(self.folder / f"{name}.sec"),
            gateway_public_key_file=str(self.folder / f"{server}.pub"),
            allowed_keys_file=str(self.allowed),
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def gateway(start_gateway, keys: Keys):
    return start_gateway(curve=keys.config("gateway"))


@pytest.fixture
def count_until(read_metric) -> Callable[..., None]:
    """Wait for a counter to rise: nothing else is told of a connection that failed."""
    never = threading.Event()

    def wait(factory, name: str, reasons: tuple[str, ...], at_least: int = 1) -> None:
        for _ in range(15_000):
            if sum(read_metric(factory, name, reason=reason) for reason in reasons) >= at_least:
                return
            never.wait(0.02)
        pytest.fail(f"{name} stayed below {at_least} for {reasons}")

    return wait


HANDSHAKES = "baton_link_handshake_failures_total"
GATEWAYS_LOGGERS = ("baton_worker.link.switchboard", "baton_worker.link.zap")


def why_refused(worker) -> str:
    """Return what a worker's /readyz says of its only gateway, once there is something to say."""
    for _ in range(15_000):
        if worker.link.refusals():
            (reason,) = worker.link.refusals().values()
            return WHY[reason]
        threading.Event().wait(0.02)
    return ""


def test_a_worker_with_an_allowed_key_is_linked(gateway, start_worker, keys: Keys, columns) -> None:
    worker = start_worker(gateway.link.endpoint, curve=keys.config("worker"))
    worker.log.wait_for(GatewayUp)
    for row in range(100):
        worker.link.publish(77, columns(77, [row]), row)
    gateway.log.wait(lambda log: len(gateway.rows()) >= 100)
    assert gateway.rows() == list(range(100))


def test_a_worker_without_curve_is_refused_and_counted(gateway, start_worker, count_until) -> None:
    worker = start_worker(gateway.link.endpoint)
    count_until(gateway.factory, HANDSHAKES, ("protocol", "other"))
    assert worker.link.linked_gateways() == 0
    assert gateway.log.events == []
    assert "link.curve.enabled is not the same" in why_refused(worker)


def test_a_worker_that_expects_another_server_key_is_refused_and_counted(
    gateway, start_worker, keys: Keys, count_until
) -> None:
    curve = keys.config("worker", server="stranger")
    worker = start_worker(gateway.link.endpoint, curve=curve)
    count_until(gateway.factory, HANDSHAKES, ("protocol", "other"))
    assert worker.link.linked_gateways() == 0
    assert "link.curve.gateway_public_key_file" in why_refused(worker)


def test_strangers_are_counted_each_and_logged_now_and_then(
    gateway, keys: Keys, count_until, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    stranger = load_identity(keys.config("stranger"), is_client=True)
    assert stranger is not None
    with zmq.Context() as context:
        peers = [context.socket(zmq.DEALER) for _ in range(40)]
        for i, peer in enumerate(peers):
            peer.linger = 0
            if i % 2:
                client_options(peer, stranger, stranger.gateway_key)
            peer.connect(gateway.link.endpoint)
        count_until(gateway.factory, HANDSHAKES, ("unknown_key",), at_least=20)
        count_until(gateway.factory, HANDSHAKES, ("protocol", "other"), at_least=20)
        for peer in peers:
            peer.close()
    lines = [
        (record.name, getattr(record, "reason", ""))
        for record in caplog.records
        if record.levelname == "WARNING" and record.name in GATEWAYS_LOGGERS
    ]
    assert ("baton_worker.link.zap", "unknown_key") in lines
    assert len(lines) == len(set(lines))


def test_a_refused_key_is_logged_with_the_list_that_could_allow_it(
    gateway, start_worker, keys: Keys, count_until, caplog
) -> None:
    start_worker(gateway.link.endpoint, curve=keys.config("stranger"))
    count_until(gateway.factory, HANDSHAKES, ("unknown_key",))
    line = next(each for each in caplog.records if each.name == "baton_worker.link.zap")
    assert vars(line)["public_key"] == keys.public["stranger"]
    assert vars(line)["list"].startswith("link.curve.allowed_keys_file: /")


def test_an_unknown_key_is_refused_until_it_is_allowed(
    gateway, start_worker, keys: Keys, count_until
) -> None:
    worker = start_worker(gateway.link.endpoint, curve=keys.config("stranger"))
    count_until(gateway.factory, HANDSHAKES, ("unknown_key",))
    assert worker.link.linked_gateways() == 0
    assert "link.curve.allowed_keys_file" in why_refused(worker)
    keys.allow("worker", "stranger")
    worker.log.wait_for(GatewayUp)
    assert worker.link.refusals() == {}


def test_others_are_served_while_one_is_refused(
    gateway, start_worker, keys: Keys, columns, count_until
) -> None:
    good = start_worker(gateway.link.endpoint, curve=keys.config("worker"))
    start_worker(gateway.link.endpoint, info={"worker_id": "bad"}, curve=keys.config("stranger"))
    count_until(gateway.factory, HANDSHAKES, ("unknown_key",))
    good.log.wait_for(GatewayUp)
    good.link.publish(77, columns(77, [1]), 1)
    gateway.log.wait_for(StepReceived)


def test_a_revoked_key_ends_a_live_connection(gateway, start_worker, keys: Keys) -> None:
    worker = start_worker(gateway.link.endpoint, curve=keys.config("worker"))
    worker.log.wait_for(GatewayUp)
    keys.allow("stranger")
    (down,) = gateway.log.wait_for(WorkerDown)
    assert down.reason == "key_revoked"
    assert worker.log.wait_for(GatewayLost) == [GatewayLost(77, "key_revoked")]
    assert worker.link.linked_gateways() == 0


def test_a_key_bound_to_one_name_may_not_use_another(
    gateway, start_worker, keys: Keys, count_until
) -> None:
    keys.allow("worker", bound_to="decode-0")
    impostor = start_worker(
        gateway.link.endpoint, info={"worker_id": "decode-1"}, curve=keys.config("worker")
    )
    count_until(gateway.factory, "baton_link_rejected_hellos_total", ("impersonation",))
    count_until(impostor.factory, "baton_link_rejections_total", ("impersonation",))
    start_worker(gateway.link.endpoint, curve=keys.config("worker"))
    (up,) = gateway.log.wait_for(WorkerUp)
    assert up.worker_id == "decode-0"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_key_of_one_role_cannot_pose_as_another(
    gateway, start_worker, keys: Keys, count_until, is_named: bool
) -> None:
    keys.allow("worker", bound_to="decode-0 role=prefill" if is_named else "role=prefill")
    impostor = start_worker(gateway.link.endpoint, curve=keys.config("worker"))
    count_until(gateway.factory, "baton_link_rejected_hellos_total", ("role_not_allowed",))
    assert gateway.log.of(WorkerUp) == []
    impostor.link.close(0.0)
    role = {"role": int(Role.PREFILL)}
    start_worker(gateway.link.endpoint, info=role, curve=keys.config("worker"))
    (up,) = gateway.log.wait_for(WorkerUp)
    assert up.info.role == Role.PREFILL


def test_a_revoked_keys_connection_is_closed_and_not_only_ignored(
    gateway, keys: Keys, new_info, read_metric
) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    identity = load_identity(keys.config("worker"), is_client=True)
    client_options(dealer, identity, identity.gateway_key)
    monitoring = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        dealer.connect(gateway.link.endpoint)
        body = msgspec.msgpack.encode(new_info())
        dealer.send(encode_control(Hello(9, 1, 1, 1, 0, body)))
        gateway.log.wait_for(WorkerUp)
        keys.allow("stranger")
        assert monitoring.poll(60_000), "the connection was left open"
        gateway.log.wait_until(
            lambda: read_metric(gateway.factory, "baton_link_expelled_total") == 1
        )
    finally:
        dealer.disable_monitor()
        monitoring.close(linger=0)
        dealer.close()
        context.term()


@pytest.mark.parametrize("words", ["a b", "role=king", "role=prefill role=decode", "role="])
def test_a_line_that_binds_a_key_to_nonsense_is_refused(keys: Keys, words: str) -> None:
    keys.allow("worker", bound_to=words)
    with pytest.raises(ConfigError, match=r"allowed:2 is no key with"):
        AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))


def broken(keys: Keys, field: str, content: str | None) -> CurveConfig:
    path = keys.folder / "broken"
    if content is not None:
        path.write_text(content)
    config = keys.config("worker")
    changed = {name: getattr(config, name) for name in config.__struct_fields__}
    return CurveConfig(**(changed | {field: str(path)}))


@pytest.mark.parametrize("content", [None, "short", "~" * 40], ids=["missing", "short", "not-z85"])
@pytest.mark.parametrize("field", ["public_key_file", "secret_key_file", "gateway_public_key_file"])
def test_a_bad_key_file_is_a_configuration_error_that_names_its_field(
    keys: Keys, field: str, content: str | None
) -> None:
    with pytest.raises(ConfigError, match=rf"link\.curve\.{field}: "):
        load_identity(broken(keys, field, content), is_client=True)


def test_halves_of_different_pairs_are_a_configuration_error(keys: Keys) -> None:
    stranger = (keys.folder / "stranger.pub").read_text()
    with pytest.raises(ConfigError, match="not the public half"):
        load_identity(broken(keys, "public_key_file", stranger), is_client=True)


def test_curve_without_keys_is_a_configuration_error(link_config, new_info, new_factory) -> None:
    config = link_config(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig())
    with pytest.raises(ConfigError, match=r"link\.curve\.public_key_file is empty, .* keygen"):
        ZmqWorkerLink(config, new_info(), new_factory())


def test_a_bad_line_among_the_allowed_keys_names_its_number(keys: Keys) -> None:
    keys.allowed.write_text(f"# ok\n{keys.public['worker']}\nnonsense\n")
    with pytest.raises(ConfigError, match=r"allowed:3 is not"):
        AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("nonsense\n")])
def test_a_bad_update_is_told_of_once_in_a_while_however_many_connections_ask(
    keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, spoil
) -> None:
    """Every message of KV and every handshake looks at the list."""
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    spoil(keys.allowed)
    for _ in range(100):
        allowed.refresh()
    assert caplog.messages == ["allowed keys not reloaded"]


def test_a_bad_update_of_the_allowed_keys_keeps_the_old_ones(keys: Keys) -> None:
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    keys.allowed.unlink()
    allowed.refresh()
    assert keys.public["worker"] in allowed
    keys.allowed.write_text("nonsense\n")
    allowed.refresh()
    assert keys.public["worker"] in allowed
    keys.allow("stranger")
    allowed.refresh()
    assert keys.public["worker"] not in allowed
    assert keys.public["stranger"] in allowed


@pytest.mark.parametrize("others", [("stranger",), ("stranger", "gateway")], ids=["same", "other"])
def test_a_key_revoked_in_place_and_within_a_tick_of_the_files_clock_is_revoked(
    keys: Keys, others: tuple[str, ...]
) -> None:
    """Neither the file's time nor, when it is as long as before, its size tells of that."""

    def put(*names: str) -> None:
        keys.allowed.write_text("".join(f"{keys.public[name]}\n" for name in names))
        os.utime(keys.allowed, ns=(before.st_atime_ns, before.st_mtime_ns))

    before = keys.allowed.stat()
    put("worker")
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    put(*others)
    now = keys.allowed.stat()
    assert (now.st_mtime_ns, now.st_ino) == (before.st_mtime_ns, before.st_ino)
    allowed.refresh()
    assert keys.public["worker"] not in allowed
    assert keys.public["stranger"] in allowed


@pytest.mark.parametrize("is_new_file", [False, True], ids=["in place", "anew"])
def test_a_key_revoked_by_a_copy_that_keeps_the_files_time_is_revoked(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, is_new_file: bool
) -> None:
    """As cp -p and tar do; a file that is made anew may get the number of the one that went."""
    monkeypatch.setattr(zap, "_SETTLED_SECONDS", 0.0)
    keys.allowed.write_text(f"{keys.public['worker']}\n")
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    before = now = keys.allowed.stat()
    while now.st_ctime_ns == before.st_ctime_ns:  # until the clock of files ticks
        if is_new_file:
            keys.allowed.unlink()
        keys.allowed.write_text(f"{keys.public['gateway']}\n")
        os.utime(keys.allowed, ns=(before.st_atime_ns, before.st_mtime_ns))
        now = keys.allowed.stat()
    assert (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size)
    allowed.refresh()
    assert keys.public["worker"] not in allowed
    assert keys.public["gateway"] in allowed


def test_a_file_that_has_not_changed_for_a_while_is_not_read_again(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zap, "_SETTLED_SECONDS", 0.0)
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    assert [allowed.refresh() for _ in range(3)] == [1, 1, 1]


def test_a_key_revoked_while_another_thread_reads_the_list_stays_revoked(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = AllowedKeys("link.curve.allowed_keys_file", str(keys.allowed))
    is_about_to = threading.Event()

    def refresh() -> None:
        is_about_to.set()
        allowed.refresh()

    other = threading.Thread(target=refresh)

    def revoke_in_the_middle(key: bytes) -> bool:
        monkeypatch.undo()
        keys.allow("stranger")
        other.start()
        assert is_about_to.wait(60)
        other.join(0.2)  # it must not get through; were it let, it would in this time
        return is_key(key)

    keys.allow("worker", "stranger")
    monkeypatch.setattr(zap, "is_key", revoke_in_the_middle)
    allowed.refresh()
    other.join(60)
    assert keys.public["worker"] not in allowed
    assert keys.public["stranger"] in allowed


def test_key_files_are_never_overwritten_and_the_secret_is_private(tmp_path: Path) -> None:
    public, secret = tmp_path / "k.pub", tmp_path / "k.sec"
    generate_key_files(public, secret)
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        generate_key_files(public, secret)
