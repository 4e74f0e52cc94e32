"""The command line teaches, and refuses with the flag's or the field's name."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.local.command import how_it_ended
from baton_worker.local.flags import local_options
from baton_worker.local.layout import plan_processes
from baton_worker.logs import JsonFormatter, TextFormatter
from baton_worker.main import build_parser, main
from baton_worker.readiness import EXIT_BAD_CONFIG


@pytest.mark.parametrize(
    "command", ["prefill", "decode", "mixed", "gateway", "local", "control", "keygen"]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    assert "usage: baton-worker " + command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local", "--model", "m", "-k", "6"], "--num-speculative-tokens is 6, not in 0..5"),
        (["local", "--model", "m", "--decode", "0"], "a prefill and a decode process, or a mixed"),
        (["local", "--model", "m", "--max-top-k", "65"], "--max-top-k is 65"),
        (["local", "--model", "m", "--tp", "0"], "--tp is 0, not in 1..64"),
        (["local", "--model", "m", "--dead-after", "0"], "--dead-after is 0.0, not in 2..3600"),
        (["local", "--model", "m", "--dead-after", "nan"], "--dead-after is nan, not in 2..3600"),
        (["local", "--model", "m", "--sim", "seed=1"], "--sim seed=1 needs --engine sim"),
        (
            ["local", "--model", "m", "--engine", "sim", "--sim", "pace=1"],
            "--sim: pace is no field: it is one of prefill_token_seconds, decode_step_seconds",
        ),
        (
            ["local", "--model", "m", "--engine", "sim", "--sim", "decode_step_second=1"],
            "--sim: decode_step_second is no field: did you mean 'decode_step_seconds'?",
        ),
        (
            ["local", "--model", "m", "--engine", "sim", "--sim", "seed=x"],
            "--sim: seed is 'x': expected `int`, got `str`",
        ),
        (
            ["local", "--model", "m", "--engine", "sim", "--sim", "seed"],
            "--sim seed is not FIELD=VALUE",
        ),
        (
            ["local", "--model", "m", "--engine", "sim", "--sim", "seed=["],
            "--sim seed=[: the value is not YAML",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--kv-blocks", "64", "--tp", "3"],
            "--tp is 3, --engine gpu takes one of (1, 2, 4, 8)",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "0,1,2", "--tp", "2"],
            "--gpus is '0,1,2': --tp 2 needs a multiple of that",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "0,1", "--tp", "2"],
            "--engine gpu with 2 workers on one GPU needs --kv-blocks",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu"],
            "--engine gpu with 2 workers on one GPU needs --kv-blocks",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "0,1", "--prefill", "2"],
            "--engine gpu with 2 workers on one GPU needs --kv-blocks",
        ),
        (
            ["local", "--model", "m", "--gpus", "0,1"],
            "--gpus is '0,1', which needs --engine gpu",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "0,,1"],
            "--gpus is '0,,1': name each GPU once, as in 0,1",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "", "--kv-blocks", "9"],
            "--gpus is '': name each GPU once, as in 0,1",
        ),
        (
            ["local", "--model", "m", "--engine", "gpu", "--gpus", "1,1"],
            "--gpus is '1,1': name each GPU once, as in 0,1",
        ),
        (
            ["local", "--model", "m", "--gpu-memory", "0.5"],
            "--gpu-memory is 0.5, which needs --engine gpu",
        ),
        (
            [
                "local",
                "--model",
                "m",
                "--engine",
                "gpu",
                "--prefill",
                "0",
                "--decode",
                "0",
                "--mixed",
                "1",
                "--gpu-memory",
                "0.04",
            ],
            "--gpu-memory is 0.04, not in 0.05..0.98",
        ),
        (["control", "/nosuch", "drain"], "`baton-worker local` prints those of its workers"),
        (["local", "--model", "m", "--port", "70000"], "--port is 70000, not in 0..65535"),
        (["local", "--model", "m", "--max-running", "0"], "--max-running is 0, not in 1.."),
        (["local", "--model", "m", "--max-model-len", "-1"], "--max-model-len is -1, not in 0.."),
        (["local", "--model", "m", "--max-waiting", "0"], "--max-waiting is 0, not in 1.."),
        (["local", "--model", "m", "--kv-blocks", "-1"], "--kv-blocks is -1, not in 0.."),
        (["local", "--model", "m", "--prefill-chunk", "0"], "--prefill-chunk is 0, not in 1.."),
        (["keygen", "--out", "/dev/null/x", "--name", "a"], "--out /dev/null/x: "),
        (["keygen", "--out", ".", "--name", "../a"], "--name '../a' is no file's name"),
        (["keygen", "--out", ".", "--name", ""], "--name '' is no file's name"),
        (["prefill", "--config", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["prefill", "--config", "/dev/null"], "/dev/null: it is empty: model.path"),
    ],
)
def test_bad_arguments_end_with_a_named_error(arguments, message, capsys):
    assert main(arguments) == EXIT_BAD_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("role", ["prefill", "gateway"])
def test_a_model_that_is_no_folder_is_told_with_what_one_is(role, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    for model, told in (
        ("/nowhere", "model.path is '/nowhere', and there is no such folder: name one in Hugging"),
        ("Org/Model", f"is 'Org/Model', and there is no such folder in {tmp_path}: name one"),
        (str(path), "and there is no such folder: name one"),
        ("''", f"model.path is '', and there is no such folder in {tmp_path}: name one"),
    ):
        path.write_text(f"model: {{path: {model}}}\n")
        assert main([role, "--config", str(path)]) == EXIT_BAD_CONFIG
        assert told in capsys.readouterr().err


def test_a_model_seen_from_a_folder_that_is_gone_is_refused_too(tmp_path, monkeypatch, capsys):
    path, gone = tmp_path / "config.yaml", tmp_path / "gone"
    path.write_text("model: {path: Org/Model}\n")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["gateway", "--config", str(path)]) == EXIT_BAD_CONFIG
    assert "model.path is 'Org/Model': No such file or directory" in capsys.readouterr().err


def test_a_model_that_may_not_be_looked_at_says_so(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: /sealed/model}\n")

    def refuse(_self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["prefill", "--config", str(path)]) == EXIT_BAD_CONFIG
    assert "model.path is '/sealed/model': Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_pod_whose_hook_could_not_drain_it_is_refused_by_name(
    role, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: /nowhere}\n")
    monkeypatch.setenv("BATON_POD_NAME", "chat-1")
    assert main([role, "--config", str(path)]) == EXIT_BAD_CONFIG
    told = capsys.readouterr().err
    assert "control.socket is empty" in told
    assert "upgrade the operator first" in told
    path.write_text("model: {path: /nowhere}\ncontrol: {socket: /run/x}\n")
    assert main([role, "--config", str(path)]) == EXIT_BAD_CONFIG
    assert "control.socket" not in capsys.readouterr().err, "the model is what is missing now"


@pytest.mark.parametrize("flags", [["--log-level", "debug"], ["--log-format", "json"]])
@pytest.mark.parametrize("command", [["local", "--model", "m"], ["decode", "--config", "c"]])
def test_log_flags_stand_before_a_command_or_behind_it(command, flags):
    before, behind = (
        vars(build_parser().parse_args(line)) for line in (flags + command, command + flags)
    )
    assert before == behind
    assert before != vars(build_parser().parse_args(command))


@pytest.mark.parametrize(("flags", "told"), [(["--max-model-len", "64"], 64), ([], 0)])
def test_how_long_a_request_may_be_reaches_the_workers_of_a_local_deployment(flags, told):
    options = local_options(build_parser().parse_args(["local", "--model", "m", *flags]))
    plans = plan_processes(options, [5555], {})
    lengths = {plan.name: plan.config.engine.max_model_len for plan in plans}
    assert {lengths["prefill-0"], lengths["decode-0"]} == {told}


@pytest.mark.parametrize(("flags", "told"), [(["--dead-after", "20"], 20.0), ([], 3.0)])
def test_how_long_silence_may_last_reaches_every_process_of_a_local_deployment(flags, told):
    options = local_options(build_parser().parse_args(["local", "--model", "m", *flags]))
    plans = plan_processes(options, [5555], {})
    assert [plan.config.link.dead_after_seconds for plan in plans] == [told] * 3


def test_each_flag_of_a_local_deployment_is_explained_with_its_default():
    commands = next(a for a in build_parser()._actions if a.dest == "command")
    for action in commands.choices["local"]._actions:
        assert action.help, action.dest
        is_on = action.default not in (None, "", [], False, argparse.SUPPRESS)
        if is_on and action.dest != "prefix_caching":
            assert "%(default)s" in action.help, action.dest


def test_keygen_writes_a_pair_once(tmp_path, capsys):
    arguments = ["keygen", "--out", str(tmp_path), "--name", "gw"]
    assert main(arguments) == 0
    assert (tmp_path / "gw.secret").stat().st_mode & 0o077 == 0
    assert len((tmp_path / "gw.public").read_text().strip()) == 40
    assert main(arguments) == EXIT_BAD_CONFIG
    assert "never overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "told"),
    [(0, "code 0"), (78, "code 78"), (-4, "SIGILL"), (-9, "SIGKILL"), (-63, "signal 63")],
)
def test_how_a_process_ended_is_told_by_name(code, told):
    assert how_it_ended(code) == f"ended with {told}"


def record(**extra):
    return logging.makeLogRecord(
        {"name": "baton_worker.roles.loop", "levelname": "INFO", "msg": "draining", **extra}
    )


def test_text_lines_carry_the_facts_after_a_constant_message():
    line = TextFormatter("decode-0").format(record(requests=3, color_message="x"))
    assert line.endswith("INFO decode-0 roles.loop: draining requests=3")


def test_json_lines_are_objects_with_the_facts():
    entry = json.loads(JsonFormatter("decode-0").format(record(requests=3)))
    assert entry["message"] == "draining"
    assert entry["requests"] == 3
    assert entry["process"] == "decode-0"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "gateway"])
def test_a_signal_to_end_that_comes_before_its_handler_is_kept(tmp_path, role):
    """A container's first process would lose it, and any other end without a word."""
    path = tmp_path / "baton.yaml"
    path.write_text(
        f"model: {{path: {TINY_MODEL}}}\n"
        "engine: {device: sim}\n"
        "gateway: {http: {port: 0}}\n"
        "link: {gateways: ['tcp://127.0.0.1:1'], bind: 'tcp://127.0.0.1:*', "
        "curve: {enabled: false}}\n"
    )
    script = (
        "import os, signal, sys\n"
        "from baton_worker import main as program\n"
        "read = program.effective_config\n"
        "def told(options):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return read(options)\n"
        "program.effective_config = told\n"
        f"sys.exit(program.main([{role!r}, '--config', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ["decode", "gateway"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_waits_for_a_file_ends_at_once_when_it_is_told_to(tmp_path, role, number):
    """A configuration from a pipe, or any file of a network that is gone, may never come."""
    path = tmp_path / "baton.yaml"
    os.mkfifo(path)
    command = [sys.executable, "-m", "baton_worker.main", role, "--config", str(path)]
    process = subprocess.Popen(command)
    with path.open("wb"):  # returns when the process reads
        process.send_signal(number)
        try:
            assert process.wait(600) == 0
        finally:
            process.kill()
            process.wait()
