"""While prefill computes one long prompt, decode computes short ones by itself: the same bits, as
many as the counters say, and again elsewhere when it is killed amid one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from baton_testing.processes import metric, wait_until

TOKEN_SECONDS = 0.1
"""The long prompt takes a minute and a half, many times what the others take on a free machine."""
LONG, SHORT, MIDDLE = 900, 20, 100
SIM = ("--engine", "sim", "-k", "2", "--sim", "decode_step_seconds=0.001",
       "--sim", f"prefill_token_seconds={TOKEN_SECONDS}", "--prefill-chunk", "16")  # fmt: skip
AT_ONCE = ("--engine", "sim", "-k", "0", "--sim", "decode_step_seconds=0",
           "--sim", "prefill_token_seconds=0")  # fmt: skip
HELP = ("--decode-prompt-chunk", "16", "--decode-prompts-behind", "100")
PROMPTS = "baton_gateway_prompts_total"


def body(n: int, length: int) -> dict[str, Any]:
    return {
        "model": "tiny-mtp",
        "prompt": [8 + (11 * n + 5 * i) % 500 for i in range(length)],
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": n,
        "logprobs": 2,
        "return_token_ids": True,
    }


@contextlib.contextmanager
def long_prompt(deployment, patience: float) -> Iterator[None]:
    """Have prefill compute a prompt for many seconds; its client leaves at the end."""
    asked = body(99, LONG) | {"stream": True}
    client = httpx.Client(timeout=patience, trust_env=False)
    leaves = threading.Event()

    def ask() -> None:
        url = f"{deployment.url}/v1/completions"
        with client.stream("POST", url, json=asked):
            leaves.wait(patience)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        deployment.wait_metric("gateway", PROMPTS, 1, worker_role="prefill")
        deployment.wait_at_least("prefill", "baton_prompt_tokens_total", 64)
        yield
    finally:
        leaves.set()
        thread.join(patience)
        client.close()


def asked_at_once(deployment, bodies: list[dict[str, Any]], patience: float) -> list[Any]:
    """Return each answer's only choice."""
    answers: dict[int, Any] = {}

    def ask(n: int) -> None:
        answers[n] = deployment.complete(**bodies[n])["choices"][0]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    return [answers[n] for n in range(len(bodies))]


def mixed_answers(start_deployment, bodies: list[dict[str, Any]]) -> list[Any]:
    """Return what a mixed worker says, which takes no time for it."""
    with start_deployment("--prefill", "0", "--decode", "0", "--mixed", "1", *AT_ONCE) as mixed:
        return [mixed.complete(**one)["choices"][0] for one in bodies]


def test_short_prompts_pass_a_long_one_by_way_of_decode_and_nothing_else_changes(
    start_deployment, patience
):
    bodies = [body(n, SHORT) for n in range(4)]
    wanted = mixed_answers(start_deployment, bodies)
    with start_deployment(*SIM, *HELP) as deployment:
        deployment.wait_lines(3)
        with long_prompt(deployment, patience):
            assert asked_at_once(deployment, bodies, patience) == wanted
            computed = deployment.metric("gateway", PROMPTS, worker_role="decode")
            assert computed == len(bodies)
            assert deployment.metric("gateway", PROMPTS, worker_role="prefill") == 1
            assert deployment.metric("decode", "baton_handoff_own_prompts_total") == computed
            assert deployment.metric("decode", "baton_prompt_tokens_total") == computed * SHORT
            assert deployment.metric("gateway", "baton_gateway_retries_total") == 0
        deployment.wait_metric("gateway", "baton_gateway_live_requests", 0)
        deployment.wait_metric("prefill", "baton_live_requests", 0)
        deployment.wait_metric("decode", "baton_handoff_places_taken", 0)
        assert [deployment.complete(**bodies[0])["choices"][0]] == wanted[:1]
        assert deployment.metric("gateway", PROMPTS, worker_role="prefill") == 2, "idle again"


def test_without_the_setting_decode_is_given_none(start_deployment, patience):
    bodies = [body(n, SHORT) for n in range(2)]
    quicker = tuple(word.replace(str(TOKEN_SECONDS), "0.002") for word in SIM)
    with start_deployment(*quicker, "--decode-prompts-behind", "100") as deployment:
        deployment.wait_lines(3)
        with long_prompt(deployment, patience):
            asked_at_once(deployment, bodies, patience)
        assert deployment.metric("gateway", PROMPTS, worker_role="decode") == 0
        assert deployment.metric("decode", "baton_handoff_own_prompts_total") == 0


def test_a_decode_killed_amid_a_prompt_costs_its_client_nothing(start_deployment, patience):
    asked = body(1, MIDDLE)
    wanted = mixed_answers(start_deployment, [asked])
    with start_deployment(*SIM, *HELP, "--decode", "2") as deployment:
        deployment.wait_lines(4)
        decodes = [line for line in deployment.lines if line["role"] == "decode"]
        with long_prompt(deployment, patience):
            answers: list[Any] = []

            def ask() -> None:
                answers.extend(asked_at_once(deployment, [asked], patience))

            client = threading.Thread(target=ask)
            client.start()

            def fed() -> list[float]:
                name = "baton_prompt_tokens_total"
                return [metric(line["metrics_url"], name) for line in decodes]

            seen = wait_until("decode computes it", fed, lambda tokens: max(tokens) >= 16)
            assert max(seen) < MIDDLE, "and is not done with it"
            computing = decodes[seen.index(max(seen))]
            os.kill(int(computing["pid"]), signal.SIGKILL)
            client.join(patience)
            assert answers == wanted
        assert deployment.metric("gateway", "baton_gateway_retries_total", how="from_start") >= 1
        assert deployment.metric("gateway", "baton_gateway_requests_total", outcome="error") == 0
        deployment.wait_restarted("decode", int(computing["pid"]))
        for role in ("prefill", "decode"):
            deployment.wait_metric(role, "baton_live_requests", 0)
            deployment.wait_metric(role, "baton_engine_kv_blocks_used", 0)
