"""Detokenised pieces join to the full decoding, and U+FFFD shows only where bytes are invalid."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from baton_worker.gateway.answers.prompt_entries import PromptText
from baton_worker.gateway.text.detokenise import Detokeniser
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
    detokeniser = Detokeniser(Vocabulary(full, frozenset()).text_bytes)
    pieces = [detokeniser.feed([i]) for i in ids]
    assert "".join(pieces) == text
    assert detokeniser.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=60), st.data())
def test_invalid_bytes_show_exactly_where_decoding_at_once_would_show_them(raw, data):
    full, ids = cut(raw, data.draw)
    detokeniser = Detokeniser(Vocabulary(full, frozenset()).text_bytes)
    pieces = [detokeniser.feed([i]) for i in ids] + [detokeniser.flush()]
    assert "".join(pieces) == raw.decode("utf-8", "replace")


@given(TEXTS)
def test_byte_level_tokens_give_back_what_was_encoded(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokeniser = Detokeniser(tokenizer.vocabulary.text_bytes)
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
    detokeniser = Detokeniser(vocabulary.text_bytes)
    text = "".join(detokeniser.feed([i]) for i in ids) + detokeniser.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_marker_in_an_added_token_is_a_space():
    """Gemma's runs of spaces are added tokens, and stand in tokenizer.json with their markers."""
    tokenizer, pieces = sentencepiece()
    tokenizer.add_tokens([AddedToken("▁" * n, normalized=False) for n in (2, 5)])
    tokenizer.add_special_tokens(["<a▁name>"])
    added = {i: (t.content, t.special) for i, t in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = read_vocabulary(DECODER, pieces, added)
    ids = [2, *added, 4]
    for skip in (True, False):
        detokeniser = Detokeniser(vocabulary.as_text(skip_special=skip).text_bytes)
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
    detokeniser = Detokeniser(vocabulary.text_bytes)
    assert detokeniser.feed([1, 0, 1]) == "aa"
    assert (vocabulary.names[0], vocabulary.names[2]) == ("</s>", "bytes:\\xe4\\xbd")
    told = [json.loads(vocabulary.entries[i] % b"-0.5") for i in (0, 2)]
    assert [entry["token"] for entry in told] == vocabulary.names.of([0, 2])
    assert [entry["bytes"] for entry in told] == [[60, 47, 115, 62], [0xE4, 0xBD]]


def test_a_padded_id_adds_nothing_and_breaks_nothing():
    vocabulary = Vocabulary({0: b"a"}, frozenset())
    assert Detokeniser(vocabulary.text_bytes).feed([0, 99, 0]) == "aa"
    assert vocabulary.names[99] == ""


def test_a_decoder_that_replaces_by_a_pattern_is_refused_by_name():
    steps = [{"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}, {"type": "Fuse"}]
    decoder = {"type": "Sequence", "decoders": [*steps, {"type": "ByteFallback"}]}
    with pytest.raises(UnsupportedTokenizerError, match="replaces by a regular expression"):
        read_vocabulary(decoder, {"a": 0}, {})
