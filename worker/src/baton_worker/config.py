"""The worker's configuration file: one YAML document, the half of the pod contract that is data.

Owns the field names, units and defaults, and turns a bad file into one error that names the field.
Reads no environment and opens nothing but the file it is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from baton_worker.config_decode_prompts import DecodePromptsConfig, check_chunk
from baton_worker.config_document import DocumentError, read_document
from baton_worker.config_errors import explain
from baton_worker.config_types import Count, Port, Seconds, SecondsOrNone, Section, Share


class ConfigError(ValueError):
    """A configuration file or flag is wrong; the message names the field. Not worth a retry."""


SpeculativeMethod = Literal["none", "ngram", "mtp", "mtp_ngram"]


class ModelConfig(Section, frozen=True):
    """Which weights to serve: `path` is a folder in Hugging Face layout.

    `served_name`: what clients call it; empty: the folder's name. `revision`: a name for these
    weights, where the folder's does not tell them from others; workers of two do not pair.
    """

    path: str
    served_name: str = ""
    revision: str = ""


class SpeculativeConfig(Section, frozen=True):
    """Drafting: `num_speculative_tokens` is K, drafts per step; 0 exactly when `method` is none.

    Methods: `mtp`, the model's own draft layer; `ngram`, prompt lookup, which needs no such layer:
    what followed the last time the newest `prompt_lookup_max`..`prompt_lookup_min` tokens occurred;
    `mtp_ngram`: `num_model_steps` drafts of the layer, the rest of K by lookup behind them.
    """

    method: SpeculativeMethod = "mtp"
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=5)] = 1
    num_model_steps: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4

    @property
    def uses_mtp(self) -> bool:
        """Whether the MTP layer drafts, and so has KV of its own."""
        return self.method in ("mtp", "mtp_ngram")


class LogprobsConfig(Section, frozen=True):
    """`max_top_k`: most alternatives a request may ask for (wire limit 64; OpenAI's own is 20)."""

    max_top_k: Annotated[int, msgspec.Meta(ge=0, le=64)] = 20


class CurveConfig(Section, frozen=True):
    """CURVE, ZeroMQ's encryption and authentication, of the link and of KV transfer.

    `enabled`: false on one machine only, and then at both ends. `public_key_file` /
    `secret_key_file`: this process's Z85 key pair. `gateway_public_key_file`: the gateways' server
    key (workers). `allowed_keys_file`: a line `KEY [worker_id] [role=prefill|decode|mixed]` for
    each key (gateways: the workers; workers: their KV peers), read again when it changes.
    """

    enabled: bool = True
    public_key_file: str = ""
    secret_key_file: str = ""
    gateway_public_key_file: str = ""
    allowed_keys_file: str = ""


class LinkConfig(Section, frozen=True):
    """The record link.

    Workers: `gateways` lists `tcp://host:port` endpoints, or `dns` names a headless service whose
    every address is a gateway, at `port`. Gateways: `bind` is their endpoint; host `*` is every
    address, IPv6 and IPv4.

    A gateway gives a worker up after `reconnect_seconds` when its connection ended, as that of a
    process that dies does at once, and after `dead_after_seconds` when it only fell silent; each
    end speaks every `heartbeat_seconds`. A worker keeps records until they are acknowledged, at
    most `ring_bytes` and `ring_frames` for each gateway, and gives one up that acknowledged nothing
    for `stalled_abort_seconds`. `credit_frames` and `credit_bytes`: how much may be sent ahead of
    what a gateway has taken.
    """

    gateways: tuple[str, ...] = ()
    dns: str = ""
    port: Port = 5555
    bind: str = "tcp://127.0.0.1:5555"
    ring_bytes: Count = 64 << 20
    ring_frames: Count = 4096
    credit_frames: Count = 256
    credit_bytes: Count = 8 << 20
    heartbeat_seconds: Seconds = 1.0
    dead_after_seconds: Seconds = 3.0
    reconnect_seconds: Seconds = 0.5
    stalled_abort_seconds: Seconds = 30.0
    curve: CurveConfig = CurveConfig()


class HandoffConfig(Section, frozen=True):
    """KV transfer: where it goes, and what waits where and for how long.

    `bind`: where decode listens; port 0: a free one. `advertise_host`: an address or name under
    which prefill workers reach this decode worker; empty: BATON_POD_IP, else the address of `bind`,
    which must then be one and not every. `deadline_seconds`: how long prefill or decode bears the
    other's silence when it asks for a place, sends or reads KV. `queue_seconds`: how long decode
    keeps a request that it cannot run yet. `send_bytes`: KV that prefill has under way to one
    decode worker. `receive_bytes`: KV under way that decode holds or has promised to take, before
    its pool has room. `ahead_requests`: how many beyond its `max_running` decode lets prefill
    compute, for places that become free. `shared_dir`: a folder of one host's workers, where decode
    finds and reads prefill's KV, on gpus over NVLink. `nixl`: else it reads it by NIXL, each rank
    its part, over RDMA or any way, TCP too, unencrypted. `require`: fail what would go another way.
    """

    bind: str = "tcp://127.0.0.1:0"
    advertise_host: str = ""
    deadline_seconds: Seconds = 10.0
    queue_seconds: Seconds = 600.0
    send_bytes: Count = 64 << 20
    receive_bytes: Count = 2 << 30
    ahead_requests: Annotated[int, msgspec.Meta(ge=0)] = 8
    shared_dir: str = ""
    nixl: Literal["off", "rdma", "any"] = "off"
    require: Literal["any", "nvlink", "rdma"] = "any"


class SimConfig(Section, frozen=True):
    """The simulated model of `engine.device: sim`: what it does and how long it takes.

    Times are the simulated device's: for each prompt token fed (`prefill_token_seconds`), for a
    step that decodes (`decode_step_seconds`), and for each row of it (`decode_row_seconds`).
    `acceptance`: share of drafts accepted at draft positions 1 to 5 in greedy
    requests, never rising. `vocab_size` 0 means the model's; fewer ids are all that prompts and
    output may then hold. `seed`: of the simulated text; workers with another one do not pair.
    """

    prefill_token_seconds: SecondsOrNone = 20e-6
    decode_step_seconds: SecondsOrNone = 0.02
    decode_row_seconds: SecondsOrNone = 20e-6
    acceptance: Annotated[tuple[Share, ...], msgspec.Meta(min_length=5, max_length=5)] = (
        0.8, 0.6, 0.45, 0.35, 0.25,
    )  # fmt: skip
    vocab_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0

    def __post_init__(self) -> None:
        if list(self.acceptance) != sorted(self.acceptance, reverse=True):
            raise ValueError(
                f"acceptance is {list(self.acceptance)}: a later draft is never accepted without "
                "the ones before it, so no share may be larger than the one before"
            )


class EngineConfig(Section, frozen=True):
    """Engine limits. `kv_blocks` 0 means: room for `max_running` sequences of `max_model_len`, or
    on a gpu what its memory holds.

    `device` sim computes nothing: no weights are read, and `sim` says what to pretend. `framework`:
    what gives a gpu's memory and graphs; auto: PyTorch where it is installed, else Paddle. `dtype`:
    of weights and KV on a gpu; auto: the checkpoint's, bfloat16 for float16.
    `gpu_memory_utilization`: share of a gpu's memory for weights, KV and a step's own, together.
    `block_size`: tokens in a KV block. `max_running`: requests that are stepped at once;
    `max_waiting`: how many more may wait in the worker. `max_model_len`: most tokens of prompt and
    output together; 0: what the model can. `prefill_chunk_tokens`: most prompt tokens in a step, no
    fewer than draft layers. `decode_prompt_chunk_tokens`: decode workers take whole prompts too,
    where gateways find prefill's line long, and compute so many of their tokens in a step, by which
    their streams' gaps grow; 16 at least, 0: none. `prefix_caching`: requests that begin alike
    share the KV of their common full blocks; outputs do not change, but `usage` and the time to the
    first token tell a client whether others sent its prompt. `overlap`: launch each step before the
    output work of the one before; outputs are the same. `tensor_parallel_size`: processes of this
    worker that share each layer's heads and MLP; it must divide the model's attention heads, KV
    heads (gpus: or be a multiple of these) and intermediate size. On gpus it is 1, 2, 4 or 8, a
    rank on each of the first that the worker sees. `stuck_seconds`: how long a step may last before
    the worker counts as hung and ends (or ten times as long as others of its size did, if that is
    more); from half of that on it takes no new requests. `first_step_seconds`: the same for a step
    of a size that none before it had, which may compile.
    """

    device: Literal["cpu", "gpu", "sim"] = "cpu"
    framework: Literal["auto", "paddle", "torch"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gpu_memory_utilization: Annotated[float, msgspec.Meta(ge=0.05, le=0.98)] = 0.9
    block_size: Literal[8, 16, 32, 64] = 16
    kv_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_running: Count = 32
    max_waiting: Count = 1024
    max_model_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefill_chunk_tokens: Count = 512
    decode_prompt_chunk_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_caching: bool = True
    overlap: bool = True
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    sim: SimConfig = SimConfig()
    stuck_seconds: Seconds = 10.0
    first_step_seconds: Seconds = 120.0

    def __post_init__(self) -> None:
        if self.device != "sim" and self.sim != SimConfig():
            raise ValueError(f"sim is set, but device is {self.device!r}: it is for device 'sim'")
        check_chunk(self.decode_prompt_chunk_tokens)
        if self.device == "sim" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but device 'sim' computes "
                "nothing that ranks could share"
            )
        if self.device == "gpu" and self.tensor_parallel_size not in (1, 2, 4, 8):
            size = self.tensor_parallel_size
            raise ValueError(f"tensor_parallel_size is {size}, device 'gpu' has 1, 2, 4 or 8 ranks")
        if self.device != "gpu" and (self.framework == "torch" or self.dtype == "bfloat16"):
            raise ValueError(
                f"framework is {self.framework!r} and dtype {self.dtype!r}, but device "
                f"{self.device!r} computes with Paddle in float32"
            )


class HttpLimits(Section, frozen=True):
    """What a peer may send to an HTTP listener, and how long it may take; 4xx and 503 beyond.

    They bind before an API key is looked at. `max_target_bytes`: of path and query (414);
    `max_headers`, `max_header_bytes` (431); `max_body_bytes` (413): the gateway's default holds a
    million tokens, and each MiB of a body can hold its event loop for 3 ms. `header_seconds`,
    `body_seconds`: for all headers, and for the whole body (408). `idle_seconds`: between two
    requests of a connection; longer than clients and balancers keep theirs (httpx 5 s, most 60 s,
    Go 90 s), for the side that sends the next request must be the one that closes.
    `max_connections`, and of them one peer's, `max_connections_per_address`: 503 (an IPv6 peer is
    its network of 64 bits; behind a proxy all clients are one). `max_receiving_bytes`: of all
    bodies that are being received (503).
    """

    max_target_bytes: Count = 8192
    max_headers: Count = 100
    max_header_bytes: Count = 32768
    max_body_bytes: Count = 4 << 20
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 60.0
    idle_seconds: Seconds = 120.0
    max_connections: Count = 8192
    max_connections_per_address: Count = 2048
    max_receiving_bytes: Count = 256 << 20


class HttpConfig(Section, frozen=True):
    """A listening HTTP address; `host` `*` is every one, IPv6 and IPv4, `port` 0 a free port."""

    host: str = "127.0.0.1"
    port: Port = 0
    limits: HttpLimits = HttpLimits()


class HealthConfig(HttpConfig, frozen=True):
    """An HTTP address for probes and scrapers (`/healthz`, `/readyz`, `/metrics`): `host` `*` is
    every one, `port` 0 a free port, which the log names. They are few: connections are fewer than
    an API's, so that they cannot take the descriptors that links and KV need.
    """

    limits: HttpLimits = HttpLimits(
        max_body_bytes=65536, max_connections=256, max_connections_per_address=64
    )


class ControlConfig(Section, frozen=True):
    """Orders to a worker: drain and undrain it, change K (`baton-worker control`).

    `socket`: path of the Unix socket that takes them, made for this process's user alone. Empty:
    none are taken, which a pod that the operator made refuses: its preStop hook could not drain it.
    """

    socket: str = ""


class GatewayConfig(Section, frozen=True):
    """The gateway's own options.

    `api_keys_file`: one key a line, lines that begin with # aside; empty means no key is needed.
    `playground`: serve the page `/playground`, for people who look at tokens; leave it off in
    production. `settle_seconds`: how long a gateway that is told to stop goes on serving, so that
    balancers hear of it first; `drain_seconds`: how long it then waits for live requests (0: end
    them at once). `max_retries`: how often a choice moves to other workers when one of its own is
    lost or full. `max_outstanding_requests`: choices in hand at once; clients (API keys, or
    addresses where no keys are set) share them: one may hold what nobody else wants, all but an
    eighth, and where there is no room those that hold fewest go first. `max_choices`: the most of
    one request (`n` times its prompts). `max_waiting_requests`: how many requests may wait for
    room; `max_wait_seconds`: for how long, before they are refused with 429; 0 refuses at once.
    `pair_across_revisions`: prefill and decode of two revisions may pair when their weights,
    tokenizer and KV layout are equal. `generation_config`: whence sampling fields come that a
    request leaves out: `auto`, the model's generation_config.json; `none`, the API's own defaults.
    `health`: an address for `/healthz`, `/readyz` and `/metrics` alone; without it they are beside
    the API, for every client to read. `shares_port`: gateways of one user of this host that all
    say so listen on a port together, each once it has a pair, or 5 s without; it must be named, and
    `health` too; only `local` keeps other deployments off it. `sse_comment_seconds`: a stream
    without news for so long sends a comment. `request_timeout_seconds`: in all (504).
    `client_queue_tokens`: tokens that may wait for a client that does not read; then it is cut off.
    """

    http: HttpConfig = HttpConfig(port=8000)
    shares_port: bool = False
    health: HealthConfig | None = None
    api_keys_file: str = ""
    max_outstanding_requests: Count = 2048
    request_timeout_seconds: Seconds = 600.0
    client_queue_tokens: Count = 16384
    sse_comment_seconds: SecondsOrNone = 15.0
    playground: bool = False
    settle_seconds: SecondsOrNone = 0.0
    drain_seconds: SecondsOrNone = 0.0
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    max_choices: Count = 256
    max_waiting_requests: Count = 256
    max_wait_seconds: SecondsOrNone = 10.0
    pair_across_revisions: bool = False
    decode_prompts: DecodePromptsConfig = DecodePromptsConfig()
    generation_config: Literal["auto", "none"] = "auto"


class TracingConfig(Section, frozen=True):
    """OpenTelemetry traces. `endpoint`: a collector's OTLP/HTTP URL for traces; empty: no traces.

    `sample_ratio`: share of requests traced whose client did not decide.
    """

    endpoint: str = ""
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class ProcessConfig(Section, frozen=True):
    """One process's whole configuration.

    `worker_id`: a name that no other worker of these gateways has, printable ASCII without blanks;
    empty: BATON_POD_NAME, else role, host name and health port. `revision`: the operator's name of
    what this process is made from; requests stay in one unless `gateway.pair_across_revisions`.
    `pair_group`: prefill and decode of a group pair with each other alone, as in one pod; empty:
    BATON_PAIR_GROUP, else they pair with all that have none.
    """

    model: ModelConfig
    worker_id: Annotated[str, msgspec.Meta(max_length=253, pattern="^[!-~]*$")] = ""
    revision: str = ""
    pair_group: Annotated[str, msgspec.Meta(max_length=253, pattern="^[!-~]*$")] = ""
    speculative: SpeculativeConfig = SpeculativeConfig()
    logprobs: LogprobsConfig = LogprobsConfig()
    link: LinkConfig = LinkConfig()
    handoff: HandoffConfig = HandoffConfig()
    engine: EngineConfig = EngineConfig()
    health: HealthConfig = HealthConfig()
    gateway: GatewayConfig = GatewayConfig()
    tracing: TracingConfig = TracingConfig()
    control: ControlConfig = ControlConfig()

    def __post_init__(self) -> None:
        spec = self.speculative
        if (spec.method == "none") != (spec.num_speculative_tokens == 0):
            raise ValueError(
                f"speculative.num_speculative_tokens is {spec.num_speculative_tokens} with method "
                f"{spec.method!r}: it must be 0 exactly when the method is none"
            )
        if spec.prompt_lookup_min > spec.prompt_lookup_max:
            raise ValueError(
                f"speculative.prompt_lookup_min is {spec.prompt_lookup_min}, above "
                f"prompt_lookup_max {spec.prompt_lookup_max}"
            )

    @property
    def served_name(self) -> str:
        """The model name clients use: `model.served_name`, else the folder's name."""
        return self.model.served_name or Path(self.model.path).resolve().name


def load_config(path: Path) -> ProcessConfig:
    """Read and validate a configuration file.

    Raises:
        ConfigError: it is none; the message has the file, the field, its value and what it may be.
    """
    try:
        document = read_document(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except DocumentError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return msgspec.convert(document, ProcessConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, document, ProcessConfig)}") from error


def dump_config(config: ProcessConfig) -> bytes:
    """Return `config` as YAML that `load_config` reads back equal."""
    return msgspec.yaml.encode(config)
