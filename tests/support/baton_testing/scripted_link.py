"""A GatewayLink in memory that keeps the real link's rules, with workers that play theirs.

Rules it enforces: events come from one thread of its own, in order; every step passes through the
real record encoder and decoder; no more than CREDIT_FRAMES records may be unapplied; `applied` may
name only what was delivered and never goes back; commands to a worker that is not up return False;
nothing may be called after `close`. A worker plays prefill, decode or mixed: tokens come from a
script, and an abort is answered by a terminal row. One in `refusals` refuses all it is given; one
in `failures` fails, behind its first row, every request whose prompt begins with a token in there.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from baton_worker.identity import RequestKey, Role
from baton_worker.link.api import (
    GatewayLinkEvent,
    StepMeta,
    StepReceived,
    StepsLost,
    WorkerDown,
    WorkerUp,
)
from baton_worker.messages import FEATURES, Abort, Command, Reserve, Submit, WorkerInfo
from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.scored import ScoredRow, ScoredTokens

CREDIT_FRAMES = 64
SEMANTIC_HASH = 77
EOS = 1


@dataclass
class RowSpec:
    """One row to publish; logprobs are made from the tokens when `width` asks for them."""

    handle: int
    position: int
    tokens: Sequence[int] = ()
    finish: Finish = Finish.NONE
    width: int = 0
    attempt: int = 0
    flags: int = 0
    proposed: int = 0
    accepted: int = 0
    error: tuple[ErrorCode, str] | None = None
    shown: ScoredRow | None = None
    prompt: ScoredRow | None = None
    reused: int = 0


def logprob_of(token: int, position: int) -> float:
    """The scripted logprob of a token: a float32 that tells token and position."""
    return float(np.float32(-0.001 * (token + 1) - 0.1 * (position + 1)))


def draft_logprob_of(token: int, position: int) -> float:
    """The scripted draft model's logprob: unlike the model's own."""
    return float(np.float32(logprob_of(token, position) - 1.0))


def top_of(token: int, rank: int) -> tuple[int, float]:
    """The scripted alternative at a rank (0 best) beside a token: never the token itself."""
    other = (token + rank + 1) % 256
    return other, float(np.float32(-0.25 * (rank + 1)))


def columns_of(specs: Sequence[RowSpec]) -> StepColumns:
    """Rows as the packed columns of one step."""
    tokens = [t for s in specs for t in s.tokens]
    placed = [(t, s.position + i) for s in specs if s.width for i, t in enumerate(s.tokens)]
    top = [top_of(t, r) for s in specs for t in s.tokens for r in range(max(s.width - 1, 0))]
    errors = tuple(RowError(i, *s.error) for i, s in enumerate(specs) if s.error)
    return StepColumns(
        handle=np.array([s.handle for s in specs], np.uint64),
        position=np.array([s.position for s in specs], np.uint32),
        n_tokens=np.array([len(s.tokens) for s in specs], np.uint8),
        width=np.array([s.width for s in specs], np.uint8),
        flags=np.array([s.flags | s.finish for s in specs], np.uint8),
        attempt=np.array([s.attempt for s in specs], np.uint8),
        token=np.array(tokens, np.int32),
        logprob=np.array([logprob_of(*at) for at in placed], np.float32),
        rank=np.ones(len(placed), np.int32),
        topk_token=np.array([t for t, _ in top], np.int32),
        topk_logprob=np.array([lp for _, lp in top], np.float32),
        n_proposed=np.array([s.proposed for s in specs], np.uint8),
        n_accepted=np.array([s.accepted for s in specs], np.uint8),
        n_reused=np.array([s.reused for s in specs], np.uint32),
        errors=errors,
        verified_drafts=ScoredTokens.of([s.shown for s in specs]),
        prompt_tokens=ScoredTokens.of([s.prompt for s in specs]),
    )


def worker_info(worker_id: str, role: Role, **changes: object) -> WorkerInfo:
    """A worker's HELLO facts; `changes` override."""
    facts: dict[str, object] = {
        "worker_id": worker_id,
        "role": int(role),
        "wire_min": 1,
        "wire_max": 1,
        "semantic_hash": SEMANTIC_HASH,
        "config_hash": "c",
        "revision": "",
        "model": "tiny",
        "vocab_size": 512,
        "max_model_len": 512,
        "max_top_k": 20,
        "max_running": 64,
        "max_waiting": 1024,
        "kv_capacity_tokens": 1 << 20,
        "features": FEATURES,
        "kv_endpoint": "" if role == Role.PREFILL else f"tcp://{worker_id}:1",
    }
    return WorkerInfo(**(facts | changes))  # type: ignore[arg-type]


@dataclass
class _Job:
    """A request on a worker: what is left to say of it."""

    submit: Submit
    script: list[int]
    position: int = 0


@dataclass
class FakeWorker:
    """A worker process's one life: an epoch, a sequence, and the requests it holds."""

    info: WorkerInfo
    epoch: int
    seq: Iterable[int] = field(default_factory=itertools.count)
    delivered: int = -1
    applied: int = -1
    jobs: dict[RequestKey, _Job] = field(default_factory=dict)
    reserved: dict[RequestKey, Reserve] = field(default_factory=dict)
    outbox: list[RowSpec] = field(default_factory=list)


Script = Callable[[Submit], list[int]]


class ScriptedLink:
    """See the module. `script` gives each request's tokens; `per_step` how many come at a time."""

    def __init__(self, script: Script, per_step: int = 2) -> None:
        self.script = script
        self.per_step = per_step
        self.workers: dict[str, FakeWorker] = {}
        self.commands: list[tuple[str, Command]] = []
        self.lags: list[float] = []
        self.violations: list[str] = []
        self.is_paused = False
        self.pauses_at: int | None = None
        """Workers stop stepping by themselves once a request has so many tokens of output."""
        self.draft_gaps: set[int] = set()
        self.lost_prompt_rows: set[int] = set()
        self.reused: Callable[[Submit], int] = lambda submit: 0
        self.refusals: dict[str, ErrorCode] = {}
        self.failures: dict[str, set[int]] = {}
        self._epochs = itertools.count(1000)
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._changed = threading.Condition()
        self._n_asking = 0
        self._on_events: Callable[[Sequence[GatewayLinkEvent]], None] | None = None
        self._thread = threading.Thread(target=self._run, name="scripted-link")
        self._closed = False
        self._events: list[GatewayLinkEvent] = []
        self._done: list[threading.Event] = []
        """Of what tests directed in this round: set when the gateway has its events."""

    # The contract.

    def start(self, on_events: Callable[[Sequence[GatewayLinkEvent]], None]) -> None:
        self._require(self._on_events is None, "start was called twice")
        self._on_events = on_events
        self._thread.start()

    def send(self, worker_id: str, command: Command) -> bool:
        self._require(not self._closed, "send after close")
        worker = self.workers.get(worker_id)
        if worker is None:
            return False
        with self._changed:
            self.commands.append((worker_id, command))
            # Looked up now: a test that has heard of it may say `refusals` before it is taken.
            refusal = self.refusals.get(worker_id)
            self._tasks.put(lambda: self._take(worker, command, refusal))  # before a test hears
            self._changed.notify_all()
        return True

    def applied(self, worker_id: str, epoch: int, seq: int) -> None:
        self._require(not self._closed, "applied after close")
        worker = self.workers.get(worker_id)
        if worker is None or worker.epoch != epoch:
            return
        self._require(worker.applied < seq <= worker.delivered, f"applied {seq} out of order")
        with self._changed:
            worker.applied = seq
            self._changed.notify_all()
        self._tasks.put(lambda: None)

    def set_lag(self, seconds: float) -> None:
        self._require(seconds >= 0.0, f"lag of {seconds} s")
        with self._changed:
            self.lags.append(seconds)
            self._changed.notify_all()

    def close(self) -> None:
        self._require(not self._closed, "close was called twice")
        self._closed = True
        if self._on_events is not None:
            self._tasks.put(None)
            self._thread.join()

    # What tests direct.

    def up(self, worker_id: str, role: Role, **changes: object) -> FakeWorker:
        """A worker says HELLO; again under the same name: a new process."""
        worker = FakeWorker(worker_info(worker_id, role, **changes), next(self._epochs))

        def task() -> None:
            before = self.workers.get(worker_id)
            if before is not None:
                self._events.append(WorkerDown(worker_id, before.epoch, "replaced"))
            self.workers[worker_id] = worker
            self._events.append(WorkerUp(worker_id, worker.epoch, worker.info))

        self.do(task)
        return worker

    def announce(self, worker_id: str, info: WorkerInfo) -> None:
        """A worker's facts change."""

        def task() -> None:
            worker = self.workers[worker_id]
            worker.info = info
            self._events.append(WorkerUp(worker_id, worker.epoch, info))

        self.do(task)

    def down(self, worker_id: str, reason: str = "silent") -> None:
        """A worker process is gone."""

        def task() -> None:
            worker = self.workers.pop(worker_id)
            self._events.append(WorkerDown(worker_id, worker.epoch, reason))

        self.do(task)

    def back(self, worker: FakeWorker) -> None:
        """A worker process that was given up is heard of again, and holds what it held."""

        def task() -> None:
            self.workers[worker.info.worker_id] = worker
            self._events.append(WorkerUp(worker.info.worker_id, worker.epoch, worker.info))

        self.do(task)

    def lose(self, worker_id: str) -> None:
        """Some records of a worker can no longer be had."""
        self.do(
            lambda: self._events.append(StepsLost(worker_id, self.workers[worker_id].epoch, 3, 4))
        )

    def publish(self, worker_id: str, *specs: RowSpec) -> None:
        """A worker publishes one step of exactly these rows."""
        self.do(lambda: self._deliver(self.workers[worker_id], specs))

    def pause(self) -> None:
        """Workers stop stepping; aborts and what tests publish still goes out."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._tasks.put(lambda: None)

    def do(self, task: Callable[[], None]) -> None:
        """Run on the link's thread, and wait until the gateway was handed what comes of it."""
        done = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - raised by the test's thread
                failures.append(error)
            self._done.append(done)

        self._tasks.put(work)
        if not done.wait(60):
            raise AssertionError("the link's thread did not answer")
        if failures:
            raise failures[0]

    def sent(self, kind: type[Command]) -> list[tuple[str, Command]]:
        """Commands of a kind so far."""
        with self._changed:
            return [(worker, c) for worker, c in self.commands if isinstance(c, kind)]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for commands or acknowledgements to make `condition` true."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not condition():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError("the condition did not come true")

    def begin_asking(self) -> None:
        """A client will ask, perhaps on a thread that has not begun."""
        with self._changed:
            self._n_asking += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What a client does of which `begin_asking` was told."""
        try:
            yield
        finally:
            with self._changed:
                self._n_asking -= 1
                self._changed.notify_all()

    @property
    def is_asked(self) -> bool:
        """Whether a client has no answer yet."""
        return self._n_asking > 0

    def wait_told(self, condition: Callable[[], bool]) -> None:
        """As `wait_until`, of what workers are told of requests; fails when all have ended."""

        def is_over() -> bool:
            if condition():
                return True
            assert self.is_asked, "every client has its answer, and workers were not told"
            return False

        self.wait_until(is_over)

    def held(self) -> int:
        """Requests and reservations that workers still hold."""
        return sum(len(w.jobs) + len(w.reserved) for w in self.workers.values())

    # The link's thread.

    def _run(self) -> None:
        while True:
            busy = not self.is_paused and any(self._can_step(w) for w in self.workers.values())
            try:
                task = self._tasks.get(block=not busy)
                if task is None:
                    return
                task()
                continue_taking = not self._tasks.empty()
            except queue.Empty:
                continue_taking = False
            if not continue_taking:
                self._step_all()
            if self._events and self._on_events is not None:
                events, self._events = self._events, []
                self._on_events(events)
            while self._done:
                self._done.pop().set()

    def _can_step(self, worker: FakeWorker) -> bool:
        has_credit = worker.delivered - worker.applied < CREDIT_FRAMES
        return has_credit and bool(worker.outbox or worker.jobs)

    def _step_all(self) -> None:
        for worker in tuple(self.workers.values()):
            if worker.delivered - worker.applied >= CREDIT_FRAMES:
                continue
            specs, worker.outbox = worker.outbox, []
            if not self.is_paused:
                for key, job in tuple(worker.jobs.items()):
                    specs += self._advance(worker, key, job)
            if specs:
                self._deliver(worker, specs)

    def _deliver(self, worker: FakeWorker, specs: Sequence[RowSpec]) -> None:
        seq = next(worker.seq)  # type: ignore[call-overload]
        header = StepHeader(
            epoch=worker.epoch,
            seq=seq,
            step_id=seq,
            role=Role(worker.info.role),
            semantic_hash=SEMANTIC_HASH,
            sent_unix_ns=1,
        )
        frame = encode_step(columns_of(specs), header)
        read, columns = decode_step(frame)
        worker.delivered = seq
        meta = StepMeta(read.epoch, seq, seq, worker.info.role, 1, False, len(frame))
        self._events.append(StepReceived(worker.info.worker_id, meta, columns))

    def _take(self, worker: FakeWorker, command: Command, refusal: ErrorCode | None) -> None:
        if isinstance(command, Abort):
            self._abort(worker, command)
        elif refusal is not None:
            error = (refusal, "not here")
            key = RequestKey(command.handle, command.attempt)
            row = RowSpec(key.handle, 0, finish=Finish.ERROR, attempt=key.attempt, error=error)
            worker.outbox.append(row)
        elif isinstance(command, Reserve):
            worker.reserved[RequestKey(command.handle, command.attempt)] = command
        else:
            key = RequestKey(command.handle, command.attempt)
            given = len(command.output_token_ids)
            worker.jobs[key] = _Job(command, self.script(command), given)

    def _abort(self, worker: FakeWorker, command: Abort) -> None:
        key = RequestKey(command.handle, command.attempt)
        held = worker.jobs.pop(key, None) or worker.reserved.pop(key, None)
        if held is not None:
            row = RowSpec(command.handle, 0, finish=Finish.ABORT, attempt=command.attempt)
            worker.outbox.append(row)

    def _advance(self, worker: FakeWorker, key: RequestKey, job: _Job) -> list[RowSpec]:
        """One step of one request; the script is the whole output, its last token ends it."""
        if job.submit.prompt_token_ids[0] in self.failures.get(worker.info.worker_id, ()):
            del worker.jobs[key]
            error = (ErrorCode.INTERNAL, "not this")
            return [RowSpec(key.handle, 0, finish=Finish.ERROR, attempt=key.attempt, error=error)]
        is_prefill = worker.info.role == Role.PREFILL
        first = job.position == len(job.submit.output_token_ids)
        n = 1 if first or is_prefill else self.per_step
        limit = job.submit.sampling.max_tokens
        script = job.script[:limit]
        tokens = script[job.position : job.position + n]
        ends = job.position + len(tokens) >= len(script)
        finish = Finish.NONE
        if ends:
            stop = tokens[-1] == EOS or tokens[-1] in job.submit.sampling.stop_token_ids
            finish = Finish.STOP if stop else Finish.LENGTH
        drafts = 0 if first else self.per_step - 1
        row = RowSpec(
            key.handle,
            job.position,
            tokens,
            finish,
            width=job.submit.logprobs_k + 1,
            attempt=key.attempt,
            flags=FLAG_FIRST_TOKEN if job.position == 0 else 0,
            proposed=drafts,
            accepted=min(drafts, len(tokens) - 1) if not first else 0,
            shown=self.shown_drafts(job.submit, job.position, tokens, drafts),
            reused=self.reused(job.submit) if job.position == 0 else 0,
        )
        told = self.prompt_rows(key, job.submit) if first else []
        job.position += len(tokens)
        self.is_paused |= self.pauses_at is not None and job.position >= self.pauses_at
        if ends or is_prefill:
            del worker.jobs[key]
        if is_prefill and not ends and job.submit.decode is not None:
            self._hand_over(key, job, row)
        return [*told, row]

    def prompt_rows(self, key: RequestKey, submit: Submit) -> list[RowSpec]:
        """The prompt's logprobs, three tokens a row; `lost_prompt_rows` of them are left out."""
        k, prompt = submit.logprobs.prompt_k, submit.prompt_token_ids
        if k < 0:
            return []
        found = []
        for start in range(1, len(prompt), 3):
            tokens = list(prompt[start : start + 3])
            top = [top_of(t, r) for t in tokens for r in range(k)]
            told = ScoredRow(
                start,
                tokens,
                1 + k,
                [logprob_of(t, start + i) for i, t in enumerate(tokens)],
                [2] * len(tokens),
                [t for t, _ in top],
                [value for _, value in top],
            )
            found.append(RowSpec(key.handle, 0, attempt=key.attempt, prompt=told))
        return [row for i, row in enumerate(found) if i not in self.lost_prompt_rows]

    def shown_drafts(
        self, submit: Submit, position: int, tokens: list[int], count: int
    ) -> ScoredRow | None:
        """Drafts as accepted, then one token off; scored for the positions in `draft_gaps` not."""
        params, k = submit.logprobs, max(submit.logprobs_k, 0)
        if not count or not (params.draft_ids or params.draft_logprobs):
            return None
        drafts = [*tokens[:count], *[9] * (count - len(tokens))]
        scored = count if params.draft_logprobs and position not in self.draft_gaps else 0
        top = [top_of(t, r) for t in drafts[:scored] for r in range(k)]
        return ScoredRow(
            position,
            drafts,
            1 + k if scored else 0,
            [draft_logprob_of(t, position + i) for i, t in enumerate(drafts[:scored])],
            [1] * scored,
            [t for t, _ in top],
            [value for _, value in top],
        )

    def _hand_over(self, key: RequestKey, job: _Job, row: RowSpec) -> None:
        decode = self.workers.get(job.submit.decode.worker_id)  # type: ignore[union-attr]
        if decode is None or decode.reserved.pop(key, None) is None:
            return
        echo = RowSpec(
            row.handle,
            row.position,
            row.tokens,
            width=row.width,
            attempt=row.attempt,
            flags=FLAG_ECHO,
        )
        decode.outbox.append(echo)
        decode.jobs[key] = job

    def _require(self, condition: bool, violation: str) -> None:
        if not condition:
            self.violations.append(violation)
            raise AssertionError(violation)
