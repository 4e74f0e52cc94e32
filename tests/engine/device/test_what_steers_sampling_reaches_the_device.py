"""A sampling parameter that a device's step is not told would be ignored there, without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.engine.backends.device.inputs import Inputs, fill_ahead, input_fields
from baton_worker.engine.backends.device.rules import StepRules
from baton_worker.engine.backends.device.shapes import Choice, StepShape
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestLimits, new_state
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

LIMITS = RequestLimits(24, 64, 4, 8, frozenset({1}))
SHAPE = StepShape(1, 2, (), 0, 4, Choice.PROCESSED, -1, 0, -1, 16)
BEFORE: dict[str, Any] = {
    "temperature": 0.9,
    "min_tokens": 3,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": ((3, 1.0),),
}
"""Of what comes with a place of its own (counts, a list), another value alone shall be seen."""
OTHERWISE: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 7,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.4,
    "min_tokens": 0,
    "ignore_eos": True,
    "stop_token_ids": (2,),
    "min_p": 0.3,
    "logit_bias": ((3, 2.5),),
    "bad_words": ((4,),),
}
ENDS_ALONE = {"max_tokens"}
"""What no step has to know: the host ends the request by it."""


def told(params: dict[str, Any]) -> bytes:
    """Return all that a step that decodes one sequence with one draft is told."""
    request = new_state(
        Submit(1, 0, prompt_token_ids=(5, 6), sampling=SamplingParams(**params)), LIMITS, 0.0
    )
    request.accept([8])
    sampled = [FedSequence(request, 0, (9,), verified=True)]
    fields = input_fields(SHAPE)
    inputs = Inputs(**{name: np.zeros(f.shape, f.dtype) for name, f in fields.items()})
    slots = {request: 0} if request.params.sampling.has_penalties else {}
    fill_ahead(inputs, sampled, np.arange(1), SHAPE, StepRules(sampled, slots, {}))
    return b"".join(array.tobytes() for array in inputs)


def test_each_parameter_is_tried() -> None:
    lacking = set(SamplingParams.__struct_fields__) - set(OTHERWISE) - ENDS_ALONE
    assert lacking == set(), "give each a value, and tell the device of it: docs/add-a-field.md"


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_value_is_another_step(name: str) -> None:
    assert told(BEFORE | {name: OTHERWISE[name]}) != told(BEFORE)


def test_what_the_host_ends_by_is_no_other_step() -> None:
    assert told(BEFORE | {"max_tokens": 50}) == told(BEFORE)
