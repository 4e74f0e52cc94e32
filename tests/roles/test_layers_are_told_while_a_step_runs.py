"""What a step says of a last chunk's layers goes to decode before the step is over."""

from __future__ import annotations

from baton_worker.engine.api import BegunBlocks, KvFilled, KvInPool, LeaseName
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import FEATURES, HANDOFF_LAYERS, DecodeTarget, Submit
from baton_worker.sampling import SamplingParams

GATEWAY = 77
KEY = RequestKey(make_handle(GATEWAY, 1), 0)
TARGET = DecodeTarget("d", "memory")


KV = KvInPool((2,), LeaseName(0, 1))


def word(key: RequestKey) -> KvFilled:
    return KvFilled(key, KV, BegunBlocks(1, 4))


def test_who_tells_of_layers_is_heard_at_once(make_worker) -> None:
    worker, _ = make_worker("p"), make_worker("d")
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    worker.command(Submit(*KEY, prompt_token_ids=(5, 6, 7), sampling=sampling, decode=TARGET))
    engine, told = worker.loop.parts.engine, []
    worker.transport.tell_filled = lambda target, filled: told.append((target, filled))
    step = engine.step

    def telling(before_next, tell_filled):
        tell_filled(word(KEY))
        assert told == [(TARGET, word(KEY))], "while the step is under way"
        tell_filled(word(RequestKey(KEY.handle, 7)))  # of nobody who is here
        return step(before_next, tell_filled)

    engine.step = telling
    worker.turn()
    assert len(told) == 1


def test_a_decode_worker_of_this_version_is_told() -> None:
    assert HANDOFF_LAYERS in FEATURES
