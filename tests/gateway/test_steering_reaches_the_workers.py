"""`min_p`, `logit_bias` and `bad_words` arrive at the worker as token ids."""

from baton_worker.gateway.intake.logit_bias import bad_word_tokens
from baton_worker.messages import Submit

BODY = {
    "model": "tiny",
    "prompt": "the fox",
    "min_p": 0.25,
    "logit_bias": {"17": -100, "5": 2.5},
    "bad_words": ["fox", " lazy dog", "fox"],
}


def test_a_submit_carries_them(start_gateway, tokenizer):
    gateway = start_gateway()
    with gateway.http() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    ((_, submit),) = gateway.link.sent(Submit)
    sampling = submit.sampling
    assert sampling.min_p == 0.25
    assert sampling.logit_bias == ((5, 2.5), (17, -100.0))
    texts = {tokenizer.decode(word) for word in sampling.bad_words}
    assert texts == {"fox", " fox", "lazy dog", " lazy dog"}


def test_each_word_is_forbidden_at_the_start_and_behind_a_space():
    ids = {"damn": [1, 2], " damn": [3], "x": [4], " x": [9, 4]}
    assert bad_word_tokens(("damn", " x"), ids.__getitem__) == ((1, 2), (3,), (4,), (9, 4))


def test_without_them_a_submit_says_nothing_of_them(start_gateway):
    gateway = start_gateway()
    with gateway.http() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "the fox"})
    ((_, submit),) = gateway.link.sent(Submit)
    assert (submit.sampling.min_p, submit.sampling.logit_bias, submit.sampling.bad_words) == (
        0.0,
        (),
        (),
    )
