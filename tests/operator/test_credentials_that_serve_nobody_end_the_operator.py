"""kopf ends where no credentials serve, and the operator with it: to be started again, not to stand
there without a watch of what it serves.
"""

from __future__ import annotations

import asyncio
import base64
import ssl

import kopf
import pytest
import yaml
from aiohttp import web

from baton_operator.cluster.parents import ParentStore
from baton_operator.reconciling.handlers import build_registry, kopf_settings
from baton_operator.reconciling.work_queue import WorkQueue

PATIENCE_SECONDS = 60.0


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    """Return a function that writes a KUBECONFIG of this cluster and user, and names it."""

    def write(server, cluster=None, user=None):
        body = {
            "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
            "users": [{"name": "u", "user": user or {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(body))
        monkeypatch.setenv("KUBECONFIG", str(path))

    return write


async def run_kopf():
    """Run kopf as the operator does, until it ends."""
    parents, queue = ParentStore(), WorkQueue(asyncio.get_running_loop())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await kopf.operator(
            registry=build_registry(parents, queue), settings=kopf_settings(), clusterwide=True
        )


def encoded(text):
    return base64.b64encode(text).decode()


BROKEN = {
    "an authority that is none": ({"certificate-authority-data": encoded(b"none")}, {}),
    "a certificate that is none": (
        {},
        {"client-certificate-data": encoded(b"none"), "client-key-data": encoded(b"none")},
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_credentials_that_no_session_can_be_made_with(case, kubeconfig):
    cluster, user = BROKEN[case]
    kubeconfig("https://127.0.0.1:1", cluster, user)
    with pytest.raises(ssl.SSLError):
        await run_kopf()


async def test_credentials_that_the_server_refuses(kubeconfig):
    asked = []

    async def refuse(request):
        asked.append(request.headers.get("Authorization"))
        status = {"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401}
        return web.json_response(status, status=401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        kubeconfig(
            f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", {}, {"token": "t"}
        )
        with pytest.raises(kopf.LoginError):
            await run_kopf()
    finally:
        await runner.cleanup()
    assert set(asked) == {"Bearer t"}
    assert len(asked) < 50, "the same credentials are not tried for ever"
