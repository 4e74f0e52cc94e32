"""No label of a metric has values that clients make up: their number is the code's, not theirs."""

import http.client
import json
from urllib.parse import quote, urlsplit

N = 1000
"""Of each kind; one connection, so that it takes a second or two."""


def series(registry):
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for metric in registry.collect()
        for sample in metric.samples
    }


def wishes(i):
    """A request of each kind that is refused, none like those before it."""
    paths = [f"/v1/p{i}", f"/v1/models/m{i}", f"/{quote(chr(0x4E00 + i))}?q={i}"]
    yield from (("GET", path, None) for path in paths)
    yield f"M{i}", "/v1/completions", None
    bodies = [
        {"prompt": {f"field{i}": i}},
        {"model": f"model{i}", "prompt": "a"},
        {"prompt": "a", "n": -1 - i},
        {"prompt": "a", "stop": f"s{i}" * 256},
        {"prompt": [1, 2, 512 + i]},
        {"messages": [{"role": "user", f"f{i}": i}]},
    ]
    for at, body in enumerate(bodies[i % 3 :: 3]):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield "POST", f"{path}?{at}", json.dumps(body)


def ask(connection, i):
    for method, path, body in wishes(i):
        connection.request(method, path, body, {"Authorization": f"Bearer k{i}"})
        reply = connection.getresponse()
        assert 400 <= reply.status < 500, (method, path, body)
        reply.read()


def test_a_path_or_method_that_nothing_answers_is_counted(start_gateway):
    """As clients have that leave `/v1` out; which path it is the answer tells them."""
    gateway = start_gateway()
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=60)
    wrong = [("POST", "/chat/completions"), ("GET", "/v1/completions")]
    for n, (method, path) in enumerate(wrong, 1):
        connection.request(method, path)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["message"].split(":")[0]) == (
            404 if path == "/chat/completions" else 405,
            f"{method} {path}",
        )
        assert gateway.metric("baton_gateway_refusals_total", reason="no_route") == n
    connection.close()


def test_thousands_of_paths_methods_models_and_fields_add_no_series(start_gateway):
    gateway = start_gateway()
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=60)
    for i in range(6):
        ask(connection, i)
    known = series(gateway.registry)
    for i in range(6, N):
        ask(connection, i)
    connection.close()
    assert series(gateway.registry) == known
