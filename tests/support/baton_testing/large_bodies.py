"""Request bodies as large as a gateway takes, each of as much work as its bytes can be: for tests
that count what is done in one go, and for the benchmark that times it.
"""

from __future__ import annotations

from collections.abc import Iterator

MEBIBYTE = 1 << 20
_MODEL = b'{"model":"tiny"'
NAMES = (
    "ids of 1 digit",
    "ids of 3 digits",
    "ids with spaces",
    "ids behind spaces",
    "ids, the last no id",
    "ids outside the vocabulary",
    "one number without end",
    "2,000 lists of ids",
    "two long lists of ids",
    "empty lists",
    "ids for many choices",
    "text",
    "text of escapes",
    "text of surrogate pairs",
    "texts of one letter",
    "2,000 texts",
    "8,000 messages",
    "8,000 messages of text",
    "15,000 parts",
    "messages with lists beside",
    "a message of many fields",
    "lists in unknown fields",
    "many fields",
    "deep lists",
    "logit_bias",
    "stop",
    "bad_words",
    "stop_token_ids",
    "spaces",
)
"""Of all of them: they are 100 MB, which nobody needs for a list of tests."""


def _repeat(head: bytes, piece: bytes, tail: bytes, n_bytes: int, most: int = 1 << 30) -> bytes:
    n = (n_bytes - len(head) - len(tail)) // (len(piece) + 1)
    return head + b",".join([piece] * min(n, most)) + tail


def _list(piece: bytes, n: int) -> bytes:
    return b"[" + b",".join([piece] * n) + b"]"


def large_bodies(n_bytes: int = 4 * MEBIBYTE) -> Iterator[tuple[str, bytes]]:
    """Yield each body with its name; none has more than `n_bytes`, and most have as many."""
    prompt, messages = _MODEL + b',"prompt":', _MODEL + b',"messages":['
    yield from _of_ids(prompt, n_bytes)
    yield from _of_text(prompt, n_bytes)
    yield from _of_messages(messages, n_bytes)
    yield from _of_other_fields(prompt + b'"a"', n_bytes)


def _of_ids(prompt: bytes, n_bytes: int) -> Iterator[tuple[str, bytes]]:
    yield "ids of 1 digit", _repeat(prompt + b"[", b"7", b"]}", n_bytes)
    yield "ids of 3 digits", _repeat(prompt + b"[", b"300", b"]}", n_bytes)
    yield "ids with spaces", _repeat(prompt + b"[", b" 300 ", b"]}", n_bytes)
    yield "ids behind spaces", prompt + b"[" + b" " * (n_bytes - 60) + b"7]}"
    yield "ids, the last no id", _repeat(prompt + b"[", b"300", b",7.5]}", n_bytes)
    yield "ids outside the vocabulary", _repeat(prompt + b"[", b"9999999", b"]}", n_bytes)
    yield "one number without end", prompt + b"[" + b"1" * (n_bytes - 60) + b"]}"
    yield "2,000 lists of ids", _repeat(prompt + b"[", _list(b"7", 1000), b"]}", n_bytes, 2000)
    half = (n_bytes - 60) // 4
    yield "two long lists of ids", prompt + _list(_list(b"7", half), 2) + b"}"
    yield "empty lists", _repeat(prompt + b"[", b"[]", b"]}", n_bytes)
    yield "ids for many choices", _repeat(prompt + b"[", b"300", b'],"n":128}', n_bytes)


def _of_text(prompt: bytes, n_bytes: int) -> Iterator[tuple[str, bytes]]:
    room = n_bytes - 60
    yield "text", prompt + b'"' + b"a " * (room // 2) + b'"}'
    yield "text of escapes", prompt + b'"' + b"\\n" * (room // 2) + b'"}'
    yield "text of surrogate pairs", prompt + b'"' + b"\\ud83d\\ude00" * (room // 12) + b'"}'
    yield "texts of one letter", _repeat(prompt + b"[", b'"a"', b"]}", n_bytes, 60_000)
    yield "2,000 texts", _repeat(prompt + b"[", b'"' + b"ab " * 600 + b'"', b"]}", n_bytes, 2000)


def _of_messages(messages: bytes, n_bytes: int) -> Iterator[tuple[str, bytes]]:
    end = b"]}"
    short = b'{"role":"user","content":"a"}'
    yield "8,000 messages", _repeat(messages, short, end, n_bytes, 8000)
    long = b'{"role":"user","content":"' + b"x" * 480 + b'"}'
    yield "8,000 messages of text", _repeat(messages, long, end, n_bytes, 8000)
    parts = _list(b'{"type":"text","text":"a"}', 15_000)
    yield "15,000 parts", messages + b'{"role":"user","content":' + parts + b"}" + end
    others = b'{"role":"user","content":"a","x":' + _list(b"[]", 40_000) + b"}"
    yield "messages with lists beside", _repeat(messages, others, end, n_bytes)
    keys = b",".join(b'"k%d":1' % i for i in range(60_000))
    yield "a message of many fields", messages + b'{"role":"user","content":"a",' + keys + b"}]}"


def _of_other_fields(begun: bytes, n_bytes: int) -> Iterator[tuple[str, bytes]]:
    lists = _list(b"[]", 43_000)
    yield (
        "lists in unknown fields",
        begun
        + b"".join(b',"x%d":%b' % (i, lists) for i in range(n_bytes // len(lists) - 1))
        + b"}",
    )
    yield "many fields", begun + b"".join(b',"k%d":1' % i for i in range(60_000)) + b"}"
    yield "deep lists", begun + b',"x":' + b"[" * 60_000 + b"]" * 60_000 + b"}"
    biases = b",".join(b'"%d":1' % i for i in range(11_000))
    yield "logit_bias", begun + b',"logit_bias":{' + biases + b"}}"
    texts = b"[" + b",".join(b'"%d"' % i for i in range(14_000)) + b"]"
    yield "stop", begun + b',"stop":' + texts + b"}"
    yield "bad_words", begun + b',"bad_words":' + texts + b"}"
    yield "stop_token_ids", begun + b',"stop_token_ids":' + _list(b"7", 65_000) + b"}"
    yield "spaces", begun + b" " * (n_bytes - 60) + b"}"
