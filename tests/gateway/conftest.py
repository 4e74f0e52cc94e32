"""A gateway on a scripted link, served over loopback on a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from baton_testing.plain_http import NO_AUTHORITIES
from baton_testing.scripted_link import EOS, ScriptedLink
from baton_worker.config import (
    GatewayConfig,
    HttpConfig,
    LogprobsConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.gateway.server.server import listen, serve
from baton_worker.gateway.server.service import GatewayService
from baton_worker.gateway.text.tokenizer import GatewayTokenizer, load_tokenizer
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.metrics import MetricFactory

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}"
    "{{ raise_exception('system comes first') }}{% endif %}<|{{ m.role }}|>{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = ["the quick brown fox jumps over the lazy dog", "a stop here and there", "naïve café 你好"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a small byte-level BPE of 512 ids."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> GatewayTokenizer:
    return load_tokenizer(model_folder)


class _Plain(openai.DefaultHttpxClient):
    """As the openai client makes its own: what nobody closes is closed when nobody knows it."""

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()


@dataclass
class Running:
    """A served gateway and the link behind it."""

    link: Any
    service: GatewayService
    registry: CollectorRegistry
    url: str
    stop: Callable[[], None]
    health_url: str

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60.0} | options
        client = _Plain(verify=NO_AUTHORITIES)
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=client, **options)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, verify=NO_AUTHORITIES, **options)

    def ask(self, body: Mapping[str, object]) -> "Asked":
        """Post a completion, on a thread of its own."""
        return Asked(self, body)

    def metric(self, name: str, **labels: str) -> float:
        all_labels = {"model": "tiny", "role": "gateway"} | labels
        return self.registry.get_sample_value(name, all_labels) or 0.0

    def wait_metric(self, name: str, value: float, n_live: int = 0) -> None:
        """Wait for a gauge, which cannot come to this value with fewer than `n_live` requests."""
        limit = time.monotonic() + 60.0
        while self.metric(name) != value:
            assert len(self.service.requests) >= n_live, "a request has ended"
            assert time.monotonic() < limit, f"{name} is {self.metric(name)}"


class Asked(threading.Thread):
    """A completion that is posted on a thread of its own."""

    def __init__(self, gateway: Running, body: Mapping[str, object]) -> None:
        super().__init__()
        self._gateway, self._body = gateway, body
        self._answer: httpx.Response | None = None
        gateway.link.begin_asking()
        self.start()

    def run(self) -> None:
        with self._gateway.link.asking(), self._gateway.http() as client:
            self._answer = client.post("/v1/completions", json=self._body)

    def result(self) -> httpx.Response:
        self.join(60)
        assert not self.is_alive()
        assert self._answer is not None
        return self._answer

    @property
    def error(self) -> Any:
        return self.result().json()["error"]

    def choices(self) -> list[list[int]]:
        """Each choice's tokens."""
        return [choice["token_ids"] for choice in self.result().json()["choices"]]


@contextmanager
def _run(
    config: ProcessConfig, link: Any, tokenizer: GatewayTokenizer, clock: Callable[[], float]
) -> Iterator[Running]:
    registry = CollectorRegistry()
    factory = MetricFactory(registry, "tiny", "gateway")
    listener = listen(config.gateway.http)
    inner = listen(config.gateway.health) if config.gateway.health else None
    built: list[GatewayService] = []
    failures: list[BaseException] = []
    ready, stop = threading.Event(), threading.Event()

    def build() -> GatewayService:
        built.append(GatewayService(config, link, tokenizer, GatewayIdentity(7), factory, clock))
        return built[0]

    def work() -> None:
        try:
            serve(build, listener, ready.set, stop, inner)
        except BaseException as error:  # noqa: BLE001 - shown by the test's thread
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    assert not failures, failures
    url, health_url = (
        f"http://127.0.0.1:{each.getsockname()[1]}" for each in (listener, inner or listener)
    )

    def end() -> None:
        stop.set()
        thread.join(60)
        for each in filter(None, (listener, inner)):
            each.close()
        assert not thread.is_alive()

    try:
        yield Running(link, built[0], registry, url, end, health_url)
    finally:
        link.resume()  # a test that failed may have left clients behind that wait for workers
        end()
    assert not failures, failures
    assert link.violations == []
    assert built[0].requests.is_empty
    for load in built[0].workers.loads():
        left = (load.outstanding_tokens, load.outstanding_requests)
        assert (*left, load.prompt_tokens, load.line_tokens) == (0, 0, 0, 0), load.info.worker_id


StartGateway = Callable[..., Running]


@pytest.fixture
def start_gateway(model_folder: Path, tokenizer: GatewayTokenizer) -> Iterator[StartGateway]:
    """`start_gateway(script, per_step=2, workers="pd", max_top_k=20, info={}, clock, **options)`.

    `max_top_k` is the configured bound, for workers too; `info` changes what workers say in HELLO;
    `clock` is the service's; `options` are the gateway's.
    """
    stack: list[Any] = []

    def start(
        script: Any = None,
        per_step: int = 2,
        workers: str = "pd",
        max_top_k: int = 20,
        info: Mapping[str, object] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> Running:
        link = ScriptedLink(script or echo_script, per_step)
        gateway = GatewayConfig(http=HttpConfig(port=0), **options)
        model, logprobs = ModelConfig(str(model_folder), "tiny"), LogprobsConfig(max_top_k)
        config = ProcessConfig(model=model, gateway=gateway, logprobs=logprobs)
        facts = {"max_top_k": max_top_k, **info}
        context = _run(config, link, tokenizer, clock)
        running = context.__enter__()
        stack.append(context)
        if "p" in workers:
            link.up("prefill-0", Role.PREFILL, **facts)
        if "d" in workers:
            link.up("decode-0", Role.DECODE, **facts)
        if "m" in workers:
            link.up("mixed-0", Role.MIXED, **facts)
        if workers == "pd" or "m" in workers:
            _wait_ready(running)
        return running

    yield start
    for context in reversed(stack):
        context.__exit__(None, None, None)


def echo_script(submit: Any) -> list[int]:
    """The prompt again, then the end-of-sequence token."""
    return [t for t in submit.prompt_token_ids if t > 4] + [EOS]


def _wait_ready(running: Running) -> None:
    with httpx.Client(base_url=running.health_url, timeout=60.0, verify=NO_AUTHORITIES) as client:
        limit = time.monotonic() + 60.0
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < limit, "the gateway did not become ready"
