"""The battery of two GPUs: its order, its time, what is left of a program that is ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import battery_two
import bench_kills
import bench_ratios
import page_pair
from battery_two import Step

PROGRAM = """
import json, sys
words = sys.argv[1:]
path = words[words.index("--json") + 1]
told = {"commit": "x", "engine": "cpu", "model": "tiny", "machine": {}}
told |= {"ttft": [{"prompt": 1}], "seconds": {"one": 1.0}, "words": words, "unmeasured": []}
open(path, "w").write(json.dumps(told))
sys.exit(3 if "fail" in words else 0)
"""
WORDS = {"ENGINE": "gpu", "MODEL": "qwen3-8b", "FOLDER": "/m", "LAYERS": "36"}


@pytest.fixture
def battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run steps of a scripted program and return the JSON that is left."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(battery_two, "ROOT", tmp_path)

    def run(*steps: Step, words: tuple[str, ...] = ()) -> dict[str, Any]:
        monkeypatch.setattr(battery_two, "STEPS", steps)
        told = ["--out", str(tmp_path / "out"), "--model", "tiny", "--engine", "cpu", *words]
        code = battery_two.main(told)
        whole: dict[str, Any] = json.loads((tmp_path / "out" / battery_two.NAME).read_text())
        assert code == int(bool(whole["unmeasured"]))
        assert [path.name for path in (tmp_path / "out").iterdir()] == [battery_two.NAME]
        return whole

    return run


def step(name: str, *words: str, seconds: float = 60.0, **more: Any) -> Step:
    return Step(name, "program.py", (), seconds, on_cpu=words, **more)


def test_each_programs_json_is_in_the_whole_and_what_fails_is_told(battery: Any) -> None:
    whole = battery(
        step("first", "a"), step("second", "b", "fail"), step("third", part="kills"),
        Step("absent", "no.py", (), 60.0), Step("device", "program.py", (), 60.0),
    )  # fmt: skip
    assert [one["prompt"] for one in whole["ttft"]] == [1, 1]
    assert whole["words"][0] == "a", "of what is not a list the first is kept"
    assert whole["kills"]["ttft"] == [{"prompt": 1}]
    assert [(one["name"], one["status"]) for one in whole["steps"]] == [
        ("first", 0), ("second", 3), ("third", 0),
    ]  # fmt: skip
    assert whole["unmeasured"] == [
        "second ended with status 3",
        "absent: not run: this checkout has no no.py",
        "device: not run: it needs GPUs",
    ]


def test_who_is_over_his_time_is_ended_with_all_that_he_started() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600'], close_fds=False).wait()"
    process = battery_two.begun([sys.executable, "-c", program], close_fds=False)
    os.close(writer)
    assert battery_two.ended(process, 0.0) < 0
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"", "nobody holds the other end: the child has ended too"


def test_nothing_begins_that_the_seconds_do_not_hold(battery: Any) -> None:
    whole = battery(step("first"), words=("--seconds", "16"))
    assert whole["steps"] == []
    assert whole["unmeasured"][0].startswith("first: not run: no time is left")


def test_the_steps_are_in_order_of_worth_and_together_in_a_call_of_ten_minutes() -> None:
    steps = battery_two.steps_of(battery_two.parsed(["--out", "x"]))
    assert [one.name for one in steps[:3]] == ["idle", "loaded", "kills"]
    assert sum(one.seconds for one in steps[:3]) <= 520
    assert "helped" not in [one.name for one in steps], "it measures again what another does"
    options = battery_two.parsed(["--out", "x", "--only", "helped"])
    (helped,) = battery_two.steps_of(options)
    assert battery_two_pair(battery_two.command(helped, WORDS, 9.0, Path("x"))).decode_chunk == 512
    options = battery_two.parsed(["--out", "x", "--only", "zmq", "kills", "--skip", "zmq"])
    assert [one.name for one in battery_two.steps_of(options)] == ["kills"]


@pytest.mark.parametrize("one", battery_two.STEPS, ids=lambda one: one.name)
def test_every_program_takes_what_it_is_told(one: Step) -> None:
    """Those of this checkout that are tried without a GPU; the others want one to be imported."""
    told = battery_two.command(one, WORDS, 90.0, Path("x.json"))
    assert not {*WORDS} & {*told}
    cpu = battery_two.command(
        one, {**WORDS, "ENGINE": "cpu", "MODEL": "tiny", "FOLDER": ""}, 90.0, Path("x.json")
    )
    assert "--folder" not in cpu
    if one.program == battery_two.PAIR:
        options = battery_two_pair(told)
        assert (options.folder, options.layers) == (Path("/m"), 36)
        assert one.on_cpu is None or battery_two_pair(cpu).model == "tiny"
    elif one.name == "kills":
        assert bench_kills.parsed(told[2:]).seconds == 90.0
        assert bench_kills.parsed(cpu[2:]).engine == "sim"


def battery_two_pair(words: list[str]) -> Any:
    import bench_pair

    return bench_pair.parsed(words[2:])


def test_runs_of_parts_come_together_if_they_are_of_one_commit_and_machine() -> None:
    head = {"commit": "x", "engine": "gpu", "model": "m", "machine": {"gpu": "y"}}
    one = head | {"ttft": [1], "steps": [{"name": "idle"}], "unmeasured": ["a"], "sizes": {"s": 1}}
    other = head | {"kills": {"wanted": 2}, "steps": [{"name": "kills"}], "unmeasured": []}
    whole = battery_two.together([one, other])
    assert whole == head | {"ttft": [1], "kills": {"wanted": 2}, "sizes": {"s": 1},
                            "steps": [{"name": "idle"}, {"name": "kills"}],
                            "unmeasured": ["a"]}  # fmt: skip
    with pytest.raises(ValueError, match="commit is 'z' in one, 'x' in another"):
        battery_two.together([one, other | {"commit": "z"}])


OF_TWO_EACH = {
    4: ["2 mixed of 2 GPUs each", "1P+1D of 2 GPUs each"],
    8: ["4 mixed of 2 GPUs each", "2P+2D of 2 GPUs each"],
}


@pytest.mark.parametrize(
    ("n_gpus", "names"),
    [
        (2, ["2 mixed", "1P+1D"]),
        (4, ["4 mixed", "2P+2D", "3P+1D", "1P+3D", *OF_TWO_EACH[4]]),
        (8, ["8 mixed", "4P+4D", "7P+1D", "1P+7D", *OF_TWO_EACH[8]]),
    ],
)
def test_every_ratio_stands_on_all_gpus(n_gpus: int, names: list[str]) -> None:
    found = bench_ratios.cases(n_gpus)
    assert [case.name for case in found] == names
    assert {case.gpus for case in found} == {n_gpus}


@pytest.mark.e2e
def test_ratios_are_measured_and_told(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    words = ["--model", "tiny", "--engine", "cpu", "--gpus", "0,1", "--clients", "1"]
    words += ["--seconds", "3000", "--json", str(results / "r.json")]
    assert bench_ratios.main(words) == 0
    told = json.loads((results / "r.json").read_text())
    assert [(one["name"], one["mix"]["name"]) for one in told["ratios"]] == [
        (case, mix.name) for case in ("2 mixed", "1P+1D") for mix in bench_ratios.MIXES["tiny"]
    ]
    rates = {one["arriving"]["requests_per_s"] for one in told["ratios"]}
    assert len(rates) == len(bench_ratios.MIXES["tiny"]), "each mix comes at one rate to all"
    (results / "x.json").write_text(json.dumps({
        "machine": {"cores": "2"}, "commit": "x", "model": "tiny", "sizes": {"wide": {}},
        "steps": [], "unmeasured": [],
    }))  # fmt: skip
    page_pair.main([str(results / "x.json"), str(tmp_path), "--ratios", str(results / "r.json")])
    text = (tmp_path / "benchmarks" / "several-gpus.md").read_text()
    assert "### Long prompts, short answers: 128 tokens in, 8 out" in text
    assert text.count("| 1P+1D | 2 |") == 2
    assert text.count("| second behind it p50, ms | p99 |") == 2
    assert "which ratio of prefill to decode" not in text, "it is there, so it is not missing"


@pytest.mark.e2e
def test_workers_are_killed_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    words = ["--engine", "sim", "--cells", "1", "--kills", "4", "--seconds", "3000"]
    assert bench_kills.main([*words, "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert (told["problems"], told["unmeasured"]) == ([], [])
    (one,) = told["kills"]
    killed = [kill["name"] for kill in one["kills"]]
    assert sorted(killed) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert one["served"] > 0
    assert one["ends"]["whole"] >= one["served"]
    assert len(one["start_seconds"]) == 2


def test_what_was_lost_or_left_is_a_problem() -> None:
    fine = {"first": [], "leaks": [], "ended": {}}
    memory = {"before": [4, 4], "after": [4, 60]}
    told = {"kills": [fine], "memory_mib": memory}
    assert bench_kills.problems(told) == []
    for wrong in ({"first": ["r1: lost"]}, {"leaks": ["3 blocks"]}, {"ended": {"decode-0": 1}}):
        assert len(bench_kills.problems({"kills": [fine, fine | wrong], "memory_mib": memory})) == 1
    leaked = {"before": [4, 4], "after": [4, 600]}
    assert len(bench_kills.problems({"kills": [fine], "memory_mib": leaked})) == 1


def test_a_card_that_gives_memory_back_late_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([[600, 4], [4, 4]])
    monkeypatch.setattr(bench_kills, "memory_used_mib", lambda: next(seen))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert bench_kills.settled([4, 4]) == [4, 4]
