"""An engine that hangs is told from one that is slow, and its worker says so and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from baton_testing.scripted_link import worker_info
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SimConfig
from baton_worker.engine.backends.sim.engine import SimEngine, sim_shape
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import resolve_options
from baton_worker.engine.progress import Progress
from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.messages import Submit
from baton_worker.roles import watchdog
from baton_worker.roles.announced import Announced
from baton_worker.roles.health import HealthSources, build_app
from baton_worker.roles.watchdog import PERIOD_SECONDS, EngineHealth, Watch, Watchdog
from baton_worker.sampling import SamplingParams

KEY = RequestKey(make_handle(77, 5), 0)
STUCK, FIRST = 10.0, 120.0


class Time:
    """Passes when it is told to, and is looked at as often as a watchdog does."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.look: Callable[[float], object] = lambda now: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        ends = self.now + seconds
        while self.now < ends:
            self.now = min(ends, self.now + PERIOD_SECONDS)
            self.look(self.now)


class Watched:
    """Progress and what a watch says of it as time passes."""

    def __init__(self) -> None:
        self.time = Time()
        self.progress = Progress(STUCK, FIRST, self.time.clock)
        self.watch = Watch(self.progress)
        self.seen: list[EngineHealth] = []
        self.time.look = lambda now: self.seen.append(self.watch.look(now))

    def wait(self, seconds: float) -> set[EngineHealth]:
        """Let time pass and return all that was said."""
        self.seen.clear()
        self.time.sleep(seconds)
        return set(self.seen)

    def step(self, n_tokens: int, seconds: float) -> set[EngineHealth]:
        self.progress.stepping(n_tokens, (KEY,))
        return self.wait(seconds)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_step_that_never_comes_back_is_suspect_and_then_stuck(watched):
    assert watched.step(8, 1.0) == {EngineHealth.FINE}
    assert watched.step(8, 5.0) == {EngineHealth.FINE}
    watched.progress.output()
    watched.progress.stepping(8, (KEY,))
    assert watched.wait(24.0) == {EngineHealth.FINE}, "others of its size took five seconds"
    assert watched.wait(20.0) == {EngineHealth.FINE, EngineHealth.SUSPECT}
    assert watched.wait(10.0) == {EngineHealth.SUSPECT, EngineHealth.STUCK}
    assert watched.watch.phase is not None
    assert watched.watch.phase.keys == (KEY,)


def test_quick_steps_leave_the_bound_at_what_is_configured(watched):
    for _ in range(10):
        watched.step(8, 0.25)
    watched.progress.stepping(8, (KEY,))
    assert watched.wait(4.75) == {EngineHealth.FINE}
    assert watched.wait(5.0) == {EngineHealth.FINE, EngineHealth.SUSPECT}
    assert watched.wait(1.0) == {EngineHealth.SUSPECT, EngineHealth.STUCK}


def test_a_step_of_a_new_size_may_compile(watched):
    watched.step(8, 0.25)
    assert EngineHealth.SUSPECT in watched.step(9, 6.0), "like 8 to 15"
    assert watched.step(200, 59.0) == {EngineHealth.FINE}, "like no other"
    assert watched.wait(60.0) == {EngineHealth.FINE, EngineHealth.SUSPECT}
    assert watched.wait(2.0) == {EngineHealth.SUSPECT, EngineHealth.STUCK}


def test_progress_takes_the_suspicion_back(watched):
    watched.step(8, 1.0)
    watched.progress.output()
    assert EngineHealth.SUSPECT in watched.wait(6.0)
    watched.progress.serving()
    assert watched.wait(1.0) == {EngineHealth.FINE}


def test_nothing_to_do_is_no_hang(watched):
    watched.progress.rest()
    assert watched.wait(1000.0) == {EngineHealth.FINE}
    assert watched.progress.seconds() == 0.0


def test_what_is_overdue_has_lasted_longer_than_it_may(watched):
    assert not watched.progress.is_overdue()
    watched.progress.stepping(8, (KEY,))
    watched.wait(FIRST)
    assert not watched.progress.is_overdue()
    watched.wait(0.25)
    assert watched.progress.is_overdue()
    watched.progress.output()
    assert not watched.progress.is_overdue()


def test_commands_that_are_never_served_are_a_hang_too(watched):
    watched.progress.serving()
    assert EngineHealth.STUCK in watched.wait(11.0)


def test_time_that_the_process_stood_still_hangs_nothing(watched):
    watched.step(8, 1.0)
    watched.progress.stepping(8, (KEY,))
    watched.wait(1.0)
    watched.time.now += 600.0
    assert watched.wait(1.0) == {EngineHealth.FINE}
    assert watched.watch.waited_seconds < 4.0


def test_one_slow_step_widens_the_bound_for_a_while_only(watched):
    watched.step(8, 100.0)
    for _ in range(400):
        watched.step(8, 0.0)
    watched.progress.stepping(8, (KEY,))
    current = watched.progress.current
    assert current is not None
    assert current.limit_seconds == STUCK


def sim_engine(time: Time, pace: SimConfig, is_overlapped: bool) -> SimEngine:
    engine = EngineConfig(
        device="sim",
        sim=pace,
        prefill_chunk_tokens=16,
        overlap=is_overlapped,
        stuck_seconds=STUCK,
        first_step_seconds=FIRST,
    )
    shape = sim_shape(pace, load_shape(TINY_MODEL))
    options = resolve_options(ProcessConfig(ModelConfig(str(TINY_MODEL)), engine=engine), shape)

    def sleep(seconds: float) -> None:
        """Let time pass, once the engine's thread waits for the step that another one is at."""
        while (phase := made.progress.current) is None or not phase.keys:
            threading.Event().wait(0.001)
        time.sleep(seconds)

    made = SimEngine(pace, shape, options, time.clock, sleep)
    return made


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
def test_a_long_prompt_is_no_hang_however_long_it_takes(is_overlapped):
    """Each of its chunks is progress: 12 of 48 s each, with a bound of 120 s."""
    time = Time()
    engine = sim_engine(time, SimConfig(prefill_token_seconds=3.0), is_overlapped)
    watch, seen = Watch(engine.progress), list[EngineHealth]()
    time.look = lambda now: seen.append(watch.look(now))
    prompt = tuple(range(8, 8 + 12 * 16))
    engine.submit(
        Submit(*KEY, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3), logprobs_k=0)
    )
    began = time.now
    while engine.has_work():
        engine.step()
        time.look(time.now)
    assert time.now - began > 500.0
    assert set(seen) == {EngineHealth.FINE}


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
def test_a_step_names_the_requests_that_it_carries_and_no_others(is_overlapped):
    time = Time()
    engine = sim_engine(time, SimConfig(), is_overlapped)
    found = set[tuple[RequestKey, ...]]()
    waiting = RequestKey(make_handle(78, 6), 0)
    for key in (KEY, waiting):
        engine.submit(
            Submit(
                *key, prompt_token_ids=(8, 9), sampling=SamplingParams(max_tokens=9), logprobs_k=0
            )
        )
    engine.set_paused(frozenset({78}))

    def look(now: float) -> None:
        phase = engine.progress.current
        if phase is not None and phase.keys:
            found.add(phase.keys)

    time.look = look
    while engine.has_work():
        engine.step()
    assert found == {(KEY,)}
    engine.close()


class Alarm:
    """A watchdog that is looked through by hand, and what it did."""

    def __init__(self) -> None:
        self.watched = Watched()
        self.told: list[bool] = []
        self.ends = 0
        self.dog = Watchdog(self.watched.progress, lambda: [KEY], self.told.append, self.end)
        self.watched.time.look = self.dog.look

    def end(self) -> None:
        self.ends += 1
        self.watched.progress.rest()


def test_it_is_told_once_and_taken_back_and_the_end_names_what_was_open(caplog):
    alarm = Alarm()
    progress, time = alarm.watched.progress, alarm.watched.time
    with caplog.at_level(logging.INFO):
        progress.output()
        time.sleep(7.0)
        assert (alarm.told, alarm.dog.is_suspect) == ([True], True)
        progress.serving()
        time.sleep(1.0)
        assert (alarm.told, alarm.dog.is_suspect) == ([True, False], False)
        assert alarm.ends == 0
        progress.serving()
        time.sleep(11.0)
    assert alarm.ends == 1
    assert alarm.told == [True, False, True, False]
    last = next(record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert vars(last)["requests"] == f"{KEY.handle}/0"
    assert vars(last)["at"] == "serving"


class Unread(logging.Handler):
    """A log that takes nothing before it is let, and then says what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.taken: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.let.wait(60.0)
        self.taken.append(record.getMessage())


def test_a_log_that_nobody_reads_keeps_it_neither_from_telling_nor_from_the_end(monkeypatch):
    monkeypatch.setattr(watchdog, "SAY_SECONDS", 0.01)
    alarm, unread = Alarm(), Unread()
    watchdog.log.addHandler(unread)
    try:
        alarm.watched.progress.output()
        alarm.watched.time.sleep(7.0)
        assert (alarm.told, unread.taken) == ([True], [])
        alarm.watched.time.sleep(3.25)
        assert (alarm.ends, unread.taken) == (1, [])
    finally:
        unread.let.set()
        watchdog.log.removeHandler(unread)


def test_gateways_give_nothing_new_while_it_drains_or_seems_to_hang():
    said: list[bool] = []
    announced = Announced(worker_info("w", Role.DECODE), lambda info: said.append(info.draining))
    announced.set_suspect(True)
    announced.set_draining(True)
    announced.set_suspect(False)
    assert said == [True], "it drains still"
    announced.set_draining(False)
    announced.set_draining(False)
    assert said == [True, False]


@pytest.mark.parametrize(
    ("is_suspect", "is_overdue", "ready", "alive"),
    [(False, False, 200, 200), (True, False, 503, 200), (True, True, 503, 503)],
    ids=["fine", "suspect", "overdue"],
)
def test_it_is_unready_while_it_seems_to_hang_and_dead_when_its_time_is_over(
    is_suspect, is_overdue, ready, alive
):
    """A kubelet that is told of death already in the middle of a first step would cut it short."""
    sources = HealthSources(
        engine_silence_seconds=lambda: 7.0,
        linked_gateways=lambda: 1,
        is_linked=lambda: True,
        open_requests=lambda: 0,
        is_draining=lambda: False,
        num_speculative_tokens=lambda: 0,
        max_speculative_tokens=0,
        is_suspect=lambda: is_suspect,
        is_overdue=lambda: is_overdue,
    )
    client = TestClient(
        build_app(CollectorRegistry(), lambda: sources), base_url="http://localhost"
    )
    assert client.get("/healthz").status_code == alive
    assert client.get("/readyz").status_code == ready
    assert client.get("/readyz").json()["engine_suspect"] is is_suspect
