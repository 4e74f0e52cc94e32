"""A deployment whose workers are two ranks each says what one process says, and loses no rank
quietly."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest

from baton_testing.processes import wait_until

TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def sharded(start_deployment):
    with start_deployment("-k", "2", "--tp", "2") as deployment:
        deployment.wait_lines(3)
        yield deployment


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8, 512) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


def choices(deployment, many, **body):
    reply = deployment.complete(prompt=many, max_tokens=24, return_token_ids=True, **body)
    return sorted(reply["choices"], key=lambda c: c["index"])


def ranks_of(deployment, role: str) -> list[psutil.Process]:
    return psutil.Process(deployment.latest(role)["pid"]).children()


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}],
    ids=["greedy", "seeded"],
)
def test_tokens_and_logprobs_are_those_of_one_process(sharded, mixed, sampling):
    many = prompts(12, seed=3)
    ours = choices(sharded, many, logprobs=3, **sampling)
    plain = choices(mixed, many, logprobs=3, **sampling)
    assert [c["token_ids"] for c in ours] == [c["token_ids"] for c in plain]
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(
            a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], atol=TOLERANCE
        )


def test_rank_0_alone_speaks(sharded):
    def said() -> float:
        return sum(sharded.metric(role, "baton_tokens_total") for role in ("prefill", "decode"))

    sharded.wait_idle("prefill", "decode")
    before = said()
    made = choices(sharded, prompts(6, seed=4), temperature=0, ignore_eos=True)
    wanted = sum(len(c["token_ids"]) for c in made)
    wait_until(f"{wanted} tokens are counted", said, lambda now: now - before >= wanted)
    sharded.wait_idle("prefill", "decode")
    assert said() - before == wanted
    assert [line["role"] for line in sharded.lines].count("decode") == 1
    for role in ("prefill", "decode"):
        (rank,) = ranks_of(sharded, role)
        listening = {c.laddr.ip for c in rank.net_connections() if c.status == "LISTEN"}
        assert listening <= {"127.0.0.1"}, "the collective's own socket, and nothing of a worker"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_ends_with_its_rank_and_is_started_again(sharded, role):
    worker = sharded.latest(role)["pid"]
    (rank,) = ranks_of(sharded, role)
    rank.kill()
    sharded.wait_restarted(role, worker)
    assert not psutil.pid_exists(worker)
    assert len(ranks_of(sharded, role)) == 1
    assert sharded.complete(prompt="The license", max_tokens=4)["choices"]


def test_no_rank_outlives_its_worker(sharded, patience):
    worker = psutil.Process(sharded.latest("decode")["pid"])
    (rank,) = worker.children()
    worker.kill()
    assert rank.wait(timeout=patience) is None or not rank.is_running()
    sharded.wait_restarted("decode", worker.pid)
