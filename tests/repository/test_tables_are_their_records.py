"""Measured numbers in pages under docs/benchmarks are those of the records beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tables

PAGE = "words\n\n<!-- table: ranks a.json -->\nold\n<!-- /table -->\n\nmore words\n"
RANKS = {
    "machine": {"gpu": "a card"},
    "commit": "abc",
    "cases": [
        {"ranks": 1, "batch": 1, "us": 3000.0},
        {"ranks": 2, "batch": 1, "us": 2000.0},
        {"ranks": 4, "batch": 1, "us": 1000.0},
    ],
    "speedups": [{"ranks": 2, "batch": 1, "goal": 1.8}, {"ranks": 4, "batch": 1}],
}


def step(model: str, batch: int, us: float, **more: Any) -> dict[str, Any]:
    given = {"model": model, "batch": batch, "prefill": 0, "us": us, "roof_us": 1000.0}
    return given | {"experts": 8.0} | more


def test_every_page_says_what_its_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_takes_the_place_of_what_stood_there_and_is_not_written_twice() -> None:
    told = tables.filled(PAGE, {"a.json": RANKS}.__getitem__)
    assert told.startswith("words\n\n<!-- table: ranks a.json -->\n\n| ranks | sequences |")
    assert told.endswith("\n<!-- /table -->\n\nmore words\n")
    assert "old" not in told
    assert "| 2 | 1 | 2.00 | 1.500 | 1.8: **missed** |\n" in told
    assert "| 4 | 1 | 1.00 | 3.000 | - |\n" in told
    assert "a card, commit abc: [numbers](results/a.json)." in told
    assert tables.filled(told, {"a.json": RANKS}.__getitem__) == told


def test_a_page_with_another_number_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "PAGES", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/a.json").write_text(json.dumps(RANKS))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert tables.main(["--check"]) == 1
    assert page.read_text() == PAGE
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    page.write_text(page.read_text().replace("1.500", "1.900"))
    assert tables.main(["--check"]) == 1
    assert "page.md: differs" in capsys.readouterr().out


def test_a_share_is_held_against_the_goal_as_it_is_and_not_as_it_is_rounded() -> None:
    steps = [
        step("qwen3-30b-a3b", 1, 1000 / 0.648),
        step("qwen3-30b-a3b", 64, 1000 / 0.85),
        step("qwen3-30b-a3b", 256, 1000 / 0.5),
        step("mimo-7b", 64, 1000 / 0.83, experts=0.0),
    ]
    lines = tables.decode({"steps": steps})
    assert lines[2] == ("| Qwen3-30B-A3B | 1 | 8.0 | 1.54 | 1.00 | 65 % | 65 %: **missed** |"), (
        "64.8 is told as 65 and is not 65"
    )
    assert lines[3].startswith("|  | 64 |")
    assert lines[3].endswith("| 85 % | 85 %: met |")
    assert lines[4].endswith("| 50 % | - |")
    assert lines[5] == "| MiMo-7B | 64 | - | 1.20 | 1.00 | 83 % | 82 %: met |"


def test_fp8_stands_beside_the_same_step_in_bfloat16() -> None:
    fp8 = [step("qwen3-30b-a3b-fp8", 1, 3000.0), step("qwen3-30b-a3b-fp8", 8, 3000.0)]
    plain = [step("qwen3-30b-a3b", 1, 4000.0), step("qwen3-30b-a3b", 8, 5e3, prefill=8)]
    lines = tables.decode({"steps": fp8}, {"steps": plain})
    assert [line.rsplit("|", 2)[1].strip() for line in lines[2:]] == ["4.00", "-"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("<!-- table: ranks", "<!-- table:ranks"),
        ("a.json -->", "a.json-->"),
        ("<!-- /table -->\n", "<!-- /table --> \n"),
        ("<!-- /table -->", "<!--/table-->"),
        ("<!-- /table -->\n", ""),
        ("<!-- table: ranks a.json -->\n", ""),
    ],
    ids=str,
)
def test_a_mark_that_is_not_quite_one_is_told_of_and_nothing_is_lost(
    wrong: tuple[str, str],
) -> None:
    for text in (PAGE.replace(*wrong), PAGE.replace(*wrong) + PAGE, PAGE + PAGE.replace(*wrong)):
        with pytest.raises(ValueError, match="is half of no table"):
            tables.filled(text, {"a.json": RANKS}.__getitem__)


def test_a_kind_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"'rank' is none of decode, .*ranks"):
        tables.block("rank a.json", {"a.json": RANKS}.__getitem__)


def test_chunks_that_wait_stand_beside_those_that_are_launched_ahead() -> None:
    def way(chunk: int, is_ahead: bool, *first: float, **more: Any) -> dict[str, Any]:
        return {"chunk": chunk, "is_ahead": is_ahead, "first_ms": first, "beside": []} | more

    gaps = [{"median": 9.0}, {"median": 7.0}, {"median": 8.0}]
    records = [way(512, False, 30.0, 20.0, 25.0, beside=gaps), way(512, True, 19.0)]
    records += [way(2048, False, 40.0, last=256), way(2048, True, 41.0, last=256)]
    lines = tables.chunks({"records": records})
    assert lines[2:] == [
        "| 512 | 512 | 25.0 | 19.0 | 6.0 | 8.0 | - |",
        "| 2,048 | 256 | 40.0 | 41.0 | -1.0 | - | - |",
    ]


def test_the_page_on_sizes_names_the_ratios_that_were_measured() -> None:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for one in tables.read_record("gpu-ratios-h100x4.json")["ratios"]:
        found.setdefault(one["mix"]["prompt"], {})[one["name"]] = one
    speeds = {
        prompt: {name: one["at_once"]["tokens_per_s"] for name, one in by_name.items()}
        for prompt, by_name in found.items()
    }
    page = (tables.PAGES.parent / "sizing.md").read_text()
    rows = [
        line.split("|")[2:5] for line in page.splitlines() if " out |" in line or " in, " in line
    ]
    rows = [row for row in rows if len(row) == 3 and ":" in row[0]]
    assert len(rows) == len(speeds) == 3
    for (best, speed, others), told in zip(rows, speeds.values(), strict=True):
        pairs = {name: told[name] for name in ("3P+1D", "2P+2D", "1P+3D")}
        first = max(pairs, key=pairs.__getitem__)
        assert best.strip().startswith(f"{first[0]}:{first[3]}")
        for value in pairs.values():
            assert f"{value:,.0f}" in speed + others
        assert f"{told['4 mixed']:,.0f}" in page
    long = found[8192]
    for name in ("3P+1D", "4 mixed"):
        assert f"{1e3 * long[name]['arriving']['gap_p99']['value']:.1f}" in page
