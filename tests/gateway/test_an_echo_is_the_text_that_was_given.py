"""A prompt that was given as text is echoed to the letter, with offsets into that text.

Clients cut off as many characters as they sent. What the tokens decode to is another text where a
normaliser rewrites it, where decoding takes a space away, and where it has special tokens.
"""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton_worker.gateway.answers.prompt_entries import PromptText
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.request import Endpoint, ModelLimits, PromptAsText
from baton_worker.gateway.text.tokenizer import GatewayTokenizer, load_tokenizer

TEXT = "/v1/completions"
TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-mtp"
SPECIAL = ["<s>", "</s>", "<|user|>"]
REWRITTEN = "<|R|>"
"""A token that is added, and stands for what the normaliser makes of it."""
PARTS = [" ", "  ", "\n", "a", "fox", "é", "e\u0301", "你", "🙂", "A", REWRITTEN, *SPECIAL]
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("".join)


def byte_level(post_processor):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "Ġa"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [("Ġ", "a")])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = post_processor
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(normalizer=None, pre_tokenizer=None, *steps, of_all=()):
    tokens = [*SPECIAL, "▁", "▁a", "a", "f", "o", "x", "A", "\n"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [*steps, decoders.ByteFallback(), decoders.Fuse(), *of_all]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BOTH_ENDS = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
)
KINDS = {
    "bytes": byte_level(processors.ByteLevel(trim_offsets=False)),
    "bytes between ends": byte_level(BOTH_ENDS),
    "bytes, trimmed": byte_level(processors.ByteLevel(trim_offsets=True)),
    "bytes between ends, trimmed": byte_level(
        processors.Sequence([processors.ByteLevel(trim_offsets=True), BOTH_ENDS])
    ),
    "bytes between ends that are counted": byte_level(
        processors.Sequence([BOTH_ENDS, processors.ByteLevel(trim_offsets=True)])
    ),
    "prepended space": sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Replace("▁", " "),
        of_all=[decoders.Strip(" ", 1, 0)],
    ),
    "Metaspace": sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    ),
    "lower case": sentencepiece(
        normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Replace("▁", " "),
    ),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    found = {}
    for name, tokenizer in KINDS.items():
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.add_tokens([REWRITTEN])
        folder = tmp_path_factory.mktemp("kind")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        found[name] = load_tokenizer(folder)
    return found


def told(tokenizer, ids, given=None):
    found = PromptText(ids, tokenizer.vocabulary, given)
    assert sum(found.find()) == len(ids)
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=PROMPTS)
def test_any_tokenizers_echo_is_the_text_and_offsets_are_where_its_tokens_stand(
    loaded, kind, prompt
):
    tokenizer = loaded[kind]
    ids, offsets = tokenizer.encode_with_offsets(prompt, add_special_tokens=True)
    assert ids == tokenizer.encode(prompt, add_special_tokens=True)
    echo = told(tokenizer, ids, PromptAsText(prompt, offsets))
    assert (echo.text, echo.n_characters) == (prompt, len(prompt))
    assert b"".join(echo.json.pieces()).decode() == json.dumps(prompt, ensure_ascii=False)
    assert echo.offsets == sorted(echo.offsets)
    assert echo.offsets[-1] <= len(prompt)
    decoded = told(tokenizer, ids)
    if tokenizer.decode(ids, skip_special=True) == prompt:
        assert (decoded.text, decoded.offsets) == (prompt, echo.offsets), "no text need be kept"


@pytest.mark.parametrize("kind", ["Metaspace", "prepended space"])
def test_a_text_that_begins_with_spaces_keeps_them_all(loaded, kind):
    tokenizer = loaded[kind]
    for prompt in (" a", "  a", "a", "   "):
        ids, offsets = tokenizer.encode_with_offsets(prompt, add_special_tokens=True)
        assert told(tokenizer, ids, PromptAsText(prompt, offsets)).text == prompt


@pytest.mark.parametrize("kind", ["prepended space", "lower case"])
def test_an_added_token_reads_as_its_library_writes_it(loaded, kind):
    tokenizer = loaded[kind]
    prompt = "a <|R|>a" if kind == "prepended space" else "a<|r|>a"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert told(tokenizer, ids).text == tokenizer.decode(ids) == prompt
    assert "".join(tokenizer.vocabulary.names.of(ids)).strip() == prompt


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "between ends" in kind])
def test_what_a_tokenizer_puts_around_a_text_takes_no_characters_of_it(loaded, kind):
    ids, offsets = loaded[kind].encode_with_offsets("f a", add_special_tokens=True)
    names = loaded[kind].vocabulary.names.of(ids)
    assert (names, list(offsets)) == (["<s>", "f", " a", "</s>"], [0, 0, 1, 3])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("skip", [False, True])
def test_clients_get_the_text_that_they_sent(start_gateway, stream, skip):
    prompts = ["<|user|> a fox<|assistant|>", "naïve </s> 你好", "the quick"]
    asked = {"model": "tiny", "prompt": prompts, "max_tokens": 3, "echo": True, "logprobs": 1}
    asked |= {"n": 2, "stream": stream, "skip_special_tokens": skip}
    texts, offsets, names = ([""] * 6, [[] for _ in range(6)], [[] for _ in range(6)])
    with start_gateway().http() as client:
        body = client.post(TEXT, json=asked)
    answers = [body.text] if not stream else body.text.split("\n\n")[:-2]
    for answer in answers:
        for choice in json.loads(answer.removeprefix("data: "))["choices"]:
            index = choice["index"]
            texts[index] += choice["text"]
            offsets[index] += choice["logprobs"]["text_offset"]
            names[index] += choice["logprobs"]["tokens"]
    for index, text in enumerate(texts):
        prompt = prompts[index // 2]
        assert text.startswith(prompt)
        told_of_prompt = [
            (at, name)
            for at, name in zip(offsets[index][1:], names[index][1:], strict=True)
            if at < len(prompt)
        ]
        assert len(told_of_prompt) > 1
        assert all(name[:6] == "bytes:" or text.startswith(name, at) for at, name in told_of_prompt)


def test_long_texts_come_back_too(start_gateway):
    prompt = "<|user|>  the 你 " * 5_000
    with start_gateway(info={"max_model_len": 100_000}).http() as client:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 0, "echo": True}
        assert client.post(TEXT, json=asked).json()["choices"][0]["text"] == prompt


@pytest.fixture
def threads_that_find_places(monkeypatch):
    found, find = [], GatewayTokenizer.encode_with_offsets

    def noted(*args, **kwargs):
        found.append(threading.current_thread())
        return find(*args, **kwargs)

    monkeypatch.setattr(GatewayTokenizer, "encode_with_offsets", noted)
    return found


async def judged(prompt, context_tokens):
    tokenizer = load_tokenizer(TINY)
    limits = ModelLimits(context_tokens, tokenizer.vocabulary.size, 20)
    asked = {"prompt": prompt, "echo": True, "max_tokens": 1, "skip_special_tokens": False}
    intake = Intake("tiny", tokenizer, lambda: limits, 20)
    return await intake.generation(Endpoint.COMPLETION, json.dumps(asked).encode())


@pytest.mark.parametrize("context_tokens", [16, 4_096])
def test_a_text_that_is_refused_as_too_long_has_no_places_looked_for(
    threads_that_find_places, context_tokens
):
    with pytest.raises(ApiError, match=f"maximum context length is {context_tokens} "):
        asyncio.run(judged(["Z " * context_tokens, "fits"], context_tokens))
    assert not threads_that_find_places


@pytest.mark.parametrize("texts", [["Zq~ " * 1_200], ["Zq~ " * 12] * 100], ids=["one", "many"])
def test_texts_that_take_ms_have_their_places_found_off_the_loop(threads_that_find_places, texts):
    assert len(asyncio.run(judged(texts, 1 << 17)).given_texts) == len(texts)
    assert len(threads_that_find_places) == len(texts)
    assert threading.main_thread() not in threads_that_find_places
