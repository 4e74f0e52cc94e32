"""A page of another site makes its reader's browser send what no server is asked about before."""

import json

import pytest

from baton_testing.scripted_link import EOS

BODY = json.dumps({"prompt": "the quick", "max_tokens": 4}).encode()
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
UNASKED = [
    None,
    "",
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; application/json",
    "text/plain, application/json",
]
OF_BROWSERS = [
    {"origin": "http://elsewhere.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:9", "sec-fetch-site": "same-site"},
]


@pytest.fixture
def gateway(start_gateway):
    return start_gateway(lambda submit: [70, 71, EOS])


def sent(gateway, path, headers, content_type, content=BODY):
    typed = {} if content_type is None else {"content-type": content_type}
    with gateway.http() as client:
        return client.post(path, content=content, headers=headers | typed)


@pytest.mark.parametrize("content_type", UNASKED)
def test_what_a_page_may_send_anywhere_is_refused(gateway, content_type):
    for headers in OF_BROWSERS:
        for path in PATHS:
            answer = sent(gateway, path, headers, content_type)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (415, "content_type")
            assert repr(content_type or "") in error["message"]
            assert error["type"] == "invalid_request_error"
    n = len(OF_BROWSERS) * len(PATHS)
    assert gateway.metric("baton_gateway_refusals_total", reason="content_type") == n
    assert gateway.link.commands == []


@pytest.mark.parametrize("content_type", UNASKED)
def test_who_is_no_browser_may_call_the_same_what_he_likes(gateway, content_type):
    """curl's -d calls it a form, and a string that node fetches with is plain text: node sends
    Sec-Fetch-Mode, and neither of the others.
    """
    for headers in ({}, {"sec-fetch-mode": "cors"}):
        assert sent(gateway, "/v1/completions", headers, content_type).status_code == 200


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON ; charset=utf-8", "application/json;a=b"]
)
@pytest.mark.parametrize("headers", OF_BROWSERS)
def test_json_is_served_for_a_browser_asks_before_it_sends_that(gateway, headers, content_type):
    assert sent(gateway, "/v1/completions", headers, content_type).status_code == 200


def test_who_asks_before_is_promised_nothing(gateway):
    asked = {
        "origin": "http://elsewhere.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    with gateway.http() as client:
        for path in PATHS:
            answer = client.options(path, headers=asked)
            assert answer.status_code == 405
            assert not [name for name in answer.headers if name.startswith("access-control")]
