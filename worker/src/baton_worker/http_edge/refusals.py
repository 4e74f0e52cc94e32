"""What a peer is told when a bound ends its request, framed as OpenAI frames errors."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from baton_worker.config import HttpLimits


@dataclass(frozen=True, slots=True)
class Refusal:
    """`reason` is the error's code and the counter's label; `message` may name HttpLimits."""

    status: int
    reason: str
    message: str

    def encode(self, limits: HttpLimits) -> bytes:
        """Return the whole response, which ends its connection and says what `limits` are."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = self.message.format_map(msgspec.structs.asdict(limits))
        error = {"message": message, "type": kind, "param": None, "code": self.reason}
        body = msgspec.json.encode({"error": error})
        again = "retry-after: 1\r\n" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{again}connection: close\r\n\r\n"
        )
        return head.encode() + body


CONNECTIONS = Refusal(503, "too_many_connections", "there are too many connections")
OF_ADDRESS = Refusal(503, "too_many_of_address", "there are too many connections of your address")
RECEIVING = Refusal(503, "receiving_too_much", "too many bodies are being received at once")
TARGET = Refusal(
    414,
    "target_too_long",
    "the request's path and query are longer than {max_target_bytes} bytes",
)
HEADERS = Refusal(
    431,
    "headers_too_large",
    "the request's headers are more than {max_headers}, or than {max_header_bytes} bytes",
)
BODY = Refusal(413, "body_too_large", "the body is larger than {max_body_bytes} bytes")
HEADERS_LATE = Refusal(
    408, "headers_timeout", "the request's headers took longer than {header_seconds:g} s"
)
BODY_LATE = Refusal(408, "body_timeout", "the request's body took longer than {body_seconds:g} s")
PIPELINED = Refusal(400, "too_many_pipelined", "too many requests were sent ahead of their answers")
TUNNEL = Refusal(400, "tunnel", "CONNECT asks a proxy for a tunnel, and this is none")
HOST = Refusal(400, "host", "a request has one Host header, which HTTP/1.0 may leave out")
EXPECTATION = Refusal(
    417, "unknown_expectation", "the Expect header asks for something else than 100-continue"
)
ENCODED = Refusal(
    415,
    "content_encoding",
    "the body is encoded (Content-Encoding, or Transfer-Encoding beside chunked): send it as it is,"
    " uncompressed",
)
MALFORMED = Refusal(400, "malformed", "this is no HTTP request")

ALL = (
    CONNECTIONS, OF_ADDRESS, RECEIVING, TARGET, HEADERS, BODY, HEADERS_LATE, BODY_LATE, PIPELINED,
    TUNNEL, HOST, EXPECTATION, ENCODED, MALFORMED,
)  # fmt: skip
