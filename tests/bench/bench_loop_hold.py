"""How long a single request can hold the gateway's event loop: the longest time nobody else ran.

Each case answers, or takes in, one large request on a loop where a second task does nothing but ask
for its next turn; printed is the longest it had to wait, in CPU time of the loop's thread and by
the clock (which other processes lengthen), and the whole time of the request.

    python tests/bench/bench_loop_hold.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton_worker.gateway.answers.answer import GenerationAnswer
from baton_worker.gateway.answers.formats import format_for
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.output.client_queue import ClientQueue
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.request import Endpoint, GenerationRequest, ModelLimits
from baton_worker.gateway.serving.live_requests import Generation
from baton_worker.gateway.text.tokenizer import GatewayTokenizer, load_tokenizer
from baton_worker.records.scored import ScoredRow
from baton_worker.sampling import RequestParams, SamplingParams

Case = Callable[[], Awaitable[Any]]
CONTEXT_TOKENS = 32_768
_IDS = 300


def _request(endpoint: Endpoint, prompt: tuple[int, ...], **facts: Any) -> GenerationRequest:
    params = RequestParams(sampling=SamplingParams(), logprobs_k=facts.pop("logprobs_k", -1))
    values: dict[str, Any] = {
        "n": 1, "params": params, "stops": (), "stream": False,
        "include_usage": False, "return_token_ids": False,
    }  # fmt: skip
    return GenerationRequest(endpoint, (prompt,), **(values | facts))


def _rows(index: int, tokens: int, k: int) -> list[Delta]:
    """A choice's output as workers tell it, two tokens a row."""
    return [
        Delta(
            index, "ab", [at % _IDS, (at + 1) % _IDS], [-0.5, -0.25],
            [(at + i) % _IDS for i in range(2 * k)], [-1.0 - i / 7 for i in range(2 * k)], [], None,
        )
        for at in range(0, tokens, 2)
    ]  # fmt: skip


def _prompt_told(prompt: tuple[int, ...], k: int) -> Delta:
    rows = []
    for start in range(1, len(prompt), 2048):
        tokens = list(prompt[start : start + 2048])
        n = len(tokens)
        top = [i % _IDS for i in range(n * k)]
        rows.append(ScoredRow(start, tokens, 1 + k, [-0.5] * n, [1] * n, top, [-1.25] * (n * k)))
    return Delta(0, "", [], [], [], [], [], None, prompt=tuple(rows))


def _answer(tokenizer: GatewayTokenizer, request: GenerationRequest, deltas: list[Delta]) -> Case:
    async def receive() -> dict[str, Any]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    async def case() -> None:
        queue = ClientQueue(1 << 40)
        for delta in deltas:
            queue.put(delta)
        queue.close()
        form = format_for(request, tokenizer.vocabulary, "id", "bench", 1)
        await GenerationAnswer(Generation(request, queue, 0.0), form, lambda *_: None)(
            {}, receive, send
        )

    return case


def _answers(tokenizer: GatewayTokenizer) -> dict[str, Case]:
    prompt = tuple(i % _IDS for i in range(CONTEXT_TOKENS))
    output = [delta for i in range(8) for delta in _rows(i, 4096, 20)]
    cases = {}
    for stream, name in ((False, "whole"), (True, "stream")):
        chat = _request(Endpoint.CHAT, (1,), n=8, logprobs_k=20, stream=stream)
        cases[f"{name}: n=8, 4096 tokens, top 20"] = _answer(tokenizer, chat, output)
        scored = _request(Endpoint.CHAT, prompt, prompt_logprobs_k=20, stream=stream)
        told = [_prompt_told(prompt, 20)]
        cases[f"{name}: prompt_logprobs 20, 32k tokens"] = _answer(tokenizer, scored, told)
        echo = _request(Endpoint.COMPLETION, prompt, echo=True, logprobs_k=0, stream=stream)
        cases[f"{name}: echo, 32k tokens"] = _answer(tokenizer, echo, [_prompt_told(prompt, 0)])
    return cases


def _intakes(tokenizer: GatewayTokenizer) -> dict[str, Case]:
    limits = ModelLimits(CONTEXT_TOKENS, 512, 20)
    intake = Intake("bench", tokenizer, lambda: limits, 20)

    def taking(body: dict[str, Any]) -> Case:
        raw = json.dumps({"model": "bench"} | body).encode()

        async def case() -> None:
            endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETION
            with contextlib.suppress(ApiError):  # what is measured is how long a refusal takes, too
                await intake.generation(endpoint, raw)

        return case

    text = "the quick brown fox " * 6000
    ids = [i % _IDS for i in range(30_000)]
    words = [f"word{i}" + "x" * 200 for i in range(250)]
    return {
        "body: 120 kB of text": taking({"prompt": text}),
        "body: 16 prompts of 30,000 ids": taking({"prompt": [ids] * 16}),
        "body: one prompt of 1,000,000 ids": taking({"prompt": [7] * 1_000_000}),
        "body: 100,000 messages": taking(
            {"messages": [{"role": "user", "content": "a"}] * 100_000}
        ),
        "body: 500,000 lists in an unknown field": taking({"prompt": "a", "x": [[]] * 500_000}),
        "body: 250 bad words of 200 characters": taking({"prompt": "a", "bad_words": words}),
    }


def _model(folder: Path) -> GatewayTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    text = (Path(__file__).parent.parent.parent / "LICENSE").read_text()  # which no edit changes
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(folder)


async def _measure(case: Case) -> tuple[float, float, float]:
    """Return the longest hold, in CPU time and by the clock, and the request's time, in seconds."""
    longest_cpu = longest = 0.0
    done = False

    async def watch() -> None:
        nonlocal longest, longest_cpu
        before, before_cpu = time.perf_counter(), time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now, now_cpu = time.perf_counter(), time.thread_time()
            longest, before = max(longest, now - before), now
            longest_cpu, before_cpu = max(longest_cpu, now_cpu - before_cpu), now_cpu

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    started = time.perf_counter()
    await case()
    took = time.perf_counter() - started
    done = True
    await watcher
    return longest_cpu, longest, took


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _model(Path(folder))
        cases = _answers(tokenizer) | _intakes(tokenizer)
        gc.collect()
        gc.freeze()  # as the server does; what the cases hold is not what is measured
        for name, case in cases.items():
            measured = [uvloop.run(_measure(case)) for _ in range(3)]
            cpu, hold, took = (min(values) * 1e3 for values in zip(*measured, strict=True))
            rows.append({"case": name, "cpu_ms": cpu, "longest_hold_ms": hold, "took_ms": took})
            sys.stdout.write(
                f"  {name:<42} CPU {cpu:7.1f} ms, clock {hold:7.1f} of {took:6.0f} ms\n"
            )
    if options.json:
        options.json.write_text(json.dumps({"bench": "loop_hold", "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
