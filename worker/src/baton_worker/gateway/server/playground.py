"""The playground: one static page that streams tokens with their logprobs.

Owns the page's route and its Content-Security-Policy. The page is served as it is in the package:
no build step, and no address but the gateway's own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH = "/playground"


def playground_routes(is_enabled: bool) -> list[Route]:
    """Return the page's route; none when the playground is off, so that its path is a 404."""
    if not is_enabled:
        return []
    page = files("baton_worker.gateway").joinpath("static/playground.html").read_bytes()
    headers = {
        "content-security-policy": content_security_policy(page),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def serve(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return [Route(PATH, serve)]


def content_security_policy(page: bytes) -> str:
    """Return a policy that allows the page's own style and script by hash, and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hashes(page, b'style')}",
            f"script-src {_hashes(page, b'script')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(page: bytes, tag: bytes) -> str:
    bodies = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
