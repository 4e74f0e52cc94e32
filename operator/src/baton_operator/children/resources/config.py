"""The configuration file of each process: the pod contract's half that is data.

Written as plain mappings against the contract, not against the worker's classes: an image with
another engine keeps the same file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import yaml

from baton_operator import names
from baton_operator.children.resources.meta import Owner
from baton_operator.models import EngineSpec, GatewaySpec, PDDeploymentSpec
from baton_operator.names import Role

_Dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where it is built in: ten times as fast."""

CONFIG_FOLDER = names.FOLDER_CONFIG
KEYS_FOLDER = names.FOLDER_KEYS
API_KEYS_FOLDER = names.FOLDER_API_KEYS
MODEL_MOUNT = names.FOLDER_MODEL
CONTROL_FOLDER = names.FOLDER_CONTROL
CONTROL_SOCKET = f"{CONTROL_FOLDER}/control"
"""Where a worker takes orders: in a volume of its container, so nobody else can reach it."""
SHARED_FOLDER = names.FOLDER_SHARED
"""Where prefill and decode of one pod find each other's KV."""
CONFIG_FILE = "config.yaml"
API_KEYS_KEY = "api-keys"
_EVERY = "*"
"""Every address of the pod, IPv6 and IPv4: which of them its cluster has is not ours to know."""
GATEWAY_SETTLE_SECONDS = 5
"""Endpoints are withdrawn while a leaving gateway serves, so that no client meets a closed port."""


def model_path(spec: PDDeploymentSpec) -> str:
    """Return the model folder as containers see it."""
    source = spec.model.pvc or spec.model.image
    if source is None:
        return spec.model.path
    return f"{MODEL_MOUNT}/{source.path.strip('/')}".rstrip("/")


def worker_config(owner: Owner, spec: PDDeploymentSpec, role: Role, revision: str) -> str:
    """Return a prefill or decode worker's configuration as YAML."""
    link = {
        "dns": f"{names.link_service(owner.name)}.{owner.namespace}.svc",
        "port": names.PORT_LINK,
        "curve": _curve(spec, role),
    }
    return _dump(
        _shared(spec, revision)
        | {
            "link": link,
            "handoff": {
                "bind": f"tcp://{_EVERY}:{names.PORT_KV}",
                "deadline_seconds": float(spec.link.handoff_deadline_seconds),
                **_way(spec),
                **_room(spec, role),
            },
            "engine": _engine(spec),
            "health": {"host": _EVERY, "port": health_port(spec, role)},
            "control": {"socket": CONTROL_SOCKET},
        }
    )


def gateway_config(spec: PDDeploymentSpec) -> str:
    """Return the gateway's configuration as YAML."""
    gateway = spec.gateway
    keys_file = f"{API_KEYS_FOLDER}/{API_KEYS_KEY}" if gateway.api_keys_secret else ""
    return _dump(
        _shared(spec, "")
        | {
            "link": {
                "bind": f"tcp://{_EVERY}:{names.PORT_LINK}",
                "curve": _curve(spec, Role.GATEWAY),
            },
            "gateway": {
                "http": {"host": _EVERY, "port": names.PORT_GATEWAY},
                "health": {"host": _EVERY, "port": names.PORT_HEALTH},
                "api_keys_file": keys_file,
                "max_outstanding_requests": gateway.max_outstanding_requests,
                "request_timeout_seconds": float(gateway.request_timeout_seconds),
                "settle_seconds": float(GATEWAY_SETTLE_SECONDS),
                "drain_seconds": float(gateway.drain_seconds),
                # Said only where it is wanted: an older image does not know it.
                **({"pair_across_revisions": True} if gateway.pair_across_revisions else {}),
                **_help(gateway),
            },
        }
    )


def _help(gateway: GatewaySpec) -> dict[str, Any]:
    """Return when decode computes prompts, said only where it is another bound than the usual."""
    tokens = gateway.decode_prompts_behind_tokens
    is_usual = tokens == GatewaySpec().decode_prompts_behind_tokens
    return {} if is_usual else {"decode_prompts": {"behind_tokens": tokens}}


def _shared(spec: PDDeploymentSpec, revision: str) -> dict[str, Any]:
    return {
        "model": {
            "path": model_path(spec),
            "served_name": spec.model.served_name,
            "revision": spec.model.revision,
        },
        "revision": revision,
        "speculative": {
            "method": spec.speculative.method,
            "num_speculative_tokens": spec.speculative.num_speculative_tokens,
        },
        "logprobs": {"max_top_k": spec.logprobs.max_top_k},
    }


def health_port(spec: PDDeploymentSpec, role: Role) -> int:
    """Return where a worker answers probes; the containers of a pod share its ports."""
    return names.PAIR_PORTS[role]["health"] if spec.has_pairs else names.PORT_HEALTH


def _way(spec: PDDeploymentSpec) -> dict[str, Any]:
    """Return which way KV goes, said only where it is asked for: an older image does not know."""
    way: dict[str, Any] = {"shared_dir": SHARED_FOLDER} if spec.has_pairs else {}
    if spec.handoff.require == "rdma":
        way["nixl"] = "rdma"  # which moves KV so, and over nothing else
    return way | ({"require": spec.handoff.require} if spec.handoff.require != "any" else {})


def _room(spec: PDDeploymentSpec, role: Role) -> dict[str, Any]:
    """Return how much sent KV is taken at once: decode's matter, said only where it is asked for,
    so that nobody's file is another one than an older operator's.
    """
    asked = spec.handoff.asked_room if role is Role.DECODE else None
    return {} if asked is None else {"receive_bytes": asked}


def _engine(spec: PDDeploymentSpec) -> dict[str, Any]:
    engine = spec.engine
    return _asked_for(engine) | {
        "device": engine.device,
        "block_size": engine.block_size,
        "kv_blocks": engine.kv_blocks,
        "max_running": engine.max_running,
        "max_waiting": engine.max_waiting,
        "max_model_len": engine.max_model_len,
        "prefill_chunk_tokens": engine.prefill_chunk_tokens,
        "prefix_caching": engine.prefix_caching,
    }


def _asked_for(engine: EngineSpec) -> dict[str, Any]:
    """Return what is said only where it is wanted: an older image does not know it."""
    asked: dict[str, Any] = {}
    if engine.framework != "auto":
        asked["framework"] = engine.framework
    if engine.dtype != "auto":
        asked["dtype"] = engine.dtype
    if engine.gpu_memory_percent != 90:
        asked["gpu_memory_utilization"] = engine.gpu_memory_percent / 100
    if engine.decode_prompt_chunk_tokens:
        asked["decode_prompt_chunk_tokens"] = engine.decode_prompt_chunk_tokens
    return asked


def _curve(spec: PDDeploymentSpec, role: Role) -> dict[str, Any]:
    if not spec.link.curve:
        return {"enabled": False}
    keys: dict[str, Any] = {
        "enabled": True,
        "public_key_file": f"{KEYS_FOLDER}/own.public",
        "secret_key_file": f"{KEYS_FOLDER}/own.secret",
        "allowed_keys_file": f"{KEYS_FOLDER}/workers.allowed",
    }
    if role is not Role.GATEWAY:
        keys["gateway_public_key_file"] = f"{KEYS_FOLDER}/gateway.public"
    return keys


def _dump(config: dict[str, Any]) -> str:
    """Return a file of sections: most are alike for every PDDeployment, and kept as text."""
    return "".join(_section(key, msgspec.json.encode(config[key])) for key in sorted(config))


@lru_cache(maxsize=512)
def _section(key: str, content: bytes) -> str:
    section = {key: msgspec.json.decode(content)}
    return str(yaml.dump(section, Dumper=_Dumper, sort_keys=True))
