"""The GPU engine's page: every number is the run's, goals that are missed say so and why."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import page
import page_record
import page_steps
import plots
from page_text import Goal

PLAIN: dict[str, Any] = {
    "us": 5000.0, "roof_us": 4500.0, "eager_us": 9000.0, "context": 2048, "drafts": 0,
    "makes_drafts": False, "choice": "GREEDY", "top": -1, "prefill": 0, "batch": 64,
}  # fmt: skip
KERNELS = [
    {"name": "MatmulFewKernel<32>", "launches": 72.0, "us": 3000.0},
    {"name": "DecodeAttentionKernel<x>", "launches": 36.0, "us": 1500.0},
    {"name": "ArgmaxKernel<8>", "launches": 1.0, "us": 500.0},
]
LOGPROB = [{"name": "LogprobKernel", "launches": 1.0, "us": 15.0}]


def step(kind: str, **given: Any) -> dict[str, Any]:
    return PLAIN | {"kind": kind} | given


def phase(rows: int, idle: float, **given: Any) -> dict[str, Any]:
    told = {"rows": rows, "k": 0, "top": -1, "overlap": True, "tokens_per_s": 6543.2}
    return told | {"step_ms": 9.9, "idle_share": idle} | given


def steps() -> list[dict[str, Any]]:
    made = [step("goal", kernels=KERNELS), step("goal", batch=128, us=6e3)]
    made += [step("drafts", drafts=k, us=5e3 + 500 * k) for k in (0, 3)]
    made += [step("drafts", drafts=3, us=7e3, makes_drafts=True)]
    made += [step("logprobs", kernels=KERNELS)]
    made += [step("logprobs", us=5010.0, top=0, kernels=KERNELS + LOGPROB)]
    made += [step("sampler", choice=choice) for choice in ("GREEDY", "SAMPLED")]
    made += [step("prefill", batch=1, prefill=2048, tflops=590.0, us=50e3)]
    made += [step("context", batch=8, error="OutOfMemoryError: no")]
    return made


@pytest.fixture
def record() -> dict[str, Any]:
    return {
        "machine": dict.fromkeys(("gpu", "driver", "cuda", "torch", "python"), "x"),
        "commit": "abc",
        "roof": {"read": 4.5e12, "copy": 4e12},
        "repeats": 9,
        "steps": steps(),
        "baselines": [
            {"batch": 64, "rows": 1, "context": 2048, "us": 6000.0},
            {"batch": 1, "rows": 2048, "context": 2048, "us": 59e3},
        ],
        "phases": [
            phase(64, 0.02),
            phase(256, 0.05),
            phase(256, 0.2, overlap=False),
            {"rows": 64, "k": 3, "top": 0, "overlap": True, "error": "RuntimeError: gone"},
        ],
        "transformers": {
            "version": "5.17.0",
            "phases": [
                {"rows": 64, "attention": "flash_torch", "cuda_graphs": True,
                 "tokens_per_s": 3271.6, "step_ms": 19.6, "steps": 60},
                {"rows": 256, "attention": "sdpa", "error": "ValueError: too slow"},
            ],
        },
    }  # fmt: skip


def gateway() -> dict[str, Any]:
    one = {"logprobs": 0, "rounds": 3, "engine": 17000.0, "gateway": 15300.0, "ratio": 0.9}
    return {
        "model": "qwen3-8b",
        "drafts": 0,
        "load": {"streams": 256},
        "summary": [one | {"ratios": [0.89, 0.9, 0.91]}],
    }


def test_the_page_tells_each_number_of_a_run(record: dict[str, Any]) -> None:
    text = page.page(record, "results/x.json", [gateway()])
    for row in (
        "| 64 | 5.00 | 4.50 | 90.0 % | 88.0 %: met | 6.00 | 1.20 | 9.00 |",
        "| 128 | 6.00 | 4.50 | 75.0 % | 90.0 %: missed | - | - | 9.00 |",
        "| 64 | 3 | yes | 7.00 | 1.40 |",
        "| 2,048 | 50.00 | 590 | 600 TFLOP/s: missed | 59.00 | 500 |",
        "| logprobs, k = 0 | 64 | 5.01 | 0.2 % | 0.3 %: met | 15 us, 0.3 % |",
        "| temperature and top-p, every row | 64 | 5.00 | 0.0 % | 2.0 %: met | - |",
        "| 64 | 0 | no | on | 6,543 | 9.90 | 2.0 % (3.0 %: met) |",
        "| 256 | 0 | no | off | 6,543 | 9.90 | 20.0 % |",
        "| 64 | flash_torch | yes | 3,272 | 19.60 | 2.00 |",
        "| qwen3-8b | 256 | 0 | k = 0 | 3 | 17,000 | 15,300 | 90.0 % (89.0 % to 91.0 %) |",
    ):
        assert row in text
    assert "cost 1.30 times one (goal 1.20: missed)" in text


def test_goals_say_by_how_much_and_what_is_missed_is_explained_in_its_words(
    record: dict[str, Any],
) -> None:
    written = "# Notes\n\n## rows\n\nToo many.\n\n## gateway\n\nSSE.\n"
    text = page.page(record, "results/x.json", [gateway()], written)
    for words in (
        "decode step's share of the roof, batch 64 | >= 88.0 % | 90.0 % | met | 2.00 points |",
        "| >= 600 TFLOP/s | 590 TFLOP/s | **missed** | 10 TFLOP/s, 1.7 % |",
        "(K = 3) at batch 64, over one, by 0.10, 8.3 %.** Too many.",
        "logprobs k = 0, by 5.00 points.** SSE.",
    ):
        assert words in text
    assert "by 2.00 points.** Not explained yet." in text, "the GPU idles 5 %, which has no words"


def test_words_for_goals_that_are_met_stay_away(record: dict[str, Any]) -> None:
    record["steps"] = [s for s in record["steps"] if s["kind"] != "drafts"]
    assert "Too many." not in page.page(record, "results/x.json", (), "## rows\n\nToo many.\n")


def test_the_words_that_are_kept_are_of_subjects_that_goals_have(record: dict[str, Any]) -> None:
    run = page.Run(record, [gateway()])
    for section in page.SECTIONS:
        section(run)
    written = page.bounds_of(page.BOUNDS.read_text())
    assert written
    assert set(written) <= {goal.subject for goal in run.goals}
    assert all(written.values())
    assert "](canonical-matmul.md)" in written["rows"], "the page lies elsewhere than its words"


def test_what_was_not_measured_is_told(record: dict[str, Any]) -> None:
    text = page.page(record, "results/x.json").partition("## Not measured")[2]
    assert "- context, batch 8, 2048 tokens of context: OutOfMemoryError: no" in text
    assert "- the loop, 64 requests, K = 3, logprobs 0, overlap on: RuntimeError: gone" in text
    assert "- transformers, sdpa, requests: 256: ValueError: too slow" in text


def test_a_steps_time_goes_where_its_kernels_say(record: dict[str, Any]) -> None:
    text = page.page(record, "results/x.json").partition("## Where a step's time goes")[2]
    assert "| products | 3.00 (60 %) |" in text
    assert "| attention | 1.50 (30 %) |" in text
    assert "| sampling, bookkeeping | 0.50 (10 %) |" in text
    assert "- decode, batch 64: `MatmulFewKernel<32>` x 72: 3.00 (60 %), `DecodeAtt" in text


def test_kernels_that_go_and_come_are_set_against_each_other() -> None:
    other = [KERNELS[0], KERNELS[1], {"name": "SampleKernel", "launches": 1.0, "us": 620.0}]
    assert page_steps.added_us({"kernels": other}, {"kernels": KERNELS}) == 120.0
    assert page_steps.added_us({"kernels": other}, {}) is None


def test_a_goal_is_met_on_its_own_side() -> None:
    assert Goal("a", "s", 0.9, 0.88, "share", least=True).met
    assert not Goal("a", "s", 0.9, 0.88, "share", least=False).met
    assert Goal("a", "s", 1.2, 1.2, "ratio", least=False).met


def test_parts_that_a_run_has_not_are_left_out(record: dict[str, Any]) -> None:
    for part in ("phases", "transformers", "baselines"):
        del record[part]
    text = page.page(record, "results/x.json")
    assert "The engine's loop" not in text
    assert "transformers" not in text
    assert "gpu-batch.svg" not in text, "no such case was measured"
    assert "gpu-drafts.svg" in text


def test_a_record_that_is_whole_has_no_problems(record: dict[str, Any]) -> None:
    assert page_record.problems(record) == []
    assert page_record.gateway_problems(gateway()) == []
    results = Path(__file__).parents[2] / "docs" / "benchmarks" / "results"
    kept = json.loads((results / "gpu-engine-h200.json").read_text())
    assert page_record.problems(kept) == []
    kept = json.loads((results / "gpu-gateway-h200.json").read_text())
    assert page_record.gateway_problems(kept) == []


GONE = object()


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (["machine", "driver"], GONE, "machine.driver is missing"),
        (["machine"], [], "machine: [] is no object"),
        (["roof", "copy"], 0, "roof.copy: 0 is not a number above 0"),
        (["repeats"], None, "repeats: None is not a whole number"),
        (["commit"], GONE, "commit is missing"),
        (["steps"], [], "steps: [] is no list of at least 1"),
        (["steps", 0, "us"], float("nan"), "steps[0].us: nan is not a number above 0"),
        (["steps", 0, "eager_us"], GONE, "steps[0].eager_us is missing"),
        (["steps", 0, "kernels", 1, "us"], "1", "steps[0].kernels[1].us: '1' is not a number of"),
        (["steps", 6, "top"], 5, "steps[6].top: 5 is not one of -1, 0, 20"),
        (["steps", 7, "choice"], "x", "steps[7].choice: 'x' is not one of GREEDY, SAMPLED,"),
        (["steps", 9, "tflops"], GONE, "steps[9].tflops is missing"),
        (["steps", 10, "kind"], GONE, "steps[10].kind is missing"),
        (["baselines"], "x", "baselines: 'x' is no list"),
        (["phases", 0, "idle_share"], float("inf"), "phases[0].idle_share: inf is not"),
        (["transformers", "phases"], GONE, "transformers.phases is missing"),
        (["transformers", "phases", 0, "rows"], None, "transformers.phases[0].rows: None is not"),
        (["phazes"], [], "phazes is no part of the page"),
    ],
)
def test_what_is_missing_or_wrong_is_named_by_its_field(
    record: dict[str, Any], place: list[Any], value: Any, problem: str
) -> None:
    record["steps"] = [copy.deepcopy(one) for one in record["steps"]]  # they share kernels
    holder: Any = record
    for key in place[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    (told,) = page_record.problems(record)
    assert told.startswith(problem)


def test_a_gateways_record_without_rounds_is_refused() -> None:
    empty = gateway()
    empty["summary"][0]["ratios"] = []
    (told,) = page_record.gateway_problems(empty)
    assert told == "summary[0].ratios: [] is no list of at least 1"


@pytest.mark.parametrize("text", ['{"machine": {}}', '{"machine": ', "[]"])
def test_a_record_that_is_refused_leaves_page_and_pictures_as_they_are(
    tmp_path: Path, text: str
) -> None:
    place = tmp_path / "benchmarks"
    place.mkdir()
    (place / "gpu-engine.md").write_text("before")
    (place / "run.json").write_text(text)
    with pytest.raises(SystemExit, match=r"\[page\] .*run.json: "):
        page.main([str(place / "run.json"), str(tmp_path)])
    assert (place / "gpu-engine.md").read_text() == "before"
    assert not (tmp_path / "images").exists()


def whole_run() -> list[dict[str, Any]]:
    """Return cases of all that the pictures show, as a whole run has them."""
    made = [step("batch", batch=1 << n, context=1024, us=4e3 + 50 * 2**n) for n in range(10)]
    for batch, most in ((1, 8), (4, 8), (16, 6)):
        made += [
            step("context", batch=batch, context=1024 << n, us=4e3 + batch * 40 * 2**n)
            for n in range(most)
        ]
    for batch in (1, 8, 64):
        for makes in (False, True):
            made += [
                step("drafts", batch=batch, drafts=k, makes_drafts=makes, us=4e3 + 30 * batch * k)
                for k in range(int(makes), 6)
            ]
    return made


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_picture_shows_every_case_within_its_axes_and_names_every_line(name: str) -> None:
    drawn = plots.PICTURES[name](whole_run())
    assert drawn is not None
    root = ElementTree.fromstring(drawn)
    tag = "{http://www.w3.org/2000/svg}"
    lines = [e for e in root.iter(f"{tag}path") if e.get("stroke-width") == "2"]
    inside = [e for e in lines if e.get("fill") == "none"]
    expected = {"gpu-batch": (2, 2), "gpu-context": (6, 6), "gpu-drafts": (9, 9)}[name]
    assert (len(inside), len(lines) - len(inside)) == expected
    marks = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in root.iter(f"{tag}circle")]
    shown = [c for c in whole_run() if c["kind"] == name.removeprefix("gpu-")]
    named = sum(e.get("stroke-dasharray") is None for e in lines) - sum(
        e.get("stroke-dasharray") is None for e in inside
    )
    assert len(marks) == len(shown) + named
    for across, down in marks:
        assert plots.LEFT <= across <= plots.WIDTH
        assert plots.TOP <= down <= plots.HEIGHT - plots.BOTTOM


@pytest.mark.parametrize("name", plots.PICTURES)
def test_no_two_texts_of_a_picture_overlap(name: str) -> None:
    drawn = plots.PICTURES[name](whole_run())
    assert drawn is not None
    boxes = []
    for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"):
        size = float(text.get("font-size", "12"))
        width = 0.62 * size * len(text.text or "")  # of the widest letters of common fonts
        left = float(text.get("x", "0"))
        left -= {"middle": width / 2, "end": width}.get(text.get("text-anchor", ""), 0)
        down = float(text.get("y", "0"))
        boxes.append((left, down - size, left + width, down))
    for number, one in enumerate(boxes):
        assert one[0] >= 0
        assert one[2] <= plots.WIDTH
        for other in boxes[number + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0]
            assert apart or one[3] <= other[1] or other[3] <= one[1]
