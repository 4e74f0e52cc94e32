"""`Submit` and `HandoffState` stay flat maps that the version before reads, and reads back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_worker.messages import Command, DecodeTarget, DraftScores, HandoffState, Submit
from baton_worker.sampling import (
    LOGPROB_PARAMS,
    REQUEST_FEATURES,
    LogprobParams,
    RequestParams,
    SamplingParams,
)

REQUIRED = {
    Submit: {"type", "handle", "attempt", "prompt_token_ids", "sampling"},
    HandoffState: {
        "handle", "attempt", "model_fingerprint", "dtype", "n_layers", "kv_heads", "block_size",
        "head_dim", "n_cached", "prompt_token_ids", "sampling", "logprobs_k", "first_token",
    },
}  # fmt: skip
"""What the first version's readers cannot do without."""
ASKED: dict[str, Any] = {
    "prompt_token_ids": (1, 2),
    "sampling": SamplingParams(seed=7, temperature=0.5),
    "logprobs_k": 3,
    "logprobs": LogprobParams(processed=True),
    "priority": -4,
    "output_token_ids": (5,),
    "cache_salt": b"salt",
    "traceparent": "00-1-2-03",
}
WIRE = {name: value for name, value in ASKED.items() if not isinstance(value, msgspec.Struct)} | {
    "prompt_token_ids": [1, 2],
    "sampling": {"seed": 7, "temperature": 0.5},
    "logprobs": {"processed": True},
    "output_token_ids": [5],
}
FIRST: dict[Any, set[str]] = {
    SamplingParams: {
        "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "min_p",
        "logit_bias", "bad_words",
    },
    LogprobParams: {
        "processed", "temp_scaled", "top_p_normalized", "draft_ids", "draft_logprobs", "prompt_k",
    },
}  # fmt: skip
"""What each worker reads that reads these at all: it refuses a request with any other field."""
ANOTHER: dict[type, Any] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    str: lambda value: value + "x",
    bytes: lambda value: value + b"x",
    tuple: lambda value: (*value, 1),
}
OWN: dict[type, dict[str, Any]] = {
    Submit: {"handle": 9, "attempt": 1, "turn": 6, "decode": DecodeTarget("d", "tcp://d")},
    HandoffState: {
        "handle": 9, "attempt": 1, "model_fingerprint": "f", "dtype": "float32", "n_layers": 1,
        "kv_heads": 1, "block_size": 8, "head_dim": 2, "n_cached": 3, "first_token": 4,
        "draft_scores": DraftScores(logprobs=(-1.0,)),
    },
}  # fmt: skip


def encoded(message: Submit | HandoffState) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return found


@pytest.mark.parametrize("kind", [Submit, HandoffState])
def test_what_was_asked_stands_beside_the_messages_own_fields(kind: Any) -> None:
    assert RequestParams.__struct_fields__ == tuple(ASKED), "give a new field a value in ASKED"
    found = encoded(kind(**OWN[kind], **ASKED))
    assert {name: found[name] for name in WIRE} == WIRE


@pytest.mark.parametrize("kind", [Submit, HandoffState])
def test_what_older_readers_require_is_written_though_it_is_the_default(kind: Any) -> None:
    least = {"prompt_token_ids": (1,), "sampling": SamplingParams()}
    assert set(encoded(kind(**OWN[kind], **least))) >= REQUIRED[kind]


@pytest.mark.parametrize(("kind", "reads"), [(Submit, Command), (HandoffState, HandoffState)])
def test_what_an_older_version_leaves_out_is_the_default(kind: Any, reads: Any) -> None:
    written = encoded(kind(**OWN[kind], **ASKED))
    older = {name: value for name, value in written.items() if name in REQUIRED[kind]}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=reads)
    assert type(read) is kind
    k = read.logprobs_k
    assert (
        read.fields()
        == RequestParams(
            **{n: ASKED[n] for n in ("prompt_token_ids", "sampling")}, logprobs_k=k
        ).fields()
    )


@pytest.mark.parametrize("kind", [Submit, HandoffState])
def test_a_message_made_of_another_ones_request_asks_for_the_same(kind: Any) -> None:
    """Nothing of the first one's own comes along."""
    submit = Submit(**OWN[Submit], **ASKED)
    made = kind(**OWN[kind], **submit.fields())
    assert made.fields() == ASKED


def needs(part: Any) -> set[str]:
    """Return the features that asking for this needs, besides that logprobs are read at all."""
    is_sampling = isinstance(part, SamplingParams)
    asked = {"sampling": part} if is_sampling else {"sampling": SamplingParams(), "logprobs": part}
    return {*RequestParams(**asked).features} - {LOGPROB_PARAMS}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in FIRST for name in kind.__struct_fields__]
)
def test_what_an_older_worker_cannot_read_needs_a_feature(kind: Any, name: str) -> None:
    """It would fail the request; the gateway keeps it for workers that can."""
    default = kind()
    value = getattr(default, name)
    needed = needs(msgspec.structs.replace(default, **{name: ANOTHER[type(value)](value)}))
    what = f"{kind.__name__}.{name} (docs/add-a-field.md, 'When an older worker')"
    if name in FIRST[kind]:
        assert not needed, f"older workers read {what}, and would not be given it"
    else:
        assert needed, f"RequestParams.features names no feature for {what}"
    assert needed <= {*REQUEST_FEATURES}, f"not in REQUEST_FEATURES, for {what}"
    assert not needs(default), f"who does not ask for it needs no feature: {what}"
