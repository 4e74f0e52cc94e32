"""Detokenised pieces join to the full decoding, and U+FFFD shows only where bytes are invalid."""

import json
from itertools import chain, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from baton_worker.gateway.answers.prompt_entries import PromptText
from baton_worker.gateway.text.vocabulary import (
    UnsupportedTokenizerError,
    Vocabulary,
    read_vocabulary,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def cut(data, draw):
    """Bytes in pieces of 1 to 5: a vocabulary of them, and the ids in order."""
    pieces, at = [], 0
    while at < len(data):
        n = draw(st.integers(1, 5))
        pieces.append(data[at : at + n])
        at += n
    return dict(enumerate(pieces)), list(range(len(pieces)))


@given(TEXTS, st.data())
def test_pieces_join_to_the_text_and_no_piece_has_a_broken_character(text, data):
    full, ids = cut(text.encode(), data.draw)
    detokeniser = Vocabulary(full, frozenset()).detokeniser()
    pieces = [detokeniser.feed([i]) for i in ids]
    assert "".join(pieces) == text
    assert detokeniser.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=60), st.data())
def test_invalid_bytes_show_exactly_where_decoding_at_once_would_show_them(raw, data):
    full, ids = cut(raw, data.draw)
    detokeniser = Vocabulary(full, frozenset()).detokeniser()
    pieces = [detokeniser.feed([i]) for i in ids] + [detokeniser.flush()]
    assert "".join(pieces) == raw.decode("utf-8", "replace")


@given(TEXTS)
def test_byte_level_tokens_give_back_what_was_encoded(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokeniser = tokenizer.vocabulary.detokeniser()
    assert "".join(detokeniser.feed([i]) for i in ids) + detokeniser.flush() == text


def sentencepiece():
    """A sentencepiece-style tokenizer: a marker for spaces, byte tokens for the rest."""
    pieces = ["<unk>", "<s>", "▁the", "▁", "t", "h", "e", "▁fox", "▁th", "th", "▁f", "fo", "▁fo"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, vocabulary


FIRST_BYTE = 13
N_PIECES = FIRST_BYTE + 256
DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


@given(st.lists(st.integers(2, 12) | st.sampled_from("é你🙂").map(str.encode), max_size=20))
def test_sentencepiece_tokens_and_byte_tokens_decode_as_the_library_does(items):
    tokenizer, pieces = sentencepiece()
    ids = []
    for item in items:
        ids += [13 + byte for byte in item] if isinstance(item, bytes) else [item]
    vocabulary = read_vocabulary(DECODER, pieces, {1: ("<s>", True)})
    detokeniser = vocabulary.detokeniser()
    text = "".join(detokeniser.feed([i]) for i in ids) + detokeniser.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def runs(ids):
    """Ids in runs of byte tokens and of others; what the vocabulary lacks ends none."""
    known = [i for i in ids if i < N_PIECES]
    return [list(run) for _, run in groupby(known, lambda i: i >= FIRST_BYTE)]


def told_and_broken(run):
    """A run of byte tokens up to the last character before its first wrong byte, and the rest."""
    if run[0] < FIRST_BYTE:
        return [run]
    data = bytes(i - FIRST_BYTE for i in run)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return [run[: error.start], run[error.start :]]
    return [run]


BYTES = st.sampled_from([b"\xe4\xbd", b"\xff", b"\xc3", b"a", *map(str.encode, "é你🙂")])


@given(st.lists(st.integers(2, 12) | BYTES | st.just(100_000), max_size=20))
def test_a_run_of_bytes_that_is_no_text_is_broken_as_in_the_library_behind_what_was_told(items):
    tokenizer, pieces = sentencepiece()
    ids = []
    for item in items:
        ids += [FIRST_BYTE + b for b in item] if isinstance(item, bytes) else [item]
    found = read_vocabulary(DECODER, pieces, {1: ("<s>", True)}).detokeniser()
    text = "".join([found.feed([i]) for i in ids]) + found.flush()
    parts = [told_and_broken(run) for run in runs(ids)]
    decoded = tokenizer.decode_batch(list(chain(*parts)), skip_special_tokens=False)
    assert text == "".join(decoded)
    assert text == found.feed(ids) + found.flush(), "deltas of many tokens tell the same"
    if all(len(of_run) == 1 or not of_run[0] for of_run in parts):
        assert text == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_ends_a_run_of_bytes_where_it_is_text(skip):
    tokenizer, pieces = sentencepiece()
    tokenizer.add_special_tokens(["<s>"])
    ids = [FIRST_BYTE + byte for byte in "é".encode()]
    ids.insert(1, 1)
    vocabulary = read_vocabulary(DECODER, pieces, {1: ("<s>", True)})
    found = vocabulary.as_text(skip_special=skip).detokeniser()
    text = "".join([found.feed([i]) for i in ids]) + found.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == ("é" if skip else "\ufffd<s>\ufffd")


def test_a_marker_in_an_added_token_is_a_space():
    """Gemma's runs of spaces are added tokens, and stand in tokenizer.json with their markers."""
    tokenizer, pieces = sentencepiece()
    tokenizer.add_tokens([AddedToken("▁" * n, normalized=False) for n in (2, 5)])
    tokenizer.add_special_tokens(["<a▁name>"])
    added = {i: (t.content, t.special) for i, t in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = read_vocabulary(DECODER, pieces, added)
    ids = [2, *added, 4]
    for skip in (True, False):
        detokeniser = vocabulary.as_text(skip_special=skip).detokeniser()
        text = "".join(detokeniser.feed([i]) for i in ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert vocabulary.names[min(added)] == "  "


def prompt_text(vocabulary, ids):
    found = PromptText(ids, vocabulary)
    assert sum(found.find()) == len(ids)
    assert (len(found.offsets), found.n_characters) == (len(ids), len(found.text))
    return found


STRIPS = [
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    decoders.Metaspace(prepend_scheme="first"),
]


@pytest.mark.parametrize("decoder", STRIPS)
@given(st.text("th ", max_size=12), st.booleans())
def test_a_prompt_is_echoed_without_the_space_that_encoding_puts_before_it(decoder, text, skip):
    tokenizer, pieces = sentencepiece()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoder
    document = json.loads(tokenizer.to_str())["decoder"]
    ids = tokenizer.encode(text).ids
    vocabulary = read_vocabulary(document, pieces, {1: ("<s>", True)})
    found = prompt_text(vocabulary.as_text(skip_special=skip), [1, *ids])
    before = "" if skip else "<s> " if text else "<s>"
    assert found.text == before + text
    assert found.offsets[-1] <= len(found.text)


@pytest.mark.parametrize("decoder", [DECODER, {"type": "Metaspace", "prepend_scheme": "never"}])
def test_a_prompt_that_begins_with_a_space_of_its_own_keeps_it(decoder):
    vocabulary = read_vocabulary(decoder | {"replacement": "▁"}, {"▁": 0, "a": 1}, {})
    found = prompt_text(vocabulary, [0, 1, 0])
    assert (found.text, found.offsets) == (" a ", [0, 1, 2])


@given(st.binary(max_size=30), st.data())
def test_a_prompt_that_ends_within_a_character_is_told_in_as_many_characters(raw, data):
    full, ids = cut(raw, data.draw)
    assert prompt_text(Vocabulary(full, frozenset()), ids).text == raw.decode("utf-8", "replace")


def test_special_tokens_add_no_text_but_have_a_name():
    vocabulary = Vocabulary({0: b"</s>", 1: b"a", 2: b"\xe4\xbd"}, frozenset({0}))
    detokeniser = vocabulary.detokeniser()
    assert detokeniser.feed([1, 0, 1]) == "aa"
    assert (vocabulary.names[0], vocabulary.names[2]) == ("</s>", "bytes:\\xe4\\xbd")
    told = [json.loads(vocabulary.entries[i] % b"-0.5" + b"}") for i in (0, 2)]
    assert [entry["token"] for entry in told] == vocabulary.names.of([0, 2])
    assert [entry["bytes"] for entry in told] == [[60, 47, 115, 62], [0xE4, 0xBD]]


def test_a_padded_id_adds_nothing_and_breaks_nothing():
    vocabulary = Vocabulary({0: b"a"}, frozenset())
    assert vocabulary.detokeniser().feed([0, 99, 0]) == "aa"
    assert vocabulary.names[99] == ""


def test_a_decoder_that_replaces_by_a_pattern_is_refused_by_name():
    steps = [{"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}, {"type": "Fuse"}]
    decoder = {"type": "Sequence", "decoders": [*steps, {"type": "ByteFallback"}]}
    with pytest.raises(UnsupportedTokenizerError, match="replaces by a regular expression"):
        read_vocabulary(decoder, {"a": 0}, {})
