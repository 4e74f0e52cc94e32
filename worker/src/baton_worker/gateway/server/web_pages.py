"""What a page of any site makes its reader's browser send unasked: it computes nothing here.

A browser asks a server before it sends JSON for a page of another site (CORS), and the gateway
agrees to nothing. It does not ask before it sends what a form could: so whoever has a page open
would compute at the gateway on his machine, or in his network, for whoever wrote that page.
"""

from __future__ import annotations

from starlette.datastructures import Headers

from baton_worker.gateway.errors import ApiError

_OF_BROWSERS = ("origin", "sec-fetch-site")
"""A browser says with every POST whose page it is for; others, who say neither, may call the same
body what they like."""

_TOLD = (
    "content-type is {given!r}: with an Origin or Sec-Fetch-Site header, as web pages send, it must"
    " be application/json"
)


def refuse_unasked(headers: Headers) -> None:
    """Check the headers of a request with a body.

    Raises:
        ApiError: 415: a browser's, in a form that pages may send anywhere.
    """
    given = headers.get("content-type", "")
    is_json = given.partition(";")[0].strip().lower() == "application/json"
    if not is_json and any(name in headers for name in _OF_BROWSERS):
        raise ApiError(415, _TOLD.format(given=given), code="content_type")
