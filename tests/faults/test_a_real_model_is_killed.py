"""The example model, greedy and sampled, while a worker of each role is killed: the same text.

What the simulated engine cannot show: attention over handed-over KV, drafts of a real layer, and
sampling with penalties all go on as if undisturbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_faults.fleet import HTTP, MODEL, Fleet, fleet
from baton_faults.load import Ask, Clients, Load, Log
from baton_faults.steady import assert_right, assert_whole_at_once, wait_served

pytestmark = pytest.mark.e2e

N_TEXTS, N_TOKENS = 8, 60
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05},
]


def asks() -> list[Ask]:
    found = []
    for number in range(N_TEXTS):
        extra = WAYS[number % len(WAYS)] | {"seed": number}
        found.append(Ask((10 + number, 80, 33, 200 + number), N_TOKENS, tuple(extra.items())))
    return found


def undisturbed(running: Fleet, ask: Ask) -> tuple[int, ...]:
    body = ask.body(MODEL.name) | {"stream": False, "include_step_details": False}
    reply = HTTP.post(f"{running.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return tuple(reply.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize("share_kv", [False, True], ids=["kv travels", "kv is read in place"])
def test_a_real_models_text_is_the_same_when_its_workers_die(
    tmp_path: Path, share_kv: bool
) -> None:
    with fleet(
        tmp_path, prefill=2, decode=2, num_speculative_tokens=2, share_kv=share_kv
    ) as running:
        some = asks()
        texts = {ask: undisturbed(running, ask) for ask in some}
        clients = Clients(running.url, MODEL.name, texts.__getitem__, Log())
        load = Load(clients, lambda n: some[n % N_TEXTS], n_open=N_TEXTS, at_least=40)
        load.start()
        for name in ("decode-0", "prefill-0"):
            wait_served(load, 8)
            running.kill(name)
            running.start(name)
            running.wait_usable()
        load.finish()
        assert_right(running, clients.log)
        assert_whole_at_once(load)
        assert running["gateway"].metric("baton_gateway_retries_total") > 0
        running.wait_empty()
