"""KV is shared within one salt only: its digest goes to workers that honour it, else nobody."""

import pytest

from baton_worker.messages import FEATURES, Submit
from baton_worker.sampling import CACHE_SALT

TEXT = {"model": "tiny", "prompt": "a stop here"}


def salts_of(gateway, *salts, **more):
    with gateway.http() as client:
        for salt in salts:
            body = TEXT | more | {"cache_salt": salt}
            assert client.post("/v1/completions", json=body).status_code == 200
    return [submit.cache_salt for _, submit in gateway.link.sent(Submit)]


def test_each_salt_is_one_of_its_own_and_stays_the_clients_secret(start_gateway):
    none, first, second, again = salts_of(start_gateway(), None, "tenant one", "ü", "tenant one")
    assert none == b""
    assert first == again
    assert len({none, first, second}) == 3
    assert b"tenant" not in first
    assert len(first) == len(second) == 16


def test_every_choice_carries_it_in_chats_too(start_gateway):
    gateway = start_gateway()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": 2}
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=body | {"cache_salt": "x"})
    salts = [submit.cache_salt for _, submit in gateway.link.sent(Submit)]
    assert salts == salts_of(start_gateway(), "x") * 2


@pytest.mark.parametrize("salt", ["", "x" * 1025, 3, ["x"]])
def test_what_is_no_salt_is_refused_by_name(start_gateway, salt):
    with start_gateway().http() as client:
        answer = client.post("/v1/completions", json=TEXT | {"cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_a_worker_that_would_ignore_it_does_not_get_the_request(start_gateway):
    old = {"features": tuple(f for f in FEATURES if f != CACHE_SALT)}
    gateway = start_gateway(info=old)
    with gateway.http() as client:
        assert client.post("/v1/completions", json=TEXT).status_code == 200
        answer = client.post("/v1/completions", json=TEXT | {"cache_salt": "x"})
    assert answer.status_code == 503
    assert "cache_salt" in answer.json()["error"]["message"]
    assert [submit.cache_salt for _, submit in gateway.link.sent(Submit)] == [b""]
