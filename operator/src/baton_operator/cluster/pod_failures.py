"""Why a pod does not get ready, from the words of the kubelet: one reason, one line for people.

Pure. Only what comes back is told: an image that cannot be had, a container that cannot be made or
that ends. A pod that merely starts says nothing. What a container that ended had to say stays told
while it is tried again, so that the answer does not come and go with each attempt.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_STARTING = ("", "ContainerCreating", "PodInitializing")
_LONGEST = 400
"""Characters of a container's last words; they may be many lines of a traceback."""


class _Wire(msgspec.Struct, frozen=True, rename="camel"):
    """Base of wire views: unknown fields are skipped without being built."""


class _Waiting(_Wire, frozen=True):
    reason: str = ""
    message: str = ""


class _Terminated(_Wire, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _State(_Wire, frozen=True):
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class ContainerStatus(_Wire, frozen=True):
    """The part of a container's status that tells why it does not serve."""

    name: str = ""
    ready: bool = False
    state: _State = _State()
    last_state: _State = _State()


class PodFailure(NamedTuple):
    """What keeps a pod from being ready."""

    reason: str
    message: str


def pod_failure(containers: list[ContainerStatus]) -> PodFailure | None:
    """Return what keeps the first container that fails from running, or None."""
    return next(filter(None, map(_of_container, containers)), None)


def _of_container(container: ContainerStatus) -> PodFailure | None:
    if container.ready:
        return None
    ended = container.state.terminated or container.last_state.terminated
    if ended is not None and ended.exit_code:
        said = f": {_shortened(ended.message)}" if ended.message else ""
        code = f"{container.name} exited with code {ended.exit_code}"
        return PodFailure(ended.reason or "Error", f"{code}{said}")
    waiting = container.state.waiting
    if waiting is None or waiting.reason in _STARTING:
        return None
    return PodFailure(waiting.reason, f"{container.name} waits: {_shortened(waiting.message)}")


def _shortened(text: str) -> str:
    """Return the end of a text, where programs say why they end, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"... {line[-_LONGEST:]}"
