"""`/detokenize` makes of an answer's tokens the text that the answer had, stream or not.

Of byte tokens that are no UTF-8 too, but for characters that were told before the first wrong one.
"""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models

from baton_worker.gateway.text.tokenizer import load_tokenizer

EOS, WORD, FIRST_BYTE = 1, 2, 3
EACH = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokens = ["<s>", "</s>", "▁word", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    made = Tokenizer(model)
    made.add_special_tokens(tokens[:2])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return load_tokenizer(folder)


def byte_tokens(data):
    return [FIRST_BYTE + byte for byte in data]


def answers():
    """Runs that are text, or wrong from their first character on, with words between."""
    rng = random.Random(4)
    whole = [character.encode() for character in "aé你🙂"]
    wrong = [b"\xff", b"\xe4\xbd", b"\xf0\x9f\x99a", b"\x80\xe4\xbd\xa0", b"\xc3(", b"\xff\xe2\x82"]
    for _ in range(EACH):
        tokens = []
        for _ in range(rng.randint(1, 4)):
            is_text = rng.random() < 0.5
            data = b"".join(rng.choices(whole, k=2)) if is_text else rng.choice(wrong)
            tokens += [*byte_tokens(data), WORD]
        yield tokens + byte_tokens(rng.choice(wrong))


def texts(client, tokens):
    """The text of a whole answer, of a stream's chunks, and of `/detokenize`."""
    asked = {"prompt": tokens, "max_tokens": len(tokens) + 1, "logprobs": 0}
    whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    body = client.post("/v1/completions", json=asked | {"stream": True}).text
    chunks = [json.loads(part.removeprefix("data: ")) for part in body.split("\n\n")[:-2]]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    made = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return whole, streamed, made


@pytest.mark.parametrize("per_step", [1, 3])
def test_an_answer_is_the_text_of_its_tokens(start_gateway, per_step):
    gateway = start_gateway(lambda submit: [*submit.prompt_token_ids, EOS], per_step=per_step)
    with gateway.http() as client:
        for tokens in answers():
            whole, streamed, made = texts(client, tokens)
            assert whole == streamed == made
            assert "\ufffd" in made


def test_what_was_told_before_a_wrong_byte_is_kept(start_gateway):
    gateway = start_gateway(lambda submit: [*submit.prompt_token_ids, EOS], per_step=1)
    with gateway.http() as client:
        found = texts(client, [*byte_tokens("é你".encode() + b"\xff" + "é".encode()), WORD])
    assert found == ("é你" + 3 * "\ufffd" + " word",) * 2 + (8 * "\ufffd" + " word",)
