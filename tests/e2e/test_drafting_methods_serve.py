"""Each drafting method starts, serves a pair, and says what one plain process says (R21, R22)."""

from __future__ import annotations

import itertools
import random
import threading

import httpx
import pytest

TEXTS = [
    "The license is granted to you. The license is granted to",
    "copies of the Software, copies of the",
    "1. Definitions. 2. Grant. 3. Redistribution. 1. Definitions. 2.",
]


def texts_of(deployment, **body):
    reply = deployment.complete(
        prompt=TEXTS, max_tokens=40, return_token_ids=True, logprobs=2, **body
    )
    ordered = sorted(reply["choices"], key=lambda c: c["index"])
    return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in ordered]


@pytest.mark.parametrize("method", ["ngram", "mtp_ngram"])
def test_a_pair_says_what_a_plain_process_says(start_deployment, mixed, method):
    with start_deployment("-k", "4", "--speculative-method", method) as pair:
        pair.wait_lines(3)
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 5}):
            drafted, plain = texts_of(pair, **sampling), texts_of(mixed, **sampling)
            for (ids, logprobs), (want_ids, want_logprobs) in zip(drafted, plain, strict=True):
                assert ids == want_ids
                assert logprobs == pytest.approx(want_logprobs, abs=5e-5)
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)


def test_the_draft_count_changes_while_requests_run(pair, mixed, patience):
    sockets = [pair.latest(role)["control"] for role in ("prefill", "decode")]

    def order(socket, count):
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=patience) as client:
            body = {"num_speculative_tokens": count}
            return client.post("http://localhost/speculative", json=body)

    done = threading.Event()
    counts = set()

    def keep_changing():
        rng = random.Random(3)
        while not done.is_set():
            count = rng.randrange(6)
            for socket in sockets:
                assert order(socket, count).status_code == 202
            counts.add(count)

    changer = threading.Thread(target=keep_changing)
    changer.start()
    drafted = []
    try:
        for n in itertools.count():
            drafted.append(texts_of(pair, temperature=0.7, seed=n))
            if n >= 3 and (len(counts) > 2 or not changer.is_alive()):
                break
    finally:
        done.set()
        changer.join()
    assert len(counts) > 2
    for n, answers in enumerate(drafted):
        assert [a[0] for a in answers] == [a[0] for a in texts_of(mixed, temperature=0.7, seed=n)]
    for socket in sockets:
        assert order(socket, 2).is_success
