"""However large an answer is, only a slice of it is made between two turns of the event loop.

Work is counted where it is done, by the names of tokens that are looked up and the text that is
made of tokens, so that it does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_worker.gateway.answers.answer import GenerationAnswer
from baton_worker.gateway.answers.formats import format_for
from baton_worker.gateway.answers.json_pieces import BLOCK_BYTES
from baton_worker.gateway.output.client_queue import ClientQueue
from baton_worker.gateway.output.sequence import Delta, DraftScore
from baton_worker.gateway.output.slices import SLICE_ENTRIES
from baton_worker.gateway.output.step_details import StepDetail
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.serving.live_requests import Generation
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.scored import ScoredRow
from baton_worker.sampling import LogprobParams, RequestParams, SamplingParams

N_IDS = 512
MOST_BETWEEN_TURNS = 2048
"""Two slices: one may be begun when the one before was not quite full."""


def test_a_slice_is_some_milliseconds():
    assert 2 * SLICE_ENTRIES <= MOST_BETWEEN_TURNS


class Counting(dict):
    """A map that counts what is looked up."""

    def __init__(self, values, work):
        super().__init__(values)
        self._work = work

    def __getitem__(self, key):
        self._work[0] += 1
        return super().__getitem__(key)

    def of(self, keys):
        return [self[key] for key in keys]


@pytest.fixture
def work():
    """Look-ups since the last turn, and the most there were between two."""
    return [0, 0]


@pytest.fixture
def vocabulary(work):
    made = Vocabulary({i: f" {i}".encode() for i in range(N_IDS)}, frozenset())
    for name in ("names", "text_bytes"):
        full = {i: getattr(made, name)[i] for i in range(N_IDS)}
        setattr(made, name, Counting(full, work))
    return made


def request_of(endpoint, prompt, **facts):
    asked = {name: facts.pop(name) for name in ("logprobs_k", "logprobs") if name in facts}
    values = {
        "n": 1,
        "params": RequestParams(sampling=SamplingParams(), **asked),
        "stops": (),
        "stream": False,
        "include_usage": False,
        "return_token_ids": False,
    } | facts
    return GenerationRequest(endpoint, (tuple(prompt),), **values)


def delta_of(n, k, index=0, *, offsets=False, text="x", drafts=False, finish=None):
    draft = DraftScore(3, -2.0, [4] * max(k, 0), [-3.0] * max(k, 0))
    return Delta(
        index,
        text,
        [i % N_IDS for i in range(n)],
        [-0.5] * n if k >= 0 else [],
        [(i * 7) % N_IDS for i in range(n * max(k, 0))],
        [-1.5] * (n * max(k, 0)),
        list(range(n)) if offsets else [],
        finish,
        drafts=tuple([draft, None][i % 2] for i in range(n)) if drafts else (),
    )


def prompt_delta(prompt, k, per_row=2048):
    rows = tuple(
        ScoredRow(
            start,
            list(prompt[start : start + per_row]),
            1 + k,
            [-0.25] * len(prompt[start : start + per_row]),
            [2] * len(prompt[start : start + per_row]),
            [5] * (k * len(prompt[start : start + per_row])),
            [-0.75] * (k * len(prompt[start : start + per_row])),
        )
        for start in range(1, len(prompt), per_row)
    )
    return Delta(0, "", [], [], [], [], [], None, prompt=rows)


class Answered:
    """What was sent, and the work between turns."""

    def __init__(self, vocabulary, work, request, deltas):
        self.work, self.sent, self.turns = work, [], 0
        queue = ClientQueue(1 << 30)
        generation = Generation(request, queue, 0.0)
        form = format_for(request, vocabulary, "id-1", "tiny", 7)
        for delta in deltas:
            queue.put(delta)
        queue.close()
        answer = GenerationAnswer(generation, form, lambda *_: None, self._turn)
        asyncio.run(answer({}, self._never, self._send))
        self._note()

    async def _turn(self):
        self.turns += 1
        self._note()

    def _note(self):
        self.work[1] = max(self.work[1], self.work[0])
        self.work[0] = 0

    @staticmethod
    async def _never():
        await asyncio.get_running_loop().create_future()

    async def _send(self, message):
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
        else:
            self.headers = dict(message["headers"])

    @property
    def body(self):
        return b"".join(self.sent)


LARGE = [
    pytest.param(Endpoint.CHAT, {"logprobs_k": 20}, [delta_of(3, 20)] * 1400, id="chat-rows"),
    pytest.param(Endpoint.CHAT, {"logprobs_k": 64}, [delta_of(4096, 64)], id="chat-one-delta"),
    pytest.param(
        Endpoint.COMPLETION,
        {"logprobs_k": 20, "logprobs": LogprobParams(draft_logprobs=True)},
        [delta_of(2, 20, offsets=True, drafts=True)] * 2000,
        id="drafts",
    ),
    pytest.param(
        Endpoint.COMPLETION,
        {"prompt_logprobs_k": 20},
        [prompt_delta(range(N_IDS), 20), delta_of(1, -1)],
        id="prompt-logprobs",
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("endpoint", "facts", "deltas"), LARGE)
def test_a_large_answer_is_made_in_slices(vocabulary, work, endpoint, facts, deltas, stream):
    request = request_of(endpoint, range(N_IDS), stream=stream, **facts)
    answered = Answered(vocabulary, work, request, deltas)
    total = sum(len(d.topk_tokens) + len(d.token_ids) for d in deltas)
    assert work[1] <= MOST_BETWEEN_TURNS
    assert answered.turns >= total // MOST_BETWEEN_TURNS


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("k", [-1, 5])
def test_an_echoed_prompt_is_detokenised_once_and_in_slices(vocabulary, work, stream, k):
    prompt = [i % N_IDS for i in range(32_768)]
    request = request_of(Endpoint.COMPLETION, prompt, stream=stream, echo=True, logprobs_k=k, n=3)
    fed = [0]
    vocabulary.text_bytes = Counting(dict(vocabulary.text_bytes.items()), fed)
    told = prompt_delta(prompt, k) if k >= 0 else delta_of(1, k)
    deltas = [told._replace(choice_index=i) for i in range(3)]
    deltas += [delta_of(1, k, i, offsets=k >= 0, finish="stop") for i in range(3)]
    answered = Answered(vocabulary, work, request, deltas)
    assert fed[0] == len(prompt)
    assert work[1] <= MOST_BETWEEN_TURNS
    assert answered.turns >= len(prompt) // SLICE_ENTRIES
    text = b"".join(b" %d" % (i % N_IDS) for i in range(32_768))
    assert answered.body.count(text) == 3


def test_a_long_list_of_prompt_ids_in_each_opening_chunk_leaves_turns(vocabulary, work):
    prompt = [i % N_IDS for i in range(32_768)]
    request = request_of(Endpoint.CHAT, prompt, n=64, stream=True, return_token_ids=True)
    answered = Answered(vocabulary, work, request, [delta_of(1, -1)])
    assert answered.turns >= 64


def test_no_block_that_is_sent_is_large(vocabulary, work):
    request = request_of(Endpoint.CHAT, range(3), logprobs_k=64)
    answered = Answered(vocabulary, work, request, [delta_of(4096, 64)])
    assert max(map(len, answered.sent)) < 5 * BLOCK_BYTES
    assert len(answered.body) == int(answered.headers[b"content-length"])
    assert len(json.loads(answered.body)["choices"][0]["logprobs"]["content"]) == 4096


FACTS = st.fixed_dictionaries(
    {
        "logprobs_k": st.integers(-1, 3),
        "prompt_logprobs_k": st.integers(-1, 2),
        "echo": st.booleans(),
        "return_token_ids": st.booleans(),
        "step_details": st.booleans(),
        "logprobs": st.sampled_from([LogprobParams(), LogprobParams(draft_logprobs=True)]),
        "include_usage": st.booleans(),
        "continuous_usage": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    facts=FACTS,
    chat=st.booleans(),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_what_is_made_in_pieces_is_byte_for_byte_what_is_made_at_once(facts, chat, prompt, sizes):
    """Each delta as a chunk; all of them as one chunk are the whole answer's choice."""
    facts = facts | {"echo": facts["echo"] and not chat, "stream": True}
    endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETION
    request = request_of(endpoint, prompt, **facts)
    # Two tokens share a name, and some are no text by themselves.
    vocabulary = Vocabulary(
        {i: bytes([i]) if i % 5 else b"same" for i in range(N_IDS) if i < 256} | {300: b"\xff"},
        frozenset({7}),
    )
    k = facts["logprobs_k"]
    drafts = facts["logprobs"].draft_logprobs
    wanted_k = max(facts["prompt_logprobs_k"], k if facts["echo"] else -1)
    deltas = [prompt_delta(prompt, wanted_k, 2)] if wanted_k >= 0 and len(prompt) > 1 else []
    step = StepDetail(0, 1, "mixed", 0, 0, [1], [], [])
    for i, n in enumerate(sizes):
        made = delta_of(n, k, offsets=k >= 0 and not chat, drafts=drafts, text=f'"{i}é\n')
        deltas.append(made._replace(steps=(step,) if facts["step_details"] else ()))
    deltas[-1] = deltas[-1]._replace(finish_reason="stop")
    small = format_for(request, vocabulary, "id-1", "tiny", 7)
    large = format_for(request, vocabulary, "id-1", "tiny", 7)
    for delta in deltas:
        expected = small.chunk(delta)
        if expected is None:
            continue
        parts = large.parts(0)
        for _ in parts.add(delta):
            pass
        assert b"".join(large.large_chunk(parts)) == expected
