"""Clients that go on asking while a cluster changes, and what they were told.

They keep their connections, as most clients do; every second request is a stream. Owns what makes
two answers equal: every token with its logprob and alternatives. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from baton_cluster.waiting import wait_until

Body = Mapping[str, Any]

REQUEST_SECONDS = 180.0
"""A lost answer is one that never comes; a busy machine may take its time for the others."""
_PATH = "/v1/chat/completions"
_LOGPROB_TOLERANCE = 1e-5
"""Batches of other sizes may round the last bits of a logit otherwise."""


class Token(NamedTuple):
    """One entry of a choice's logprobs."""

    text: str
    logprob: float
    alternatives: tuple[str, ...]


class Answer(NamedTuple):
    """One choice: all its tokens and why it ended."""

    tokens: tuple[Token, ...]
    finish_reason: str

    def differs_from(self, other: Answer) -> str:
        """Return what differs, or an empty string."""
        if self.finish_reason != other.finish_reason:
            return f"ended by {self.finish_reason}, not {other.finish_reason}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(self.tokens)} tokens, not {len(other.tokens)}"
        for index, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            is_close = math.isclose(mine.logprob, theirs.logprob, abs_tol=_LOGPROB_TOLERANCE)
            if (mine.text, mine.alternatives) != (theirs.text, theirs.alternatives) or not is_close:
                return f"token {index} is {mine}, not {theirs}"
        return ""


def ask(client: httpx.Client, body: Body, *, is_stream: bool = False) -> Answer:
    """Return the answer to one request.

    Raises:
        httpx.HTTPError: no answer, or one with an error status.
        ValueError: the answer is not whole.
    """
    if is_stream:
        return _ask_for_stream(client, body)
    reply = client.post(_PATH, json=dict(body))
    _check(reply)
    (choice,) = reply.json()["choices"]
    return Answer(_tokens(choice), choice["finish_reason"])


class Load:
    """Clients on threads; enter to start, leave to stop. `expected` are the true answers."""

    def __init__(self, base_url: str, questions: Sequence[Body], clients: int) -> None:
        """Ask each question once, for the answers that must never change."""
        self._base_url = base_url
        self._questions = questions
        with httpx.Client(base_url=base_url, timeout=REQUEST_SECONDS) as client:
            self.expected = [ask(client, question) for question in questions]
        self.failures: list[str] = []
        self.n_answers = self.n_tokens = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Load:
        """Start the clients and wait until each of them was served."""
        for thread in self._threads:
            thread.start()
        self.wait_answers(len(self._threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; requests in flight are waited for.

        Raises:
            NotReadyError: one was not answered; what `failures` holds is not all.
        """
        self._stop.set()
        wait_until(
            "requests in flight are answered",
            lambda: not any(thread.is_alive() for thread in self._threads), 2 * REQUEST_SECONDS,
        )  # fmt: skip

    def wait_answers(self, more: int) -> None:
        """Wait until this many more requests were answered or failed."""
        goal = self.n_answers + len(self.failures) + more
        wait_until(
            "clients are served",
            lambda: self.n_answers + len(self.failures) >= goal, 2 * REQUEST_SECONDS,
        )  # fmt: skip

    def _run(self, first: int) -> None:
        with httpx.Client(base_url=self._base_url, timeout=REQUEST_SECONDS) as client:
            for turn in itertools.count(first):
                if self._stop.is_set():
                    return
                self._ask(client, turn)

    def _ask(self, client: httpx.Client, turn: int) -> None:
        which = turn % len(self._questions)
        begun = time.time()
        try:
            answer = ask(client, self._questions[which], is_stream=turn % 2 == 1)
            wrong = answer.differs_from(self.expected[which])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            wrong = repr(error)
        with self._lock:
            if wrong:
                self.failures.append(f"asked at {begun:.3f}, at {time.time():.3f}: {wrong}")
            else:
                self.n_answers += 1
                self.n_tokens += len(answer.tokens)


def _ask_for_stream(client: httpx.Client, body: Body) -> Answer:
    tokens: list[Token] = []
    finish_reason, last = "", ""
    with client.stream("POST", _PATH, json={**body, "stream": True}) as reply:
        if reply.is_error:
            reply.read()
            _check(reply)
        for line in reply.iter_lines():
            last = line.removeprefix("data: ") or last
            if line and last != "[DONE]":
                chunk = json.loads(last)
                if "error" in chunk:
                    raise ValueError(last)
                for choice in chunk["choices"]:
                    tokens += _tokens(choice)
                    finish_reason = choice["finish_reason"] or finish_reason
    if last != "[DONE]":
        raise ValueError(f"the stream ended with {last!r}")
    return Answer(tuple(tokens), finish_reason)


def _check(reply: httpx.Response) -> None:
    if reply.is_error:
        raise ValueError(f"status {reply.status_code}: {reply.text}")


def _tokens(choice: Mapping[str, Any]) -> tuple[Token, ...]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    return tuple(
        Token(e["token"], e["logprob"], tuple(top["token"] for top in e["top_logprobs"]))
        for e in entries
    )
