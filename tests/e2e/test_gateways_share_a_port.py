"""Several gateways on one port: the kernel spreads connections, and any of them may die."""

from __future__ import annotations

import psutil

from baton_testing.processes import PATIENCE_SECONDS, metric

FAST = ("--engine", "sim", "--sim", "decode_step_seconds=0.002", "--sim", "seed=5")
MOST_ASKED = 200
"""One gateway alone is given so many connections in a row once in 2^200 times."""


def test_each_gateway_serves_and_one_that_dies_leaves_the_port_to_the_other(start_deployment):
    with start_deployment("--gateways", "2", *FAST, "--curve") as deployment:
        deployment.wait_lines(4)
        deployment.wait_usable()
        gateways = [line for line in deployment.lines if line["role"] == "gateway"]
        assert len({line["url"] for line in gateways}) == 1
        for line in gateways:
            ask_until_it_serves(deployment, line)
        dead, left = gateways
        process = psutil.Process(dead["pid"])
        process.kill()
        process.wait(PATIENCE_SECONDS)  # no connection is given to it any more
        ask_until_it_serves(deployment, left)


def ask_until_it_serves(deployment, line) -> None:
    """Every answer is whole; 503 is for one on a busy machine, which gave its workers up."""
    before = served(line)
    for _ in range(MOST_ASKED):
        reply = deployment.post("/v1/completions", prompt="The licensor", max_tokens=2)
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 200:
            assert reply.json()["usage"]["completion_tokens"] == 2
        if served(line) > before:
            return
    raise AssertionError(f"{line} was given none of {MOST_ASKED} connections")


def served(line) -> float:
    return metric(line["metrics_url"], "baton_gateway_completion_tokens_total")
