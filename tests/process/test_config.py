"""A configuration file is read whole or refused by the field's name."""

from __future__ import annotations

import errno
import re
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton_testing.processes import wait_until
from baton_worker.config import (
    ConfigError,
    CurveConfig,
    EngineConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    dump_config,
    load_config,
)
from baton_worker.config_errors import cannot_listen
from baton_worker.gateway.server.server import listen
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.link.curve import generate_key_files
from baton_worker.link.gateway import ZmqGatewayLink
from baton_worker.local.layout import CurveFiles, LocalOptions, plan_processes
from baton_worker.local.supervisor import Reports, Supervisor
from baton_worker.metrics import MetricFactory
from baton_worker.roles.health import HealthServer
from baton_worker.roles.process import run_worker


def write(folder: Path, text: str) -> Path:
    path = folder / "baton.yaml"
    path.write_text(text)
    return path


def test_defaults_fill_what_is_left_out(tmp_path):
    config = load_config(write(tmp_path, "model: {path: /models/chat}\n"))
    assert config.served_name == "chat"
    assert config.link.curve.enabled
    assert config.logprobs.max_top_k == 20


def test_what_is_dumped_is_read_back_equal(tmp_path):
    files = CurveFiles("a", "b", "c", "d")
    plans = plan_processes(LocalOptions(model_path="/m"), [5555], {"gateway": files})
    for plan in plans:
        path = tmp_path / plan.name
        path.write_bytes(dump_config(plan.config))
        assert load_config(path) == plan.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}\nlink: {portt: 1}\n", r"link\.portt is no field: .* mean 'port'\?"),
        (
            "model: {path: m}\ngateway: {health: {prot: 1}}\n",
            r"gateway\.health\.prot is no field: did you mean 'port'\?",
        ),
        ("model: {path: m}\nzz: 1\n", "zz is no field: it is one of model, worker_id, "),
        ("model: {path: m}\nlink: {port: 70000}\n", r"link\.port is 70000: expected .* <= 65535"),
        ("model: {path: m}\nengine: {block_size: '16'}\n", "block_size is '16': .*, got `str`"),
        ("model: {path: m}\nlink: {gateways: [a, 5]}\n", r"link\.gateways\[1\] is 5: .*`str`"),
        (
            "model: {path: m}\nspeculative: {method: eagle}\n",
            r"method is 'eagle': it must be one of 'none', 'ngram'",
        ),
        ("model: {path: m}\nlink: {curve: 7}\n", r"link\.curve is 7: expected `object`"),
        ("model: {path: m}\nspeculative: {num_speculative_tokens: 6}\n", "num_speculative_tokens"),
        (
            "model: {path: m}\nspeculative: {method: none, num_speculative_tokens: 2}\n",
            "num_speculative_tokens is 2 with method 'none'",
        ),
        ("model: {path: m}\nengine: {block_size: 7}\n", "block_size"),
        (
            "model: {path: m}\nengine: {device: gpu, tensor_parallel_size: 3}\n",
            "tensor_parallel_size is 3, device 'gpu' has 1, 2, 4 or 8 ranks",
        ),
        ("model: {path: m}\nengine: {sim: {seed: 1}}\n", "sim is set, but device is 'cpu'"),
        (
            "model: {path: m}\nengine: {device: sim, sim: {acceptance: [0.1, 0.2, 0, 0, 0]}}\n",
            "no share may be larger",
        ),
        ("model: {path: m}\nengine: {device: sim, sim: {acceptance: [0.5]}}\n", "acceptance"),
        ("model: {}\n", r"model\.path is missing"),
        ("- a\n", r"it must hold model, worker_id, .*, not \['a'\]"),
        ("tiny\n", "it must hold model, .*, not 'tiny'"),
        ("model: [\n", "baton.yaml"),
        ("# nothing\n", "it is empty: model.path at least is required"),
        (
            "model: {path: m}\nengine: {max_running: 4}\nengine: {overlap: false}\n",
            "engine is there twice, in lines 2 and 3",
        ),
        (
            "model: {path: m}\nlink: {curve: {enabled: false, enabled: true}}\n",
            r"link\.curve\.enabled is there twice",
        ),
        ("model: {path: m}\nhealth: {on: 1}\n", r"health\.on is no field: .* are text"),
        ("model: {path: m}\n8: 1\n", "8 is no field"),
        ('model: {path: "a\\0b"}\n', r"model\.path is 'a\\x00b': .* no zero byte"),
        (
            'model: {path: m}\nlink: {gateways: [a, "a\\0b"]}\n',
            r"link\.gateways\[1\] is .* no zero byte",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_an_anchor_is_read_wherever_it_is_named(tmp_path):
    text = (
        "model: {path: m}\nhealth: {limits: &l {max_headers: 7}}\ngateway: {http: {limits: *l}}\n"
    )
    config = load_config(write(tmp_path, text))
    assert config.health.limits.max_headers == config.gateway.http.limits.max_headers == 7


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_local_plan_pairs_compatible_processes():
    plans = plan_processes(LocalOptions(model_path="/m", prefill=2, decode=3, mixed=1), [5555], {})
    assert [p.name for p in plans] == [
        "gateway", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "mixed-0",
    ]  # fmt: skip
    shared: set[ProcessConfig] = {(p.config.model, p.config.speculative) for p in plans}
    assert len(shared) == 1
    assert {p.config.link.gateways for p in plans} == {("tcp://127.0.0.1:5555",)}
    assert not any(p.config.link.curve.enabled for p in plans)


def test_several_gateways_share_the_api_s_port_and_nothing_else():
    files = CurveFiles("g.public", "g.secret", "g.public", "allowed")
    options = LocalOptions(model_path="/m", port=8000, gateways=2, gpus=("7",))
    plans = plan_processes(options, [5555, 6666], {"gateway": files})
    assert [p.name for p in plans] == ["gateway-0", "gateway-1", "prefill-0", "decode-0"]
    first, second, *workers = (p.config for p in plans)
    for gateway in (first, second):
        assert (gateway.gateway.http.port, gateway.gateway.shares_port) == (8000, True)
        assert gateway.gateway.health.port == 0, "who asks the API's port is told of either"
        assert gateway.link.curve.secret_key_file == "g.secret"
    both = ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:6666")
    assert (first.link.bind, second.link.bind) == both
    assert {p.link.gateways for p in (first, second, *workers)} == {both}
    assert [p.environment["CUDA_VISIBLE_DEVICES"] for p in plans] == ["", "", "7", "7"]


def test_one_gateway_listens_alone():
    (gateway, *_) = plan_processes(LocalOptions(model_path="/m"), [5555], {})
    assert not gateway.config.gateway.shares_port
    assert gateway.config.gateway.health is None


def test_workers_are_spread_over_the_gpus_in_turn():
    options = LocalOptions(model_path="/m", prefill=2, decode=1, gpus=("0", "GPU-1a"))
    plans = plan_processes(options, [1], {})
    assert {p.name: p.environment["CUDA_VISIBLE_DEVICES"] for p in plans} == {
        "gateway": "", "prefill-0": "0", "prefill-1": "GPU-1a", "decode-0": "0",
    }  # fmt: skip


def test_each_worker_gets_as_many_gpus_as_it_has_ranks():
    engine = EngineConfig(device="gpu", tensor_parallel_size=2)
    options = LocalOptions(model_path="/m", prefill=1, decode=2, engine=engine, gpus=tuple("0123"))
    plans = plan_processes(options, [1], {})
    assert {p.name: p.environment["CUDA_VISIBLE_DEVICES"] for p in plans} == {
        "gateway": "", "prefill-0": "0,1", "decode-0": "2,3", "decode-1": "0,1",
    }  # fmt: skip


def test_a_process_is_started_with_the_environment_of_its_plan(tmp_path):
    options = LocalOptions(model_path="/nowhere", gpus=("7",))
    plan = plan_processes(options, [1], {})[1]
    reports = Reports(lambda child: None, lambda child, code: None)
    supervisor = Supervisor([plan], reports, [], tmp_path)
    (child,) = supervisor.children
    supervisor._start(child)
    environ = Path(f"/proc/{child.process.pid}/environ")
    try:
        # Popen returns when exec is under way, and the kernel shows no environment before its end.
        seen = wait_until("an environment", environ.read_bytes, bool).split(b"\0")
    finally:
        supervisor._end_all()
    assert b"CUDA_VISIBLE_DEVICES=7" in seen
    assert any(entry.startswith(b"PATH=") for entry in seen), "beside what this one has"


def test_workers_see_what_this_process_sees_where_no_gpu_is_named():
    plans = plan_processes(LocalOptions(model_path="/m"), [1], {})
    assert [p.environment for p in plans] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EADDRINUSE, "health: cannot listen on h:1: Address already in use; end the process"),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; this machine has no such"),
        (errno.EACCES, "Permission denied; ports below 1024"),
        (socket.EAI_NONAME, "health: cannot listen on h:1: no address is known by that name"),
        (errno.ENODEV, "health: cannot listen on h:1: No such device"),
        (None, "health: cannot listen on h:1: Invalid argument"),
    ],
)
def test_an_address_that_cannot_be_had_comes_with_what_to_do(number, told):
    assert told in cannot_listen("health", "h:1", number)


@pytest.mark.parametrize(
    "bind",
    ["127.0.0.1", "127.0.0.1:5555", "tcp://:5555", "tcp://::1:5555", "tcp://127.0.0.1:99999"],
)
def test_what_is_no_endpoint_to_listen_on_comes_with_what_one_is(bind):
    link = LinkConfig(bind=bind, curve=CurveConfig(enabled=False))
    metrics = MetricFactory(CollectorRegistry(), "m", "gateway")
    told = f"link.bind is {bind!r}: it must be tcp://host:port"
    with pytest.raises(ConfigError, match=re.escape(told)):
        ZmqGatewayLink(link, GatewayIdentity(1), metrics).start(lambda events: None)


def test_every_listener_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http = HttpMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
        busy = f"cannot listen on .*{port}: Address already in use; end the process"
        with pytest.raises(ConfigError, match=f"gateway.http: {busy}"):
            listen(HttpConfig("127.0.0.1", port))
        with pytest.raises(ConfigError, match=f"health: {busy}"):
            HealthServer(HttpConfig("127.0.0.1", port), CollectorRegistry(), http)
        link = LinkConfig(bind=f"tcp://127.0.0.1:{port}", curve=CurveConfig(enabled=False))
        metrics = MetricFactory(CollectorRegistry(), "m", "gateway")
        with pytest.raises(ConfigError, match=f"link.bind: {busy}"):
            ZmqGatewayLink(link, GatewayIdentity(1), metrics).start(lambda events: None)


def test_a_bad_gateway_address_is_found_before_the_model_is_looked_at(tmp_path):
    """Weights may take minutes; here there are none, which is the next thing to be told."""
    model = ModelConfig(str(tmp_path / "none"))
    for gateways, field in ((("tcp://gateway",), "link.gateways"), (("tcp://g:1",), "model.path")):
        link = LinkConfig(gateways=gateways, curve=CurveConfig(enabled=False))
        config = ProcessConfig(model=model, link=link)
        with pytest.raises(ConfigError, match=field):
            run_worker(config, Role.MIXED, on_ready=lambda ready: None)


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.label)
def test_a_missing_key_is_found_before_the_model_is_looked_at(tmp_path, role):
    generate_key_files(tmp_path / "public", tmp_path / "secret")
    (tmp_path / "list").write_text("")
    sound = {
        "public_key_file": str(tmp_path / "public"),
        "secret_key_file": str(tmp_path / "secret"),
        "gateway_public_key_file": str(tmp_path / "public"),
        "allowed_keys_file": str(tmp_path / "list"),
    }
    for field in sound:
        curve = CurveConfig(**(sound | {field: str(tmp_path / "none")}))
        link = LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=curve)
        config = ProcessConfig(model=ModelConfig(str(tmp_path / "no-model")), link=link)
        is_read = role is Role.DECODE or field != "allowed_keys_file"
        told = rf"link\.curve\.{field}: cannot read" if is_read else r"model\.path"
        with pytest.raises(ConfigError, match=told):
            run_worker(config, role, on_ready=lambda ready: None)
