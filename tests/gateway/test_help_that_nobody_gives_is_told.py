"""A gateway that is told when decode helps, and has no decode worker that does, says so once."""

from __future__ import annotations

import logging

import pytest

from baton_testing.scripted_link import worker_info
from baton_worker.config_decode_prompts import DecodePromptsConfig
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS, FEATURES

WILLING = {"features": (*FEATURES, DECODE_PROMPTS)}
ASKED = DecodePromptsConfig(behind_tokens=100)


def told(caplog):
    return [one.message for one in caplog.records if "decode_prompts" in one.message]


@pytest.fixture
def started(start_gateway, caplog):
    """Return what a gateway with its first pair has told of help."""

    def start(config, **facts):
        with caplog.at_level(logging.WARNING, "baton_worker.gateway.serving.apply"):
            gateway = start_gateway(info=facts, decode_prompts=config)
            return gateway, told(caplog)

    return start


def test_it_is_told_once_whose_setting_is_missing(started, caplog):
    gateway, lines = started(ASKED)
    (line,) = lines
    assert "set their engine.decode_prompt_chunk_tokens" in line
    with caplog.at_level(logging.WARNING, "baton_worker.gateway.serving.apply"):
        gateway.link.up("decode-1", Role.DECODE, **WILLING)
        gateway.link.announce("decode-1", worker_info("decode-1", Role.DECODE))
        asked = gateway.ask({"model": "tiny", "prompt": [60], "max_tokens": 1})  # behind both
        assert asked.result().json()["choices"]
    assert told(caplog) == lines


def test_slowness_alone_asks_for_help_too(started):
    assert len(started(DecodePromptsConfig(slowness=3.0))[1]) == 1


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (DecodePromptsConfig(), {}),
        (DecodePromptsConfig(0, 3.0), {}),
        (ASKED, WILLING),
    ],
    ids=["by default", "never", "decode helps"],
)
def test_nothing_is_told_where_nothing_is_missing(started, config, facts):
    assert started(config, **facts)[1] == []


def test_nothing_is_told_before_there_is_a_pair(start_gateway, caplog):
    with caplog.at_level(logging.WARNING, "baton_worker.gateway.serving.apply"):
        gateway = start_gateway(workers="p", decode_prompts=ASKED)
        gateway.link.up("decode-0", Role.DECODE, **WILLING)
        reply = gateway.ask({"model": "tiny", "prompt": [60], "max_tokens": 1}).result()
        assert reply.status_code == 200
    assert told(caplog) == []
