"""Of a prompt's last chunk the first layers are pulled while the others are computed: never wrong,
each once, and in nobody's way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import LoadedModel
from baton_testing.pool_pair import LONG, Pair, alone, fill, memory_of, said
from baton_worker.engine.api import BegunBlocks, Handoff, KvFilled, KvInPool
from baton_worker.engine.kv import layers
from baton_worker.messages import HANDOFF_LAYERS
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")

N_LAYERS = 8
MARKS = (4, 6, 7)
BLOCK = 16
LAST = 150 % 32
"""Tokens of the long prompt's last chunk, in two blocks behind eight."""


@pytest.fixture(autouse=True)
def short_steps_are_told_as_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEW_TOKENS", 0)


@pytest.fixture(scope="module")
def deep(make_model: Callable[..., LoadedModel]) -> LoadedModel:
    """Of eight layers, and one that drafts."""
    return make_model(5, n_layers=N_LAYERS)


class LayerPair(Pair):
    """Each word is heard while prefill's step is under way, unless `hear` does otherwise."""

    def __init__(self, make_bench: Callable[..., Any], **limits: Any) -> None:
        super().__init__(make_bench, **({"overlap": True} | limits))
        self.told: list[KvFilled] = []
        self.hear: Callable[[KvFilled], object] = self.tell

    def submit(self, number: int, prompt: tuple[int, ...], **options: Any) -> Any:
        return super().submit(number, prompt, **({"features": (HANDOFF_LAYERS,)} | options))

    def note(self, filled: KvFilled) -> None:
        self.told.append(filled)
        self.hear(filled)

    def compute(self, most: int = 100) -> list[Handoff]:
        for _ in range(most):
            if not self.prefill.engine.has_work():
                return []
            result = self.prefill.step(self.note)
            for filled in result.filled:
                self.note(filled)
            if result.handoffs:
                return list(result.handoffs)
        return []


@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.parametrize("length", [5, 16, 33, 150])
def test_what_is_said_is_the_same(
    make_bench: Callable[..., Any], deep: LoadedModel, n_draft: int, length: int
) -> None:
    limits = {"n_draft": n_draft, "model": deep}
    pair = LayerPair(make_bench, **limits)
    key = pair.submit(1, LONG[:length])
    (handoff,) = pair.compute()
    pair.come()
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG[:length], **limits)
    n_kv = pair.decode.engine.kv.shape.n_layers
    n_whole = (length - 1) // 32 * 2
    n_begun = -(-length // BLOCK) - n_whole
    ahead = n_whole + n_begun * MARKS[-1] / n_kv
    assert pair.pulled() == pytest.approx((ahead, n_whole + n_begun - ahead)), "each layer once"
    pair.check_nothing_is_left()


def test_the_words_say_what_is_being_computed_and_up_to_where(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = LayerPair(make_bench, model=deep)
    pair.submit(1, LONG)
    (handoff,) = pair.compute()
    assert isinstance(handoff.kv, KvInPool)
    assert [len(word.kv.blocks) for word in pair.told] == [2, 4, 6, 8, 10, 10, 10]
    begun = [word.begun for word in pair.told]
    assert begun == [BegunBlocks(0, 0)] * 4 + [BegunBlocks(2, n) for n in MARKS]
    assert {word.kv.lease for word in pair.told} == {handoff.kv.lease}
    assert pair.told[-1].kv.blocks == handoff.kv.blocks


def test_layers_are_final_when_they_are_told(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    """A device has computed no more by then: what is read one layer too early is something else."""
    pair = LayerPair(make_bench, model=deep)
    pool = pair.prefill.engine.kv
    seen: list[tuple[BegunBlocks, Any]] = []

    def look(filled: KvFilled) -> None:
        if filled.begun.n_blocks:
            seen.append((filled.begun, layers_of(pool, filled.kv.blocks[-2:])))

    pair.hear = look
    pair.submit(1, LONG)
    (handoff,) = pair.compute()
    assert isinstance(handoff.kv, KvInPool)
    final = layers_of(pool, handoff.kv.blocks[-2:])
    assert [begun.n_layers for begun, _ in seen] == [*MARKS]
    for begun, found in seen:
        done = [np.array_equal(a, b) for a, b in zip(found, final, strict=True)]
        assert all(done[: begun.n_layers])
        if pool.shape.is_by_block:  # it computes no further than it is asked for
            assert not any(done[begun.n_layers :])


def layers_of(pool: Any, blocks: Any) -> list[Any]:
    """Return what lies in the first 22 positions of two blocks now, layer by layer."""
    shape, memory = pool.shape, memory_of(pool.sharing)
    n_reserved = 2
    if shape.is_by_block:
        rows = memory[: (shape.n_blocks + n_reserved) * shape.block_bytes]
        of_blocks = rows.reshape(-1, shape.n_layers, shape.layer_bytes)[list(blocks)]
        found = [of_blocks[:, layer].copy() for layer in range(shape.n_layers)]
    else:
        found = [np.stack([a[list(blocks)] for a in own]).view(np.uint8) for own in pool.layers]
    positions = (shape.n_parts, shape.kv_heads, BLOCK, -1)
    axis = 0 if shape.is_by_block else 1
    parts = [
        a.reshape(2, *positions) if axis == 0 else a.reshape(2, 2, *positions[1:]) for a in found
    ]
    firsts = [np.moveaxis(p, axis, 0) for p in parts]
    return [np.concatenate([p[0].ravel(), p[1][:, :, : LAST - BLOCK].ravel()]) for p in firsts]


def test_a_decode_worker_that_knows_whole_blocks_is_told_of_whole_blocks(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = LayerPair(make_bench, model=deep)
    key = pair.submit(1, LONG, features=())
    (handoff,) = pair.compute()
    assert not any(word.begun.n_blocks for word in pair.told)
    pair.come()
    pair.offer(handoff)
    pair.finish()
    assert pair.pulled() == (8, 2)
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)


def test_steps_that_nobody_waits_for_elsewhere_tell_no_layers(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    """Without overlap a step is over before anybody could be told."""
    pair = LayerPair(make_bench, model=deep, overlap=False)
    key = pair.submit(1, LONG)
    (handoff,) = pair.compute()
    pair.offer(handoff)
    pair.finish()
    assert not any(word.begun.n_blocks for word in pair.told)
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)


@pytest.mark.slow
def test_a_last_chunk_is_told_by_layers_beside_who_decodes(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    """Also where a device is given it, with their tokens, behind a step under way."""
    pair = LayerPair(make_bench, model=deep)
    pair.prefill.submit(8, LONG[:10], max_tokens=60)
    while not pair.prefill.engine.load().running:
        pair.prefill.step()
    key = pair.submit(1, LONG)
    (handoff,) = pair.compute()
    assert [word.begun for word in pair.told if word.begun.n_blocks] == [
        BegunBlocks(2, n) for n in MARKS
    ]
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)
    pair.prefill.drain()
    pair.check_nothing_is_left()


def test_prompts_that_end_in_one_step_are_told_each_for_itself(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = LayerPair(make_bench, model=deep, prefill_tokens=128)
    prompts = {n: LONG[n:][:length] for n, length in enumerate((20, 40, 9))}
    keys = {n: pair.submit(n, prompt) for n, prompt in prompts.items()}
    handoffs = pair.compute()
    assert [h.state.key for h in handoffs] == [*keys.values()]
    words = [(word.key, word.begun) for word in pair.told]
    wanted = [(keys[n], -(-len(prompt) // BLOCK)) for n, prompt in prompts.items()]
    assert words == [(key, BegunBlocks(count, n)) for n in MARKS for key, count in wanted]
    for handoff in handoffs:
        pair.offer(handoff)
    pair.finish()
    for n, key in keys.items():
        assert said(pair.decode, key) == alone(make_bench, n, prompts[n], model=deep)
    pair.check_nothing_is_left()


@pytest.mark.slow
def test_a_short_chunk_is_told_once_in_a_long_step_too(
    make_bench: Callable[..., Any], deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode serves words one behind the other, and offers behind them."""
    monkeypatch.setattr(layers, "FEW_TOKENS", 64)
    pair = LayerPair(make_bench, model=deep, prefill_tokens=128)
    lengths = (20, 64, 30)
    keys = [pair.submit(n, LONG[:length]) for n, length in enumerate(lengths)]
    handoffs = pair.compute()
    said_of = [[w.begun.n_layers for w in pair.told if w.key == key] for key in keys]
    assert said_of == [[MARKS[0]], [*MARKS], [MARKS[0]]]
    for handoff in handoffs:
        pair.offer(handoff)
    pair.finish()
    for n, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        assert said(pair.decode, key) == alone(make_bench, n, LONG[:length], model=deep)
    pair.check_nothing_is_left()


def test_of_a_prompt_whose_beginning_is_known_that_is_whole_at_once(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = LayerPair(make_bench, model=deep, prefill_tokens=128)
    pair.submit(1, LONG[:70])
    (first,) = pair.compute()
    pair.prefill.engine.release_handoff(first.state.key)
    pair.decode.engine.drop_ahead(first.state.key)
    pair.told.clear()
    key = pair.submit(1 << 8, LONG[:100])
    (handoff,) = pair.compute()
    assert [(len(w.kv.blocks), w.begun) for w in pair.told] == [
        (7, BegunBlocks(3, n)) for n in MARKS
    ]
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1 << 8, LONG[:100], model=deep)


@pytest.mark.parametrize("n_heard", range(1 << len(MARKS)))
def test_words_that_are_lost_are_made_up_for(
    make_bench: Callable[..., Any], deep: LoadedModel, n_heard: int
) -> None:
    pair = LayerPair(make_bench, model=deep)

    def hear(filled: KvFilled) -> None:
        if not filled.begun.n_blocks or n_heard >> MARKS.index(filled.begun.n_layers) & 1:
            pair.tell(filled)

    pair.hear = hear
    key = pair.submit(1, LONG)
    (handoff,) = pair.compute()
    for word in pair.told[::-1]:  # late, and in any order
        pair.come()
        pair.tell(word)
    pair.come()
    pair.offer(handoff)
    for word in pair.told:
        pair.tell(word)  # behind the offer: nobody's
    pair.finish()
    n_kv = pair.decode.engine.kv.shape.n_layers
    ahead = 8 + 2 * MARKS[-1] / n_kv
    assert pair.pulled() == pytest.approx((ahead, 10 - ahead)), "each layer once"
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)
    pair.check_nothing_is_left()


@pytest.mark.parametrize("after", range(len(MARKS) + 1))
def test_a_request_that_leaves_between_words_leaves_nothing(
    make_bench: Callable[..., Any], deep: LoadedModel, after: int
) -> None:
    pair = LayerPair(make_bench, model=deep)
    heard: list[KvFilled] = []

    def hear(filled: KvFilled) -> None:
        if filled.begun.n_blocks and len(heard) >= after:
            pair.decode.engine.drop_ahead(filled.key)
            return
        heard.extend([filled] if filled.begun.n_blocks else [])
        pair.tell(filled)

    pair.hear = hear
    key = pair.submit(1, LONG)
    pair.compute()
    pair.decode.engine.drop_ahead(key)
    for _ in range(10):
        pair.decode.engine.has_work()
    load = pair.decode.engine.load()
    assert (load.kv_blocks_used, load.kv_blocks_cached) == (0, 0)
    pair.decode.engine.check_integrity()
    pair.prefill.engine.release_handoff(key)
    pair.check_nothing_is_left()


def test_who_was_cancelled_while_his_last_chunk_is_computed_is_told_of_no_more(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = LayerPair(make_bench, model=deep)
    key = pair.submit(1, LONG)
    while pair.prefill.engine._requests[key].n_computed < 128:
        for filled in pair.prefill.step(pair.note).filled:
            pair.note(filled)
    assert pair.prefill.engine._in_flight is not None, "the last chunk"
    pair.prefill.engine.abort(key)
    assert not pair.compute()
    assert not any(word.begun.n_blocks for word in pair.told)
    pair.come()
    pair.decode.engine.drop_ahead(key)
    pair.prefill.drain()
    pair.check_nothing_is_left()


def test_a_prompt_that_fails_behind_its_words_is_offered_to_nobody(
    make_bench: Callable[..., Any], make_model: Callable[..., LoadedModel]
) -> None:
    """Its last layer's numbers are broken; what decode has read of the others is nobody's."""
    model = make_model(5, n_layers=N_LAYERS)
    model.weights.layers[-1].mlp.down[:] = np.inf
    pair = LayerPair(make_bench, model=model)
    key = pair.submit(1, LONG[:20])
    assert not pair.compute()
    assert [word.begun.n_layers for word in pair.told] == [*MARKS]
    error = pair.prefill.reader[key].error
    assert error is not None
    assert error[0] is ErrorCode.ARITHMETIC
    pair.come()
    pair.decode.engine.drop_ahead(key)
    for _ in range(10):
        pair.decode.engine.has_work()
    assert pair.decode.engine.load().kv_blocks_used == 0
    pair.check_nothing_is_left()


def test_a_step_that_ends_with_an_error_between_two_words_ends_the_listening(
    make_bench: Callable[..., Any], deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LayerPair(make_bench, model=deep)
    pair.submit(1, LONG[:20])
    engine = pair.prefill.engine
    if engine.kv.shape.is_by_block:
        pool_layers = break_device(monkeypatch)
    else:
        pool_layers = break_model(engine, monkeypatch)
    with pytest.raises(RuntimeError, match="it breaks"):
        pair.compute()
    assert pool_layers == [MARKS[0]]
    assert [word.begun.n_layers for word in pair.told] == [MARKS[0]]


def break_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from baton_worker.engine.backends.device.flight import DeviceFlight

    original, seen = DeviceFlight.layers, list[int]()

    def broken(self: Any) -> Any:
        for n_layers in original(self):
            if seen:
                raise RuntimeError("it breaks")
            seen.append(n_layers)
            yield n_layers

    monkeypatch.setattr(DeviceFlight, "layers", broken)
    return seen


def break_model(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    model, seen = engine._parts.runner._model, list[int]()
    forward = model.forward

    def broken(tokens: Any, plan: Any, mark: Callable[[int], None]) -> Any:
        def marked(n_layers: int) -> None:
            if seen:
                raise RuntimeError("it breaks")
            seen.append(n_layers)
            mark(n_layers)

        return forward(tokens, plan, marked)

    monkeypatch.setattr(model, "forward", broken)
    return seen


@pytest.mark.slow
def test_who_is_short_of_blocks_takes_begun_ones_and_they_are_pulled_again(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    limits = {"model": deep, "n_blocks": 12, "max_model_len": 192, "max_running": 2}
    pair = LayerPair(make_bench, **limits)
    taken: list[Any] = []

    def hear(filled: KvFilled) -> None:
        pair.come()
        if filled.begun.n_layers == MARKS[1]:  # between two words of the last chunk
            taken.append(pair.decode.submit(5, LONG[:70], max_tokens=4))
            pair.decode.drain()
        pair.tell(filled)

    pair.hear = hear
    key = pair.submit(0, LONG)
    (handoff,) = pair.compute()
    pair.come()
    pair.offer(handoff)
    pair.finish()
    assert sum(pair.pulled()) > 10, "some of it twice"
    assert said(pair.decode, key) == alone(make_bench, 0, LONG, model=deep)
    assert pair.decode.reader[taken[0]].tokens
    pair.check_nothing_is_left()


@pytest.mark.parametrize("begun", [(11, 1), (-1, 1), (2, 99)])
def test_words_that_make_no_sense_are_left(
    make_bench: Callable[..., Any], deep: LoadedModel, begun: tuple[int, int]
) -> None:
    pair = LayerPair(make_bench, model=deep)
    pair.hear = lambda filled: None
    pair.submit(0, LONG)
    word = fill(pair)[-1]
    pair.tell(word._replace(begun=BegunBlocks(*begun)))
    assert pair.pulled() == (0, 0)
    assert pair.decode.engine.load().kv_left_ahead == {"blocks": 1}


@pytest.mark.parametrize("begun", [[(2, 2), (1, 2)], [(2, 3), (1, 1)], [(3, 2), (2, 1)], [(2, 0)]])
def test_words_that_take_layers_back_harm_nobody(
    make_bench: Callable[..., Any], deep: LoadedModel, begun: list[tuple[int, int]]
) -> None:
    """A device refuses to copy pieces of nothing, and ends with that."""
    pair = LayerPair(make_bench, model=deep)
    pair.hear = lambda filled: None
    key = pair.submit(0, LONG)
    word = fill(pair)[-1]
    for one in begun:
        pair.tell(word._replace(begun=BegunBlocks(*one)))
        pair.come()
        pair.decode.engine.check_integrity()
    (handoff,) = pair.compute()
    pair.offer(handoff)
    pair.finish()
    assert sum(pair.pulled()) == pytest.approx(10), "each layer once"
    assert said(pair.decode, key) == alone(make_bench, 0, LONG, model=deep)
    pair.check_nothing_is_left()


class Drawn:
    """A pair to which things happen as they are drawn."""

    def __init__(self, pair: LayerPair, seed: int) -> None:
        self.pair, self.rng = pair, random.Random(seed)
        self.late: list[Callable[[], None]] = []
        self.offered: set[Any] = set()
        pair.hear = self.hear

    def hear(self, filled: KvFilled) -> None:
        """Hear a word at once, late or never, while a step of prefill's is under way."""
        if self.rng.random() < 0.5:
            self.pair.tell(filled)
        elif self.rng.random() < 0.7:
            self.late.append(partial(self.pair.tell, filled))
        if self.rng.random() < 0.3:
            self.pair.come()
        if self.rng.random() < 0.2:
            self.decode()

    def prefill(self) -> None:
        if self.pair.prefill.engine.has_work():
            result = self.pair.prefill.step(self.pair.note)
            for filled in result.filled:
                self.pair.note(filled)
            self.late += [partial(self.pair.offer, handoff) for handoff in result.handoffs]
            self.offered.update(handoff.state.key for handoff in result.handoffs)

    def decode(self) -> None:
        if self.pair.decode.engine.has_work():
            for key in self.pair.decode.step().imported:
                self.pair.prefill.engine.release_handoff(key)

    def go_on(self, keys: list[Any]) -> bool:
        """Do some of what there is to do; False if there is nothing."""
        if self.rng.random() < 0.7:
            self.prefill()
        while self.late and self.rng.random() < 0.6:
            at = 0 if self.rng.random() < 0.8 else self.rng.randrange(len(self.late))
            self.late.pop(at)()
        if self.rng.random() < 0.1:
            self.pair.decode.engine.drop_ahead(self.rng.choice(keys))
        self.decode()
        self.pair.decode.engine.check_integrity()
        benches = (self.pair.prefill, self.pair.decode)
        return bool(self.late) or any(bench.engine.has_work() for bench in benches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_any_order_of_words_and_whatever_happens_is_exact(
    make_bench: Callable[..., Any], deep: LoadedModel, seed: int
) -> None:
    """Prompts are dropped, both pools are small, copies come soon or not."""
    n_draft = seed % 3
    limits = {"n_blocks": 18, "max_model_len": 192, "max_running": 3, "n_draft": n_draft}
    pair = LayerPair(make_bench, model=deep, **limits)
    drawn = Drawn(pair, seed)
    rng = random.Random(100 + seed)
    prompts = {n: LONG[rng.randrange(60) :][: rng.randrange(4, 90)] for n in range(6)}
    keys = {n: pair.submit(n, prompt) for n, prompt in prompts.items()}
    while drawn.go_on([*keys.values()]):
        pass
    assert drawn.offered == set(keys.values())
    assert any(word.begun.n_blocks for word in pair.told)
    for n, key in keys.items():
        wanted = alone(make_bench, n, prompts[n], n_draft=n_draft, model=deep)
        assert said(pair.decode, key) == wanted
        pair.decode.engine.drop_ahead(key)  # told behind its end
    pair.check_nothing_is_left()
