"""The server takes ten thousand levels in a template: such an object hides nobody from us."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import kopf
import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client

from baton_operator.cluster.api import PD_DEPLOYMENT
from baton_operator.cluster.kopf_session import bounded_login
from baton_operator.cluster.kube import HttpKube
from baton_operator.cluster.nesting import DEEPEST, bounded
from baton_operator.models import InvalidSpec, parse_deployment
from baton_operator.models.parse import DEEPEST_SPEC

PATIENCE_SECONDS = 60.0
LEVELS = 9_980


def nested(levels):
    return '{"a":' * levels + "1" + "}" * levels


def levels_of(value):
    inside = value.values() if isinstance(value, dict) else value
    is_level = isinstance(value, dict | list)
    return 1 + max(map(levels_of, inside), default=0) if is_level else 0


def pdd(template, name="deep"):
    """Return the text of an object whose prefill has this template."""
    body = {
        "metadata": {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": "7"},
        "spec": {
            "image": "i",
            "model": {"servedName": "m", "path": "/m"},
            "roles": [{"name": "prefill", "template": "@"}, {"name": "decode"}],
        },
    }
    return json.dumps(body).replace('"@"', template)


@pytest.mark.parametrize("levels", [1, DEEPEST - 1, DEEPEST])
def test_what_can_be_read_stays_as_it_is(levels):
    text = nested(levels).encode()
    assert bounded(text) is text


@pytest.mark.parametrize(
    "text",
    ['{"}":' * 300 + "1" + "}" * 300, '{"a\\\\":' * 300 + "1" + "}" * 300, "[{" * 150 + "}]" * 150],
    ids=["a bracket in each key", "an escape in each key", "lists and objects in turn"],
)
def test_nothing_hides_how_deep_it_is(text):
    text = text.replace("[{", '[{"a":').replace('"a":}', '"a":1}')
    assert json.loads(text)
    assert levels_of(json.loads(bounded(text.encode()))) == DEEPEST


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.recursive(
        st.text('{}[]"\\a', max_size=6) | st.integers(0, 9) | st.none(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text('{}[]"\\a', max_size=4), inner, max_size=4)
        ),
        max_leaves=300,
    )
)
def test_what_can_be_read_is_kept_whatever_its_texts(value):
    wide = [value] * (DEEPEST + 1)
    wide.append([[]] * DEEPEST)
    text = json.dumps(wide, ensure_ascii=False).encode()
    assert bounded(text) is text


@pytest.mark.parametrize("levels", [DEEPEST + 1, LEVELS])
def test_what_lies_too_deep_is_null(levels):
    found = json.loads(bounded(nested(levels).encode()))
    assert levels_of(found) == DEEPEST
    assert b"null" in bounded(nested(levels).encode())


def test_what_stands_beside_it_is_kept():
    text = f'[{nested(LEVELS)}, {{"b": [1, "]}}"]}}, {nested(LEVELS)}, "}}"]'
    found = json.loads(bounded(text.encode()))
    assert found[1] == {"b": [1, "]}"]}
    assert found[3] == "}"


def test_brackets_in_texts_are_no_levels():
    value = {"a": "{[" * 2 * DEEPEST, 'b\\"{': ["\\", "é{", '\\"'], "c": {}}
    text = json.dumps(value, ensure_ascii=False).encode()
    assert json.loads(bounded(text)) == value


@pytest.mark.parametrize("text", [b"{" * 1000, b"}" * 1000, b'"' + b"[" * 1000, b"[" * 9 + b"\xff"])
def test_what_is_no_json_does_not_become_some(text):
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        json.loads(bounded(text))


def test_a_text_that_is_cut_is_read_once():
    """By trying again at each of its quotes, these 400 KB took longer than a lease lasts."""
    whole = json.dumps({"a": json.dumps([{"b": [["c"]]}] * 20_000)}).encode()
    cut = whole[: len(whole) // 2]
    assert bounded(cut) == cut


@pytest.mark.parametrize("levels", [DEEPEST_SPEC, 900])
def test_a_spec_that_is_nested_too_deep_is_invalid(levels):
    with pytest.raises(InvalidSpec, match=f"deeper than {DEEPEST_SPEC} levels"):
        parse_deployment(json.loads(pdd(nested(levels))))


def test_a_spec_that_is_nested_as_any_pods_is_valid():
    assert parse_deployment(json.loads(pdd(nested(50)))).key.name == "deep"


async def asked(answer, ask):
    """Let a server answer each request with this text; return what `ask` makes of its address."""

    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for start in range(0, len(answer), 7_001):  # a line comes in pieces
            await response.write(answer[start : start + 7_001])
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def by_kopf(read, query=""):
    """Return what asks a server by kopf's session, and `read`s the answer."""

    async def ask(url):
        login = bounded_login(kopf.ConnectionInfo(server=url))
        async with login.aiohttp_session as session, session.get(f"{url}/?{query}") as response:
            return await read(response)

    return ask


async def test_kopf_reads_a_list_with_such_an_object_in_it():
    page = f'{{"items": [{pdd(nested(LEVELS))}, {pdd("{}", "good")}]}}'.encode()
    items = (await asked(page, by_kopf(lambda response: response.json())))["items"]
    assert [item["metadata"]["name"] for item in items] == ["deep", "good"]
    with pytest.raises(InvalidSpec):
        parse_deployment(items[0])
    assert parse_deployment(items[1]).key.name == "good"


async def test_kopf_reads_a_watch_with_such_an_object_in_it():
    events = [f'{{"type":"ADDED","object":{body}}}' for body in (pdd(nested(LEVELS)), pdd("{}"))]
    stream = ("\n".join([*events, '{"type":"BOOK'])).encode()

    async def read(response):
        return b"".join([chunk async for chunk in response.content.iter_chunked(1 << 20)])

    first, second, rest = (await asked(stream, by_kopf(read, "watch=true"))).split(b"\n")
    assert levels_of(json.loads(first)["object"]["spec"]["roles"][0]) > DEEPEST_SPEC
    assert second.decode() == events[1]
    assert rest == b'{"type":"BOOK'


async def test_our_own_reads_of_such_an_object_answer():
    text = pdd(nested(LEVELS))
    page = f'{{"metadata": {{}}, "items": [{text}]}}'.encode()

    async def with_kube(url, use):
        configuration = client.Configuration(host=url)
        kube = HttpKube(client.ApiClient(configuration), lambda *_: None)
        try:
            return await use(kube)
        finally:
            await kube.close()

    async def get(kube):
        return await kube.get(PD_DEPLOYMENT, "ns", "deep")

    async def listed(kube):
        return await kube.list_page(PD_DEPLOYMENT, "", "", is_metadata_only=True, token="")

    body = await asked(text.encode(), lambda url: with_kube(url, get))
    assert body["metadata"]["name"] == "deep"
    (item,) = (await asked(page, lambda url: with_kube(url, listed))).items
    assert msgspec.json.decode(item)["metadata"]["name"] == "deep"


async def test_a_session_by_the_same_credentials_is_the_same_login():
    """kopf asks for credentials again when some were refused, and tries only others."""
    logins = [bounded_login(kopf.ConnectionInfo(server="http://x", token=token)) for token in "aab"]
    assert logins[0] == logins[1] != logins[2]
    assert not any("aiohttp_session" in vars(each) for each in logins), "none was asked with"
    assert all(isinstance(each.aiohttp_session, aiohttp.ClientSession) for each in logins)
    for login in logins:
        await login.aiohttp_session.close()
