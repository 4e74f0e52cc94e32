"""What the properties are asked of: a model on a device, and how many requests try it.

Owns the defaults of the engines that are tried. Knows no framework: each device brings a `Subject`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton_testing.exactness.asks import Ask, mixture
from baton_testing.exactness.trace import EagerDevice
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.options import NO_DRAFTS, DraftSources, EngineOptions

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """How hard a subject is tried.

    Attributes:
        asks, tokens, longest: requests, output tokens of each, and the longest prompt.
        batches: numbers of running requests.
        chunks: prompt tokens a step.
        drafts: values of K.
        scored: requests whose output is scored as a prompt, and output tokens of each.
        scored_chunks: prompt tokens a step while it is.
    """

    asks: int
    tokens: int
    longest: int
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    drafts: tuple[int, ...]
    scored: tuple[int, int]
    scored_chunks: tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A model on a device.

    Attributes:
        over: returns an engine over what is loaded, with these options.
        make: the same, over its own.
        has_mtp: the model drafts.
        max_model_len: longest request.
        max_top_k: most alternatives.
        tracing: kernels that take notes, of a subject that is traced.
        loaded: its device, kernels, shape and weights.
    """

    name: str
    vocab_size: int
    has_mtp: bool
    max_model_len: int
    sizes: Sizes
    make: Callable[[EngineOptions], StepEngine]
    over: Callable[[Any, EngineOptions], StepEngine]
    max_top_k: int = 64
    tracing: Any = None
    loaded: Any = None

    def asks(self, count: int = 0, seed: int = 0) -> list[Ask]:
        """Return the mixture that it is tried with."""
        sizes = self.sizes
        return mixture(
            count or sizes.asks,
            self.vocab_size,
            sizes.longest,
            sizes.tokens,
            seed=seed,
            max_top_k=min(self.max_top_k, self.vocab_size),
        )

    @contextmanager
    def engine(self, **options: Any) -> Iterator[StepEngine]:
        """Give an engine and close it behind; K is 0 and no draft is made unless asked for."""
        engine = self.make(self.options(**options))
        try:
            yield engine
        finally:
            engine.close()
            vars(engine).clear()  # the caller's name still holds it; its pool and graphs shall go

    def options(self, **options: Any) -> EngineOptions:
        """Return options in full: what is not given is the plainest way to serve."""
        n_draft = options.get("n_draft", 0)
        drafts = options.pop("drafts", DraftSources() if n_draft and self.has_mtp else NO_DRAFTS)
        running = options.get("max_running", 32)
        longest = self.sizes.longest + max(self.sizes.tokens, 1) + 8
        given = {
            "n_draft": n_draft,
            "use_mtp": drafts.max_model_steps > 0,
            "n_draft_layers": max(len(self.loaded.weights.mtp), 1),
            "drafts": drafts,
            "max_running": running,
            "max_model_len": min(self.max_model_len, longest),
            "max_waiting": 4096,
            "prefill_tokens": 0,
            "block_size": BLOCK_SIZE,
            "max_top_k": self.max_top_k,
            "overlap": False,
            "prefix_caching": False,
        } | options
        given["prefill_tokens"] = given["prefill_tokens"] or given["max_model_len"]
        a_request = -(-given["max_model_len"] // given["block_size"])
        given.setdefault("n_blocks", running * a_request)
        return EngineOptions(**given)

    def uncaptured(self) -> Subject:
        """Return this subject on the same device, but for graphs: their work is launched again."""
        return self.over_device(EagerDevice(self.loaded.device))

    def over_device(self, device: Any) -> Subject:
        """Return this subject with its weights and kernels, but for what allocates and captures."""
        loaded = self.loaded._replace(device=device)
        return replace(self, loaded=loaded, make=lambda options: self.over(loaded, options))

    def tried(self, **sizes: Any) -> Subject:
        """Return this subject, tried with other sizes."""
        return replace(self, sizes=replace(self.sizes, **sizes))
