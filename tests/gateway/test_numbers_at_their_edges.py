"""Every number in a request body is refused by name, or survives admission and every step.

Fields come from the schema and values from what float32 and 64-bit integers can just hold, or just
not: a new field is covered by itself. What the gateway submits runs in a real engine.
"""

import dataclasses
import json

import msgspec
import pytest

from baton_testing import numeric_edges
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import SimConfig
from baton_worker.engine.backends.sim.engine import SimEngine, sim_shape
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import DraftSources, EngineOptions
from baton_worker.gateway.intake.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from baton_worker.identity import RequestKey
from baton_worker.messages import Submit
from baton_worker.records.columns import FINISH_MASK, Finish
from baton_worker.sampling import SAMPLING_BOUNDS, SamplingParams

SHAPED = {
    "temperature": 0.7, "repetition_penalty": 1.1, "logprobs_mode": "processed_logprobs",
    "temp_scaled_logprobs": True, "top_p_normalized_logprobs": True, "top_p": 0.9,
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
TEXT = {"prompt": "hi there", "max_tokens": 3, "logprobs": 1}
ENDPOINTS = [
    pytest.param("/v1/chat/completions", ChatBody, CHAT, marks=pytest.mark.slow),
    pytest.param("/v1/completions", CompletionBody, TEXT | SHAPED, marks=pytest.mark.slow),
    ("/tokenize", TokenizeBody, {"prompt": "hi"}),
    ("/detokenize", DetokenizeBody, {"tokens": [7]}),
]


def _values(field):
    values = (*numeric_edges.INTEGERS, *numeric_edges.BEYOND_64_BITS)
    return values if field.is_integer else (*values, *numeric_edges.FLOATS)


@pytest.fixture(scope="module")
def spec():
    found = sim_shape(SimConfig(), load_shape(TINY_MODEL))
    return dataclasses.replace(found, vocab_size=512)


def _survives(spec, submit):
    """Run what was submitted, beside a plain request, to its end."""
    options = EngineOptions(
        block_size=16, n_blocks=128, max_running=8, max_waiting=8, max_model_len=512,
        prefill_tokens=512, n_draft=2, use_mtp=True, drafts=DraftSources(), max_top_k=20,
        overlap=False,
    )  # fmt: skip
    instant = SimConfig(prefill_token_seconds=0.0, decode_step_seconds=0.0, decode_row_seconds=0.0)
    engine = SimEngine(instant, spec, options, lambda: 0.0)
    neighbour = RequestKey(1, 0)
    engine.submit(
        Submit(*neighbour, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=4))
    )
    max_tokens = min(submit.sampling.max_tokens, 8)
    sampling = msgspec.structs.replace(submit.sampling, max_tokens=max_tokens)
    engine.submit(msgspec.structs.replace(submit, sampling=sampling, decode=None))
    ends = {}
    while engine.has_work():
        columns = engine.step().columns
        for handle, flags in zip(columns.handle.tolist(), columns.flags.tolist(), strict=True):
            if flags & FINISH_MASK:
                ends[handle] = Finish(flags & FINISH_MASK)
    assert ends.keys() == {submit.handle, neighbour.handle}
    return set(ends.values()) <= {Finish.STOP, Finish.LENGTH}


@pytest.mark.parametrize(
    ("path", "body", "base"), ENDPOINTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_number_is_refused_by_name_or_survives(start_gateway, spec, path, body, base):
    gateway = start_gateway()
    refused, accepted = {}, {}
    with gateway.http() as client:
        for field in numeric_edges.numeric_fields(body):
            for value in _values(field):
                name, placed = field.place(value)
                request = base | {name: placed}
                before = len(gateway.link.sent(Submit))
                answer = client.post(path, content=json.dumps(request))
                case = (field.path, value, answer.text[:300])
                if answer.status_code == 400:
                    param = answer.json()["error"]["param"] or ""
                    assert param == name or param.startswith((f"{name}[", f"{name}.")), case
                    assert len(gateway.link.sent(Submit)) == before, case
                    refused[field.path] = value
                    continue
                assert answer.status_code == 200, case
                accepted[field.path] = value
                for _, submit in gateway.link.sent(Submit)[before:][:1]:
                    assert _survives(spec, submit), case
    floats = {name for name in SAMPLING_BOUNDS if name in body.__struct_fields__}
    assert floats <= refused.keys() & accepted.keys()


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000])
def test_a_number_that_json_or_a_double_cannot_hold_is_refused(start_gateway, text):
    gateway = start_gateway()
    with gateway.http() as client:
        body = json.dumps(TEXT)[:-1] + f', "temperature": {text}}}'
        answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert gateway.link.commands == []
