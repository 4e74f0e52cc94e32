"""Errors as clients see them: OpenAI's body shape, the HTTP status, and whether to retry.

Owns the translation of worker error codes into statuses. Knows nothing of HTTP servers: a route or
a stream decides how the error travels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from baton_worker.records.columns import ErrorCode

CLIENT_GONE = 499
"""The status of a request that ended because of its client, who is not there to read it."""

_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    CLIENT_GONE: "client_closed_request",
    503: "service_unavailable_error",
    504: "timeout_error",
}

MAX_MESSAGE_CHARACTERS = 600
"""Of a longer message the middle is left out: it quotes what the client sent."""

RETRY_AFTER_SECONDS = 1
"""What a refused client is told to wait: about one step's worth of finished requests."""

WORKER_LOST = "worker_lost"
"""Code of a request that ended because a worker went away."""

SUSPECT_REQUEST = "suspect_request"
"""Code of a request under which so many workers failed that it is not tried again."""

WORKERS_FULL = "workers_full"
"""What a request for which no worker has room is counted as, whoever of them turned it away."""

_FULL = frozenset({ErrorCode.QUEUE_FULL.name.lower(), ErrorCode.DECODE_FULL.name.lower()})
COUNTED_CODES = frozenset(
    {
        "client_gone",
        "gap_timeout",
        "logprobs_missing",
        "overlap_mismatch",
        "request_too_large",
        "shutting_down",
        "slow_client",
        SUSPECT_REQUEST,
        "timeout",
        WORKER_LOST,
    }
)
"""Codes that a request's end is counted by as they are."""

_STATUS_BY_CODE = {
    ErrorCode.INTERNAL: 500,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.DECODE_FULL: 429,
    ErrorCode.HANDOFF_TIMEOUT: 503,
    ErrorCode.HANDOFF_REFUSED: 503,
    ErrorCode.HANDOFF_PEER_LOST: 503,
    ErrorCode.RESERVATION_EXPIRED: 503,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INCOMPATIBLE: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.LINK_STALLED: 503,
    ErrorCode.ARITHMETIC: 500,
}


class ApiError(Exception):
    """A request ends with this error.

    Attributes:
        status: HTTP status, also of an error that arrives inside a stream.
        message: one sentence for a person.
        param: the request field at fault, as a path (`messages[0].content`), or None.
        code: a stable word for programs.
        retry_after_seconds: set where the same request may succeed later.
        is_final: clients shall not send the same request again by themselves, as they do after most
            errors of a server.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.is_final = is_final

    @property
    def outcome(self) -> str:
        """What a request that workers had and that ends with this is counted as."""
        if self.code in _FULL:
            return WORKERS_FULL
        return self.code if self.code in COUNTED_CODES else "error"

    @property
    def payload(self) -> dict[str, Any]:
        """The JSON object that OpenAI clients expect."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPE_BY_STATUS.get(self.status, "internal_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def encode(self) -> bytes:
        """Return the payload as JSON."""
        return msgspec.json.encode(self.payload)


def _shortened(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half]} ... {message[-half:]}"


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def context_exceeded(param: str | None, context_tokens: int, message: str) -> ApiError:
    """Return the 400 of a prompt, alone or with its output, that no context holds. It begins as
    OpenAI's and vLLM's do: litellm, and agents that shorten a conversation and ask again, know it
    by these words and not by its code.
    """
    told = f"this model's maximum context length is {context_tokens} tokens: {message}"
    return bad_request(param, told, "context_length_exceeded")


def full(message: str, code: str) -> ApiError:
    """Return a 429 with a Retry-After."""
    return ApiError(429, message, code=code, retry_after_seconds=RETRY_AFTER_SECONDS)


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503 with a Retry-After."""
    return ApiError(503, message, code=code, retry_after_seconds=RETRY_AFTER_SECONDS)


def internal(message: str) -> ApiError:
    """Return the end of a request that this gateway has a defect with."""
    return ApiError(500, message, code="internal")


def left(code: str) -> ApiError:
    """Return the end of a request whose client is gone."""
    return ApiError(CLIENT_GONE, "the client closed the connection", code=code)


def suspect(workers: Iterable[str], last: str) -> ApiError:
    """Return the end of a request that workers may have failed because of."""
    names = sorted(workers)
    many = "s" if len(names) > 1 else ""
    message = (
        f"{len(names)} worker{many} failed under this request ({', '.join(names)}), so it is not"
        f" tried on another; the last: {last}"
    )
    return ApiError(500, message, code=SUSPECT_REQUEST, is_final=True)


def suspect_again() -> ApiError:
    """Return the answer to a request that was found suspect and is sent again and again."""
    message = "workers failed under this request each time it was sent: it is refused for a while"
    return bad_request(None, message, SUSPECT_REQUEST)


def worker_error(worker_id: str, code: ErrorCode, message: str) -> ApiError:
    """Return what a client is told when a worker ended its request with an error row."""
    status = _STATUS_BY_CODE.get(code, 500)
    text = message or code.name.lower().replace("_", " ")
    return ApiError(
        status,
        f"worker {worker_id}: {text}",
        code=code.name.lower(),
        retry_after_seconds=RETRY_AFTER_SECONDS if status in (429, 503) else None,
    )
