"""Of the worst bodies that a gateway takes, none makes or looks at many values between two turns
of the event loop, however long the model's context is. Counted, not timed: a value is 20 to 50 ns.
"""

from __future__ import annotations

import asyncio

import pytest

from baton_testing import large_bodies
from baton_worker.config import GatewayConfig
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake import body as body_module
from baton_worker.gateway.intake import intake as intake_module
from baton_worker.gateway.intake.body import MAX_FIELD_BYTES, MAX_STRINGS, SMALL_BODY_BYTES
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.request import Endpoint, ModelLimits

LONGEST_CONTEXT = 4 << 20
BODY_BYTES = GatewayConfig().http.limits.max_body_bytes
MOST_VALUES = 2 * MAX_STRINGS + MAX_FIELD_BYTES // 2
"""In one go: a field of the most bytes is one value for three of them; the parts of a message, and
the fields of a body before they are counted, are as many as there may be strings.
"""


def values_in(value) -> int:
    """How many values something is made of."""
    if isinstance(value, dict):
        return 1 + sum(values_in(item) for item in value.values())
    if isinstance(value, list | tuple):
        if value and not isinstance(value[0], dict | list | tuple):
            return 1 + len(value)
        return 1 + sum(values_in(item) for item in value)
    return 1


class Work:
    """Counts values of what is decoded, converted and checked, by stretches between turns."""

    def __init__(self, monkeypatch):
        self.stretches = [0]
        for module, name in (
            (body_module, "decode_as"),
            (body_module, "decode_object"),
            (intake_module, "convert"),
            (intake_module, "check_ids"),
            (intake_module, "bind"),
        ):
            monkeypatch.setattr(module, name, self.counted(getattr(module, name), name))

    def counted(self, work, name):
        def count(*args):
            if name in ("convert", "check_ids"):  # they look at what they are given
                self.stretches[-1] += values_in(args[0 if name == "convert" else 1])
                return work(*args)
            made = work(*args)
            self.stretches[-1] += 1 if name == "bind" else values_in(made)
            return made

        return count

    async def take(self, intake, raw):
        endpoint = Endpoint.CHAT if b'"messages"' in raw[:40] else Endpoint.COMPLETION
        work = asyncio.ensure_future(intake.generation(endpoint, raw))
        while not work.done():
            self.stretches.append(0)
            await asyncio.sleep(0)
        try:
            return await work
        except ApiError as error:
            return error


class Untold:
    """A tokenizer that makes one token of anything: its threads are another matter."""

    def __init__(self, tokenizer):
        self.vocabulary, self.chat_template = tokenizer.vocabulary, tokenizer.chat_template

    def encode(self, text, *, add_special_tokens):
        return [7]

    encode_long = encode


@pytest.fixture(scope="module")
def bodies():
    made = dict(large_bodies.large_bodies())
    assert tuple(made) == large_bodies.NAMES
    return made


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", large_bodies.NAMES)
async def test_of_each_body_little_is_done_between_two_turns(monkeypatch, tokenizer, bodies, name):
    raw = bodies[name]
    assert len(raw) <= BODY_BYTES
    limits = ModelLimits(LONGEST_CONTEXT, 512, 20)
    intake, work = Intake("tiny", Untold(tokenizer), lambda: limits, 20), Work(monkeypatch)
    result = await work.take(intake, raw)
    assert max(work.stretches) <= MOST_VALUES
    assert sum(work.stretches) > 1 or isinstance(result, ApiError)


async def test_a_long_list_of_ids_is_taken_whole(monkeypatch, tokenizer):
    """What was decoded in parts is what was sent, and the counting sees each id three times."""
    ids = [i % 300 for i in range(300_000)]
    raw = b'{"prompt":[' + b" , ".join(b"%d" % i for i in ids) + b"]}"
    assert len(raw) > SMALL_BODY_BYTES
    limits = ModelLimits(LONGEST_CONTEXT, 512, 20)
    intake, work = Intake("tiny", Untold(tokenizer), lambda: limits, 20), Work(monkeypatch)
    request = await work.take(intake, raw)
    assert request.prompts == (tuple(ids),)
    assert 2 * len(ids) <= sum(work.stretches) <= 4 * len(ids)


@pytest.mark.parametrize("wrong", [b"7.5", b'"a,b"', b"[1,2]", b"9" * 30, b"null"])
@pytest.mark.parametrize("at", [0, 100_000, 199_999])
@pytest.mark.parametrize("form", [b'{"prompt":%b}', b'{"prompt":[%b,[1]]}', b'{"tokens":%b}'])
async def test_what_is_no_id_is_refused_by_its_field_wherever_it_stands(tokenizer, wrong, at, form):
    items = [b"7"] * 200_000
    items[at] = wrong
    raw = form % (b"[" + b",".join(items) + b"]")
    intake = Intake("tiny", tokenizer, lambda: ModelLimits(LONGEST_CONTEXT, 512, 20), 20)
    work = (
        intake.detokenize(raw) if b"tokens" in form else intake.generation(Endpoint.COMPLETION, raw)
    )
    with pytest.raises(ApiError) as caught:
        await work
    name = "tokens" if b"tokens" in form else "prompt"
    assert caught.value.status == 400
    assert str(caught.value.param).startswith(name)
