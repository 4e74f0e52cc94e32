"""Nothing that is rendered or asked for assumes the cluster's IP family."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web
from prometheus_client import Counter

from baton_operator.children.resources import config, policies, services
from baton_operator.children.resources.meta import Owner
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import Role
from baton_operator.pods.probe import HttpPodProbe
from baton_operator.serving.connection_limiter import ConnectionLimiter
from baton_operator.serving.health import serve
from baton_worker.ports import port_of, reserve_port

OWNER = Owner("ns", "chat", "uid-1")
SPEC = msgspec.convert(
    {
        "image": "worker:1",
        "model": {"servedName": "chat", "path": "/models/chat"},
        "roles": [{"name": "prefill"}, {"name": "decode"}],
    },
    PDDeploymentSpec,
)


def test_workers_and_gateways_listen_on_every_address_of_both_families() -> None:
    worker = yaml.safe_load(config.worker_config(OWNER, SPEC, Role.DECODE, "r1"))
    gateway = yaml.safe_load(config.gateway_config(SPEC))
    assert worker["health"]["host"] == "*"
    assert gateway["link"]["bind"].startswith("tcp://*:")
    assert gateway["gateway"]["http"]["host"] == "*"


def test_services_take_both_families_where_the_cluster_has_both() -> None:
    for service in (services.client_service(OWNER, SPEC), services.link_service(OWNER)):
        assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
        assert "ipFamilies" not in service["spec"], "the cluster knows which it has"


def test_policies_name_pods_and_never_addresses() -> None:
    assert "ipBlock" not in str(policies.network_policies(OWNER, SPEC, "baton-system"))


@pytest.mark.parametrize("called", ["127.0.0.1", "::1"])
async def test_the_operators_own_probes_answer_over_both_families(called: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"remaining": 3})

    app = web.Application()
    app.add_routes([web.get("/drain", answer)])
    with reserve_port("127.0.0.1") as keeper:
        runner = await serve(
            app, "*", port_of(keeper), ConnectionLimiter(Counter("refused", "", registry=None))
        )
        try:
            async with aiohttp.ClientSession() as session:
                remaining = await HttpPodProbe(session, 30.0).remaining(called, port_of(keeper))
        finally:
            await runner.cleanup()
    assert remaining == 3
