"""Which processes a local deployment has and what each is told: a pure plan.

Every process gets the same model, speculative and logprob settings, so that pairs are compatible by
construction; only names, roles and addresses differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton_worker.addresses import is_ipv6, tcp_endpoint
from baton_worker.config import (
    ControlConfig,
    CurveConfig,
    EngineConfig,
    GatewayConfig,
    HandoffConfig,
    HealthConfig,
    HttpConfig,
    LinkConfig,
    LogprobsConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
    SpeculativeMethod,
    TracingConfig,
)
from baton_worker.config_decode_prompts import DecodePromptsConfig


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What `baton-worker local` was asked for. Counts are numbers of processes; `gpus` are given
    to workers in turn, each as many as it has ranks; none: each sees all.
    """

    model_path: str
    served_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    gateways: int = 1
    speculative_method: SpeculativeMethod = "mtp"
    num_speculative_tokens: int = 1
    max_top_k: int = 20
    engine: EngineConfig = field(default_factory=EngineConfig)
    gpus: tuple[str, ...] = ()
    api_keys_file: str = ""
    has_curve: bool = False
    share_kv: bool = False
    nixl: bool = False
    traces_endpoint: str = ""
    generation_config: Literal["auto", "none"] = "auto"
    decode_prompts_behind: int = DecodePromptsConfig().behind_tokens
    dead_after_seconds: float = LinkConfig().dead_after_seconds


@dataclass(frozen=True, slots=True)
class CurveFiles:
    """Key files of one process, when CURVE is on."""

    public_key: str
    secret_key: str
    gateway_public_key: str
    allowed_keys: str


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to run: `role` is the subcommand, `name` its stable identity.

    `environment`: what it gets beside this process's.
    """

    name: str
    role: str
    config: ProcessConfig
    environment: Mapping[str, str] = field(default_factory=dict)


def loopback_of(options: LocalOptions) -> str:
    """Return the loopback address over which the processes speak: of the API's IP family."""
    return "::1" if is_ipv6(options.host) else "127.0.0.1"


GATEWAY = "gateway"
"""The role, the only gateway's name, and that of the key pair which all of them share."""


def process_names(options: LocalOptions) -> list[tuple[str, str]]:
    """Return (name, role) of every process, the gateways first."""
    counts = {"prefill": options.prefill, "decode": options.decode, "mixed": options.mixed}
    workers = [(f"{role}-{i}", role) for role, count in counts.items() for i in range(count)]
    if options.gateways == 1:
        return [(GATEWAY, GATEWAY), *workers]
    return [*((f"{GATEWAY}-{i}", GATEWAY) for i in range(options.gateways)), *workers]


def plan_processes(
    options: LocalOptions,
    link_ports: Sequence[int],
    curve: dict[str, CurveFiles],
    folder: str = "",
) -> list[ProcessPlan]:
    """Return every process with its configuration; `curve` maps names to key files.

    `link_ports`: one for each gateway. Workers have their control sockets in `folder`, or none, and
    those for sharing KV. Several gateways listen on the API's port together, so each has another
    one for its metrics.
    """
    are_several = options.gateways > 1
    shared = ProcessConfig(
        model=ModelConfig(path=options.model_path, served_name=options.served_name),
        speculative=_speculative(options),
        logprobs=LogprobsConfig(max_top_k=options.max_top_k),
        engine=options.engine,
        handoff=HandoffConfig(
            bind=tcp_endpoint(loopback_of(options), 0),
            shared_dir=folder if options.share_kv else "",
            nixl="any" if options.nixl else "off",
        ),
        health=HealthConfig(loopback_of(options)),
        gateway=GatewayConfig(
            http=HttpConfig(options.host, options.port),
            shares_port=are_several,
            health=HealthConfig(loopback_of(options)) if are_several else None,
            api_keys_file=options.api_keys_file,
            playground=True,
            generation_config=options.generation_config,
            decode_prompts=DecodePromptsConfig(options.decode_prompts_behind),
        ),
        tracing=TracingConfig(endpoint=options.traces_endpoint),
    )
    links = tuple(tcp_endpoint(loopback_of(options), port) for port in link_ports)
    return [
        ProcessPlan(
            name,
            role,
            _for_process(
                _control(shared, name, role, folder),
                name,
                LinkConfig(
                    gateways=links,
                    bind=links[min(number, len(links) - 1)],
                    dead_after_seconds=options.dead_after_seconds,
                    curve=_curve(curve.get(GATEWAY if role == GATEWAY else name)),
                ),
            ),
            _environment(options, number - options.gateways),
        )
        for number, (name, role) in enumerate(process_names(options))
    ]


def _environment(options: LocalOptions, number: int) -> dict[str, str]:
    """Return which GPUs the worker of this number sees, one for each rank; a gateway, whose number
    is negative, none. What NIXL sends over TCP is encrypted by nobody, so it stays on this machine.
    """
    gpus, ranks = options.gpus, options.engine.tensor_parallel_size
    network = {"UCX_NET_DEVICES": "lo"} if options.nixl else {}
    if not gpus:
        return network
    first = number * ranks % len(gpus)
    visible = ",".join(gpus[first : first + ranks]) if number >= 0 else ""
    return network | {"CUDA_VISIBLE_DEVICES": visible}


def _control(shared: ProcessConfig, name: str, role: str, folder: str) -> ProcessConfig:
    if role == GATEWAY or not folder:
        return shared
    return msgspec.structs.replace(shared, control=ControlConfig(f"{folder}/{name}.sock"))


def _for_process(shared: ProcessConfig, name: str, link: LinkConfig) -> ProcessConfig:
    return msgspec.structs.replace(shared, worker_id=name, link=link)


def _curve(files: CurveFiles | None) -> CurveConfig:
    if files is None:
        return CurveConfig(enabled=False)
    return CurveConfig(
        enabled=True,
        public_key_file=files.public_key,
        secret_key_file=files.secret_key,
        gateway_public_key_file=files.gateway_public_key,
        allowed_keys_file=files.allowed_keys,
    )


def _speculative(options: LocalOptions) -> SpeculativeConfig:
    if options.num_speculative_tokens == 0:
        return SpeculativeConfig("none", 0)
    return SpeculativeConfig(options.speculative_method, options.num_speculative_tokens)
