"""The page of a pair on two GPUs: every number is the run's, goals that are missed say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import page_pair
import plots


def quantile(value: float | None, low: float | None = None, high: float | None = None) -> Any:
    return {"value": value, "low": low, "high": high, "n": 20}


def handoff(count: float = 4.0) -> dict[str, Any]:
    ways = {"nvlink": 4e9, "zmq": 1e6}
    return {"count": count, "bytes": 4.001e9, "seconds": 0.1, "transfer_seconds": 0.04,
            "import_seconds": 0.06, "place_seconds": 0.008, "places": 4.0,
            "pulled_blocks": {"ahead": 9.0, "behind": 1.0},
            "held_up": {"bytes": 3.0}, "bytes_by_transport": ways, "bytes_per_s": 1e11}  # fmt: skip


def first_tokens(prompt: int, later: float) -> dict[str, Any]:
    gaps = [quantile(0.015), quantile(0.0042), quantile(0.0041)]
    one = {"first": quantile(0.030, 0.029, 0.031), "second": quantile(0.045), "between": gaps}
    return {"prompt": prompt, "chunk": 2048, "pair": one, "mixed": one,
            "difference": quantile(later, 0.001), "handed_over": quantile(0.0275),
            "handoff": handoff()}  # fmt: skip


def kills() -> dict[str, Any]:
    two = [{"role": "decode", "open_offers": 2.0}, {"role": "prefill", "open_offers": 0.0}]
    one = {"kills": two, "served": 400, "asked_again": 1, "ends": {"whole": 399, "worker_lost": 1},
           "violations": {}, "first": [], "leaks": [], "start_seconds": [6.0, 8.0],
           "retries": 9.0, "mismatches": 0.0}  # fmt: skip
    return {"wanted": 200, "cells": 2, "kills": [one, dict(one)], "problems": [],
            "kv": "nvlink", "forks": True,
            "memory_mib": {"before": [4, 4], "after": [4, 6]}}  # fmt: skip


def steady(way: str, chunk: int, p99: float, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "way": way, "chunk": chunk, "seconds": 20.0, "gap_p50": quantile(0.010, 0.009, 0.011),
        "gap_p99": quantile(p99), "together": 0.02, "pause_p99": quantile(0.013), "gap_most": 0.2,
        "gaps": [[0.01, 0.5], [p99, 0.01]],
        "tokens_per_s": tokens_per_s, "steady_tokens_per_s": 6000.0, "prompts": 56, "unserved": 0,
        "ttft_p50": quantile(0.4), "ttft_p99": quantile(0.8), "client_busy": 0.1,
        "prompts_per_s": 2.8,
    } | more  # fmt: skip


@pytest.fixture
def record() -> dict[str, Any]:
    return {
        "machine": dict.fromkeys(("gpu", "driver", "cuda", "torch"), "x"),
        "commit": "abc",
        "model": "qwen3-8b",
        "sizes": {"streams": 64, "context": 1024, "arriving": 8192, "load": 0.7,
                  "wide": {"streams": 256}},
        "ttft": [first_tokens(512, 0.0015), first_tokens(8192, 0.005)],
        "capacity_tokens_per_s": {"computed": 32000.0, "handed_over": 30000.0},
        "steady": [
            steady("1P+1D", 2048, 0.012, 6400.0, handoff=handoff(),
                   queue={"servers": 1, "prompt_seconds": 0.236, "p50": 0.35, "p99": 0.79}),
            steady("2 mixed", 2048, 0.08, 6500.0),
            steady("2 mixed", 512, 0.02, 7000.0, ttft_p50=quantile(0.2), ttft_p99=quantile(None)),
        ],
        "logprobs": [{"none": 1e4, "top": 9.8e3, "ratio": 0.98},
                     {"none": 1e4, "top": 9.5e3, "ratio": 0.95},
                     {"none": 1e4, "top": 9.7e3, "ratio": 0.975}],
        "starts": [{"way": "1P+1D", "chunk": 2048, "seconds": 21.25}],
        "kills": kills(),
        "pull": {"gpu": "x", "copy_gb_per_s": 390.0, "same": {"map": {"ms": 27.0},
                 "8,192 tokens": {"ms": 3.5, "gb_per_s": 340.0, "call_ms": 0.5}},
                 "apart": {"8,192 tokens": {"ms": 3.4, "gb_per_s": 351.0, "call_ms": 0.5}}},
        "pull_nixl": {"gpu": "x", "plain, same": {"connect": {"ms": 8.0},
                      "512 tokens": {"ms": 0.5, "gb_per_s": 150.5}},
                      "plain, pid": {"failed": []}},
        "rank_sum": {"device": "x", "ranks": 2, "hidden": 5120,
                     "rows": [{"rows": 1, "pairs": [[7.0, 3.5], [8.0, 4.0]]},
                              {"rows": 512, "pairs": [[40.0, 30.0]]}]},
        "steps": [],
        "exact": [{"kv": "nvlink", "k": 3, "requests": 200, "greedy": 58, "bytes": 4e9,
                   "tokens": 9600, "differ": 1, "accepted_drafts": 812.0, "ways": ["nvlink"],
                   "first": ["K = 3, request 7: logprobs[2] is x, not y"]}],
        "unmeasured": [],
    }  # fmt: skip


def test_the_page_tells_each_number_of_a_run(record: dict[str, Any]) -> None:
    assert page_pair.problems(record) == []
    text = page_pair.page(record, "results/x.json")
    for row in (
        "| 512 | 2,048 | 20 | 30.00 (29.00 to 31.00) | 30.00 (29.00 to 31.00) | 1.50 (1.00 to ?); "
        "2.00 ms: met | 45.00 (? to ?) |",
        "| 8,192 | 2,048 | 20 |",
        "| 1P+1D, chunks of 2,048 | 20.0 | 10.00 (9.00 to 11.00) | 12.00 (? to ?) | "
        "2.0 % | 13.00 (? to ?) | 200.0 | 6,400 |",
        "| 2 mixed, chunks of 2,048 | 0.15 (0.35: met) | 0.98 (0.95: met) | 1.00 (1.00: met) |",
        "| 2 mixed, chunks of 512 | 0.60 (0.35: missed) | 0.91 (0.95: missed) | "
        "2.00 (1.00: missed) | 0.00 (1.00: met) |",
        "beyond all that came",
        "The median of the ratios of 3 rounds is 97.5 % (97.0 %: met); they lie between 95.0 % and "
        "98.0 %.",
        "| nvlink | 3 | 200 | 58 | 9,600 | 4 GB | 812 | 1 | 100.0 %: missed |",
        "- K = 3, request 7: logprobs[2] is x, not y",
        "| idle, prompts of 512, chunks of 2048 | 4 | 4 GB | nvlink 4 GB, zmq 1 MB | 90 % | 2.00 | "
        "bytes 3 | 10.00 | 15.00 | 100 GB/s |",
        "| 512 | 2,048 | 27.50 | 10.00 | 15.00 | 2.50 | 4.20, 4.10 | 4.20, 4.10 | 90.0 % |",
        "of 8,192 tokens in chunks of 2,048 0.00 (2.00 ms: met).",
        "| 8,192 | 2,048 | 27.50 (2.00 ms: missed) | 10.00 | 15.00 | 2.50 | 4.20, 4.10 | "
        "4.20, 4.10 | 90.0 % (90.0 %: met) |",
        "| 1P+1D, chunks of 2,048 | 1 | 236.0 | 350.0 | 400.00 | 790.0 | 800.00 |",
        "| decode | 2 | 2 |",
        "| prefill | 2 | 0 |",
        "800 requests were served and judged: 798\nstreams ended whole, 2 by worker_lost; 2\n",
        "a card had 2 MiB more in use than before. ",
        "were back in 7.0 s\n(6.0 to 8.0), in the median: forked from",
        "| 8,192 tokens | 3.50 | 340 | 3.40 | 351 (350 GB/s: met) |",
        "| what | plain, same | plain, pid |",
        "| 512 tokens | 150.5 | - |",
        "| 1 | 7.5 | 3.8 | 0.50 (0.60: met) |",
        "| 512 | 40.0 | 30.0 | 0.75 |",
        "| 1P+1D | 2,048 | 21.2 |",
        "`tests/gpu/battery_two.py` on two x (driver x",
        "| workers killed | >= 200 kills | 4 kills | **missed** |",
        "or left behind | >= 100.0 % | 100.0 % | met |",
        "2.80 a second: 70.0 % of what one GPU\ncomputes (32,000 tokens/s; 30,000 where",
    ):
        assert row in text, row


def test_a_pair_whose_decode_helps_stands_beside_the_pair_where_a_run_has_it(
    record: dict[str, Any],
) -> None:
    without = page_pair.page(record, "results/x.json")
    assert "1P+1D, decode helps" not in without
    more = {
        "by_decode": 7.0,
        "decode_chunk": 512,
        "handoff": handoff(11.0),
        "ttft_p50": quantile(0.3),
    }
    record["steady"].insert(1, steady("1P+1D, decode helps", 2048, 0.024, 6450.0, **more))
    assert page_pair.problems(record) == []
    text = page_pair.page(record, "results/x.json")
    for row in (
        "| 1P+1D, decode helps, chunks of 2,048 | 20.0 | 10.00 (9.00 to 11.00) | 24.00 (? to ?) |",
        "Of 18 prompts, those that the streams begin\nwith among them, 7 were computed by decode",
        "| 1P+1D, decode helps, over | gap p99 |",
        "| 2 mixed, chunks of 2,048 | 0.30 (0.35: met) | 0.99 (0.95: met) | 0.75 (1.00: met) |",
        "| p99 of gaps, the pair whose decode helps over 2 mixed, chunks of 2,048 | <= 0.35 |",
    ):
        assert row in text, row
    rows = [line for line in without.splitlines() if line.startswith("|")]
    assert [row for row in rows if row not in text] == [], "the others' stay as they are"


def test_goals_say_by_how_much_and_missed_ones_are_explained_in_their_words(
    record: dict[str, Any],
) -> None:
    text = page_pair.page(record, "results/x.json", "# Notes\n\n## gaps\n\nBoth step.\n")
    for words in (
        "8,192 tokens, later than a mixed one's, chunks of 2,048 | <= 4.00 ms | 5.00 ms | "
        "**missed** | 1.00 ms, 25",
        "p99 of gaps, the pair over 2 mixed, chunks of 512, by 0.25, 71.4 %.** Both step.",
        "K = 3, KV over nvlink, by 0.50 points.** Not explained yet.",
    ):
        assert words in text, words


def test_what_was_not_measured_is_told_and_left_out(record: dict[str, Any]) -> None:
    for part in ("ttft", "steady", "exact", "capacity_tokens_per_s", "kills", "pull", "rank_sum"):
        del record[part]
    record["unmeasured"] = ["exact: OutOfTime: the answers take 15 s, 3 are left"]
    assert page_pair.problems(record) == []
    text = page_pair.page(record, "results/x.json")
    assert "- exact: OutOfTime: the answers take 15 s, 3 are left" in text
    assert "- not in this run: workers that are killed\n" in text
    assert "## Steady streams" not in text
    assert "## The handover" not in text
    assert "1 of 1 are met" in text


def test_kills_that_broke_something_miss_their_goal_and_say_what(record: dict[str, Any]) -> None:
    told = record["kills"]
    told["kills"][0] |= {"violations": {"lost": 3}, "first": ["r1: lost: 3 tokens"]}
    told["problems"] = ["r1: lost: 3 tokens"]
    text = page_pair.page(record, "results/x.json")
    assert "or left behind | >= 100.0 % | 50.0 % | **missed** |" in text
    assert "of other bits: 3 lost." in text
    assert text.count("- r1: lost: 3 tokens") == 1
    told["kills"][0]["violations"] = {}
    told["problems"] = ["memory of the cards, MiB: more"]
    assert "or left behind | >= 100.0 % | 0.0 % | **missed** |" in page_pair.page(record, "x.json")


def test_a_pair_alone_is_held_to_no_goal_of_the_other(record: dict[str, Any]) -> None:
    record["steady"] = record["steady"][:1]
    text = page_pair.page(record, "results/x.json")
    assert "| 1P+1D, chunks of 2,048 |" in text
    assert "p99 of gaps, the pair" not in text


def test_a_record_that_was_cut_is_refused_by_the_field(
    record: dict[str, Any], tmp_path: Path
) -> None:
    del record["steady"][1]["gap_p99"]
    assert page_pair.problems(record) == ["steady[1].gap_p99 is missing"]
    results = tmp_path / "benchmarks" / "x.json"
    results.parent.mkdir()
    results.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"steady\[1\]\.gap_p99 is missing"):
        page_pair.main([str(results), str(tmp_path)])
    assert not (tmp_path / "benchmarks" / "several-gpus.md").exists()


def test_the_picture_shows_every_way_within_its_axes(record: dict[str, Any]) -> None:
    drawn = page_pair.picture(record["steady"])
    assert drawn is not None
    root = ElementTree.fromstring(drawn)
    tag = "{http://www.w3.org/2000/svg}"
    texts = {t.text: t for t in root.iter(f"{tag}text")}
    assert {"1P+1D, 2048", "2 mixed, 2048", "2 mixed, 512"} <= set(texts)
    for text, element in texts.items():
        width = 0.62 * float(element.get("font-size", "12")) * len(text or "")
        share = {"middle": 0.5, "end": 0.0}.get(element.get("text-anchor", ""), 1.0)
        assert float(element.get("x", "")) + share * width <= plots.WIDTH, text
    for mark in root.iter(f"{tag}circle"):
        assert plots.LEFT <= float(mark.get("cx", "")) <= plots.WIDTH
        assert plots.TOP <= float(mark.get("cy", "")) <= plots.HEIGHT - plots.BOTTOM


def test_nothing_is_drawn_of_nothing() -> None:
    assert page_pair.picture([]) is None


def test_amounts_are_told_in_units_that_people_read() -> None:
    assert [page_pair.amount(n) for n in (12.0, 49152.0, 3.9e11)] == ["12 B", "49.2 KB", "390 GB"]


def test_the_run_that_is_kept_makes_the_page_that_is_kept() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
    kept = json.loads((docs / "results" / "several-gpus-h200.json").read_text())
    assert page_pair.problems(kept) == []
    names = ("results/gpu-ratios-h100x4.json", "results/gpu-ratios-ranks-h200x4.json")
    told = [page_pair.Ratios(json.loads((docs / name).read_text()), name) for name in names]
    of_others = [
        page_pair.Part(name, json.loads((docs / file).read_text()), file)
        for name, file in (
            ("logprobs", "results/logprobs-direct-h100x2.json"),
            ("exact", "results/exact-ways-h100x2.json"),
            ("exact", "results/exact-nixl-h100x2.json"),
            ("exact", "results/exact-helped-h100x2.json"),
            ("kills", "results/kills-h200x2.json"),
            ("pull", "results/pull-h100x2.json"),
        )
    ]
    page = page_pair.page(kept, "results/several-gpus-h200.json", ratios=told, parts=of_others)
    assert page == (docs / "several-gpus.md").read_text()


def test_logprobs_of_another_run_stand_before_its_own_and_are_what_the_goal_is_held_to(
    record: dict[str, Any],
) -> None:
    cpu = {"gateway": 60.0, "gateway_first_thread": 50.0, "decode": 40.0}
    one = {"none": 2e4, "top": 1.8e4, "ratio": 0.9, "cpu_us_per_token": {"none": cpu, "top": cpu}}
    other = {"commit": "abc", "gateways": 2, "logprobs": [one, one]}
    assert page_pair.problems(page_pair.with_parts(record, [])) == []
    part = page_pair.Part("logprobs", other, "results/more.json")
    assert page_pair.problems(page_pair.with_parts(record, [part])) == []
    text = page_pair.page(record, "results/x.json", parts=[part])
    scored = text[text.index("## Logprobs of every token") :]
    assert scored.startswith("## Logprobs of every token\n\nNot of the run above: [at abc]")
    assert "behind 2 gateways on one port" in scored
    assert scored.index("is 90.0 % (97.0 %: missed)") < scored.index("behind one gateway")
    assert "| 1 | 20,000 | 18,000 | 90.0 % | 50.0 | 50.0 | 1.00 | 0.90 |" in scored


def test_a_part_of_another_run_is_told_with_its_commit_and_its_numbers(
    record: dict[str, Any], tmp_path: Path
) -> None:
    part, answers = record.pop("kills"), record.pop("exact")
    assert "Workers that are killed" not in page_pair.page(record, "results/x.json")
    parts = [
        page_pair.Part("kills", part | {"commit": "abc"}, "results/kills.json"),
        page_pair.Part(
            "exact",
            {"commit": "def", "model": "qwen3-8b", "layers": 18, "exact": answers[:1]},
            "results/some.json",
        ),
        page_pair.Part(
            "exact",
            {"commit": "0ab", "model": "qwen3-8b", "layers": 36, "exact": answers[1:]},
            "results/all.json",
        ),
    ]
    text = page_pair.page(record, "results/x.json", parts=parts)
    killed = "## Workers that are killed\n\nNot of the run above: [at abc](results/kills.json).\n"
    assert killed in text
    assert "[at def](results/some.json), [at 0ab](results/all.json)." in text
    assert "18 layers" in text
    assert "36 layers" not in text
    text = page_pair.page(record | {"exact": answers[:1]}, "results/x.json", parts=parts[:2])
    first = "The first row is of the run above, the others not: [at def](results/some.json).\n"
    assert first in text
    assert text.index(first) < text.index("| nvlink | ") < text.index("| nvlink, 18 layers |")
    with pytest.raises(ValueError, match="kills: the run has it itself"):
        page_pair.with_parts(record | {"kills": part}, parts)


def test_a_part_without_its_commit_or_of_no_name_is_refused(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "docs" / "benchmarks" / "results"
    results.mkdir(parents=True)
    part = record.pop("kills")
    (results / "x.json").write_text(json.dumps(record))
    (results / "kills.json").write_text(json.dumps(part))
    words = [str(results / "x.json"), str(tmp_path / "docs"), "--part"]
    with pytest.raises(SystemExit, match="commit is missing"):
        page_pair.main([*words, f"kills={results / 'kills.json'}"])
    with pytest.raises(SystemExit):
        page_pair.main([*words, f"steady={results / 'kills.json'}"])
    assert "NAME of exact, logprobs, kills" in capsys.readouterr().err
