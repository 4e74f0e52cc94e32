"""What pods are given: configuration that the worker reads, restricted security, draining."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import json
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import yaml

from baton_operator.children.resources import config
from baton_operator.children.resources.drain import EXIT_HEADROOM_SECONDS, drain_command
from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import gateway_template, worker_template
from baton_operator.models import PDDeploymentSpec
from baton_operator.models.receive_room import room_bytes
from baton_operator.names import Role
from baton_worker.config import load_config
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import resolve_options

OWNER = Owner("ns", "chat", "uid-1")
BASE = {
    "image": "worker:1",
    "model": {"servedName": "chat", "pvc": {"claimName": "models", "path": "/chat/"}},
    "roles": [{"name": "prefill"}, {"name": "decode"}],
}
SPECS = {
    "defaults": {},
    "no speculation": {"speculative": {"method": "none", "numSpeculativeTokens": 0}},
    "prompt lookup": {"speculative": {"method": "ngram", "numSpeculativeTokens": 4}},
    "both drafters": {"speculative": {"method": "mtp_ngram", "numSpeculativeTokens": 5}},
    "no encryption": {"link": {"curve": False}},
    "api keys": {"gateway": {"apiKeysSecret": "keys"}},
    "limits": {"engine": {"device": "gpu", "blockSize": 64, "maxRunning": 7, "kvBlocks": 9}},
    "on a gpu": {
        "engine": {
            "device": "gpu",
            "framework": "torch",
            "dtype": "bfloat16",
            "gpuMemoryPercent": 85,
        }
    },
    "decode helps": {
        "engine": {"decodePromptChunkTokens": 256},
        "gateway": {"decodePromptsBehindTokens": 4096},
    },
    "room for sent KV": {"handoff": {"receiveBytes": "4Gi"}},
    "nothing shared": {"engine": {"prefixCaching": False}},
    "simulated": {"engine": {"device": "sim"}},
    "image volume": {"model": {"servedName": "chat", "image": {"reference": "models:1"}}},
}


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_for_a_gpu_serves_a_model_without_a_draft_layer(tmp_path):
    document = yaml.safe_load((EXAMPLES / "gpu-pvc.yaml").read_text())
    spec = msgspec.convert(document["spec"], PDDeploymentSpec)
    path = tmp_path / "config.yaml"
    path.write_text(config.worker_config(OWNER, spec, Role.DECODE, "r1"))
    shape = dataclasses.replace(load_shape(EXAMPLES / "tiny-mtp"), n_mtp_layers=0)
    assert not resolve_options(load_config(path), shape).use_mtp


def spec_of(**changes):
    return msgspec.convert(BASE | changes, PDDeploymentSpec)


def templates(spec):
    return {
        "prefill": worker_template(OWNER, spec, spec.role("prefill"), "r1"),
        "decode": worker_template(OWNER, spec, spec.role("decode"), "r1"),
        "gateway": gateway_template(OWNER, spec, "chat-gateway-1"),
    }


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
def test_the_worker_reads_every_configuration(changes, tmp_path):
    spec = spec_of(**changes)
    texts = {
        "prefill": config.worker_config(OWNER, spec, Role.PREFILL, "r1"),
        "decode": config.worker_config(OWNER, spec, Role.DECODE, "r1"),
        "gateway": config.gateway_config(spec),
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        read = load_config(path)
        assert read.served_name == "chat"
        assert read.speculative.num_speculative_tokens == spec.speculative.num_speculative_tokens
        assert read.speculative.method == spec.speculative.method
        assert read.link.curve.enabled == spec.link.curve
    worker = load_config(tmp_path / "decode.yaml")
    assert worker.link.dns == "chat-link.ns.svc"
    assert worker.revision == "r1"
    assert worker.engine.block_size == spec.engine.block_size
    assert worker.engine.prefix_caching == spec.engine.prefix_caching
    assert worker.engine.device == spec.engine.device
    assert worker.engine.decode_prompt_chunk_tokens == spec.engine.decode_prompt_chunk_tokens
    assert worker.engine.framework == spec.engine.framework
    assert worker.engine.dtype == spec.engine.dtype
    assert worker.engine.gpu_memory_utilization == spec.engine.gpu_memory_percent / 100
    assert worker.handoff.receive_bytes == room_bytes(spec.handoff.receive_bytes)
    assert worker.health.port == 8080
    assert worker.control.socket == config.CONTROL_SOCKET
    gateway = load_config(tmp_path / "gateway.yaml").gateway
    assert gateway.http.port == 8000
    behind = spec.gateway.decode_prompts_behind_tokens
    assert gateway.decode_prompts.behind_tokens == behind
    assert gateway.health is not None
    assert gateway.health.port == 8080, "metrics are not on the port of the API"


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
def test_every_pod_passes_restricted_pod_security(changes):
    for template in templates(spec_of(**changes)).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "sysctls" not in pod["securityContext"]
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all("hostPath" not in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert all("hostPort" not in port for port in container["ports"])


def test_sidecars_and_init_containers_of_the_template_are_restricted_too():
    extra = {"spec": {"containers": [{"name": "side"}], "initContainers": [{"name": "before"}]}}
    spec = spec_of(roles=[{"name": "prefill", "template": extra}, {"name": "decode"}])
    pod = templates(spec)["prefill"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["worker", "side"]
    for container in (pod["containers"][1], pod["initContainers"][0]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_role_mounts_its_own_secret_key_and_no_other():
    for role, template in templates(spec_of()).items():
        volume = next(v for v in template["spec"]["volumes"] if v["name"] == "curve")
        keys = {item["key"] for item in volume["secret"]["items"]}
        assert {key for key in keys if key.endswith(".secret")} == {f"{role}.secret"}


def test_what_only_the_user_knows_passes_through():
    container = {
        "name": "worker",
        "resources": {"limits": {"nvidia.com/gpu": "1"}, "claims": [{"name": "gpu"}]},
        "env": [{"name": "EXTRA", "value": "1"}, {"name": "BATON_ROLE", "value": "forged"}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    user = {
        "metadata": {"annotations": {"net": "rdma"}, "labels": {"team": "x"}},
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "gpu"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [container],
        },
    }
    spec = spec_of(roles=[{"name": "prefill", "template": user}, {"name": "decode"}])
    template = templates(spec)["prefill"]
    pod, worker = template["spec"], template["spec"]["containers"][0]
    assert pod["nodeSelector"] == {"gpu": "yes"}
    assert pod["resourceClaims"] == user["spec"]["resourceClaims"]
    assert worker["resources"] == container["resources"]
    assert {"name": "EXTRA", "value": "1"} in worker["env"]
    assert [e["value"] for e in worker["env"] if e["name"] == "BATON_ROLE"] == ["prefill"]
    assert template["metadata"]["labels"]["team"] == "x"
    assert template["metadata"]["labels"]["baton.dev/role"] == "prefill"
    assert "scratch" in {volume["name"] for volume in pod["volumes"]}


def test_orders_reach_a_worker_through_a_volume_of_its_pod_and_no_port():
    made = templates(spec_of())
    for role in ("prefill", "decode"):
        pod = made[role]["spec"]
        volume = next(v for v in pod["volumes"] if v["name"] == "control")
        assert volume == {"name": "control", "emptyDir": {}}
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "control")
        assert config.CONTROL_SOCKET.startswith(mount["mountPath"] + "/")
        assert not mount["readOnly"]
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert config.CONTROL_SOCKET in hook[-1]
        assert {p["name"] for p in pod["containers"][0]["ports"]} == {"health", "kv"}


def test_probes_ask_the_health_port_of_every_pod():
    for template in templates(spec_of()).values():
        container = template["spec"]["containers"][0]
        assert {"name": "health", "containerPort": 8080, "protocol": "TCP"} in container["ports"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[kind]["httpGet"]["port"] == "health"


def test_the_grace_period_is_the_drain_budget_and_headroom():
    roles = [{"name": "prefill", "drain": {"graceSeconds": 90}}, {"name": "decode"}]
    template = templates(spec_of(roles=roles))["prefill"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 90 + EXIT_HEADROOM_SECONDS
    command = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "time.monotonic() + 90" in command[-1]


def test_a_hook_of_the_users_at_the_start_stays_beside_ours_at_the_end():
    hooks = {"postStart": {"exec": {"command": ["warm"]}}, "preStop": {"sleep": {"seconds": 1}}}
    template = {"spec": {"containers": [{"name": "worker", "lifecycle": hooks}]}}
    roles = [{"name": "prefill", "template": template}, {"name": "decode"}]
    found = templates(spec_of(roles=roles))["prefill"]["spec"]["containers"][0]["lifecycle"]
    assert found["postStart"] == hooks["postStart"]
    assert found["preStop"] == {"exec": {"command": drain_command(300)}}


def test_a_leaving_gateway_has_time_to_settle_and_to_finish_its_streams():
    spec = spec_of(gateway={"drainSeconds": 40})
    settings = yaml.safe_load(config.gateway_config(spec))["gateway"]
    assert (settings["settle_seconds"], settings["drain_seconds"]) == (5, 40)
    pod = templates(spec)["gateway"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 5 + 40 + EXIT_HEADROOM_SECONDS


class Drain(http.server.BaseHTTPRequestHandler):
    def __init__(self, calls, remaining, *args):
        self.calls, self.remaining = calls, remaining
        super().__init__(*args)

    def _answer(self):
        self.calls.append(self.command)
        left = 9 if self.command == "POST" else self.remaining.pop(0)
        if left is None:
            self.send_error(503)
            return
        body = json.dumps({"draining": True, "remaining": left}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer

    def log_message(self, *args):
        pass

    def address_string(self):
        return "the hook"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def test_the_hook_asks_for_the_drain_and_waits_for_two_idle_reads(tmp_path):
    calls, remaining = [], [3, 0, 1, 0, None, 0, 0, 5]
    handler = functools.partial(Drain, calls, remaining)
    server = UnixServer(str(tmp_path / "s"), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        command = drain_command(30, str(tmp_path / "s"), poll_seconds=0.01)
        done = subprocess.run([sys.executable, *command[1:]], timeout=30, check=False)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert done.returncode == 0
    assert calls == ["POST", *["GET"] * 7]
    assert remaining == [5]
