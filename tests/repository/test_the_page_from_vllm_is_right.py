"""What `docs/from-vllm.md` tells those who come from vLLM to write is taken, or refused, so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.intake.unsupported import NEUTRAL, refuse_unsupported
from baton_worker.gateway.request import Endpoint
from baton_worker.local.flags import local_options
from baton_worker.local.layout import plan_processes
from baton_worker.main import build_parser

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| vLLM")
]
LOCAL = 1


def flags_of_local(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["local", "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))


def test_every_flag_that_it_names_is_one_of_local(capsys: pytest.CaptureFixture[str]) -> None:
    told = {flag for row in ROWS for flag in re.findall(r"`(--?[a-z][\w-]*)`", row[LOCAL])}
    assert {"--prefill-chunk", "-k"} <= told
    assert told - flags_of_local(capsys) == set()


def test_a_dash_is_a_flag_that_local_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    there = flags_of_local(capsys)
    missing = {
        flag for row in ROWS if row[LOCAL] == "-" for flag in re.findall(r"`(--\S+)`", row[0])
    }
    assert missing
    assert missing & there == set()


def test_what_it_tells_to_run_on_two_gpus_gives_each_worker_one() -> None:
    (command,) = re.findall(r"^baton-worker (.*?(?:\\\n.*?)*)$", PAGE, re.MULTILINE)
    words = command.replace("\\\n", " ").split()
    options = local_options(build_parser().parse_args(words))
    plans = {plan.role: plan for plan in plan_processes(options, [1], {}, "/folder")}
    assert set(plans) == {"gateway", "prefill", "decode"}
    for role, gpu in (("prefill", "0"), ("decode", "1")):
        assert plans[role].environment["CUDA_VISIBLE_DEVICES"] == gpu
        engine = plans[role].config.engine
        assert (engine.device, engine.max_running, engine.max_model_len) == ("gpu", 256, 32768)


def test_fields_that_it_calls_refused_are_refused_by_name() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("- **Refused by name**")]
    told = set(re.findall(r"`(\w+)`", line)) - {"unsupported_parameter", "return_token_ids", "n"}
    for name in told - {"best_of"}:
        assert name in NEUTRAL
        with pytest.raises(ApiError, match=f"{name} is not supported") as refused:
            refuse_unsupported(Endpoint.CHAT, {name: "asks for something"})
        assert (refused.value.status, refused.value.code) == (400, "unsupported_parameter")
    with pytest.raises(ApiError, match="best_of other than n"):
        refuse_unsupported(Endpoint.COMPLETION, {"best_of": 2, "n": 1})
