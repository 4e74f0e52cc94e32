"""Fill the tables of pages under docs/benchmarks from the records beside them; `--check` compares.

A page has `<!-- table: KIND RECORD [RECORD] -->`, the table, `<!-- /table -->`: what stands between
is written here, so that no number of it is anybody's. Under each table stands the card, the commit
and the record that it is of. Owns which columns each kind of table has and which goals it is held
against; the words around it are the page's own.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
BLOCK = re.compile(r"(<!-- table: (?P<words>[^>]+?) -->\n).*?(<!-- /table -->\n)", re.DOTALL)
MARK = re.compile(r"<!--\s*/?\s*table\b.*")
"""What is meant for a mark, however it is written."""
MODELS = {
    "mimo-7b": "MiMo-7B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "ernie-4.5-21b-a3b": "ERNIE-4.5-21B-A3B",
    "qwen3-8b-fp8": "Qwen3-8B in FP8",
    "qwen3-30b-a3b-fp8": "Qwen3-30B-A3B in FP8",
    "glm-4.5-air-fp8": "GLM-4.5-Air in FP8",
}
HELD = ("mimo-7b", "qwen3-30b-a3b", "ernie-4.5-21b-a3b", "glm-4.5-air-fp8")
DENSE = HELD[:1]
LARGE_BATCH = 32
"""Goals for 64 sequences hold for as many as there is room for, if they are more than this."""
FP8 = "-fp8"

Record = Mapping[str, Any]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _met(value: float, goal: float, told: str) -> str:
    """Return the goal and whether a value, at least that, meets it."""
    return f"{told}: met" if value >= goal else f"{told}: **missed**"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


def _named(rows: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    """Yield each row with its model's name, "" where the row before has the same."""
    before = ""
    for row in rows:
        yield "" if row["model"] == before else MODELS[row["model"]], row
        before = row["model"]


def share_goal(model: str, batch: int) -> float | None:
    """Return which share of the roof a step shall reach; None: nothing is asked of it."""
    if model not in HELD:
        return None
    if model in DENSE:
        return 0.82 if batch in (1, 64, 256) else None
    if batch == 1:
        return 0.65
    return 0.85 if LARGE_BATCH < batch <= 64 else None


def _beside(rows: Iterable[Record], others: Sequence[Record]) -> Iterator[float | None]:
    """Yield what a step of each row took that has its weights in bfloat16."""
    took = {(row["model"], row["batch"], row["prefill"]): row["us"] for row in others}
    for row in rows:
        yield took.get((row["model"].removesuffix(FP8), row["batch"], row["prefill"]))


def decode(record: Record, plain: Record | None = None) -> list[str]:
    """Return steps of decode against memory's roof; `plain`: steps of the models in bfloat16."""
    rows = [row for row in record["steps"] if not row["prefill"]]
    titles = ["model", "batch", "experts of a layer, mean", "ms", "roof, ms", "of the roof", "goal"]
    lines = _head(*titles, *(["the same in bf16, ms"] if plain else []))
    others = _beside(rows, plain["steps"] if plain else ())
    for (name, row), other in zip(_named(rows), others, strict=True):
        share, goal = row["roof_us"] / row["us"], share_goal(row["model"], row["batch"])
        held = "-" if goal is None else _met(share, goal, f"{goal:.0%}".replace("%", " %"))
        experts = f"{row['experts']:.1f}" if row["experts"] else "-"
        cells = [name, row["batch"], experts, _ms(row["us"]), _ms(row["roof_us"])]
        cells += [f"{100 * share:.0f} %", held]
        lines.append(_row(*cells, *([_ms(other) if other else "-"] if plain else [])))
    return lines


def prompt(record: Record, plain: Record | None = None) -> list[str]:
    """Return steps that compute a prompt."""
    rows = [row for row in record["steps"] if row["prefill"]]
    titles = ["model", "tokens", "ms", "TFLOP/s of products and attention"]
    lines = _head(*titles, *(["the same in bf16, ms"] if plain else []))
    others = _beside(rows, plain["steps"] if plain else ())
    for (name, row), other in zip(_named(rows), others, strict=True):
        cells = [name, f"{row['prefill']:,}", _ms(row["us"]), f"{row['tflops']:.0f}"]
        lines.append(_row(*cells, *([_ms(other) if other else "-"] if plain else [])))
    return lines


def products(record: Record) -> list[str]:
    """Return products with FP8 weights beside those in bfloat16."""
    titles = ("FP8, us", "bf16, us", "times as fast", "quantising the rows, us")
    lines = _head("product", "rows or tokens", *titles)
    for row in record["products"]:
        took, bf16 = row["us"], row["bf16_us"]
        cells = (
            f"{took:,.1f}",
            f"{bf16:,.1f}",
            f"{bf16 / took:.2f}",
            f"{row['quantising_us']:.1f}",
        )
        lines.append(_row(row["name"], f"{row['rows']:,}", *cells))
    return lines


def layer(record: Record) -> list[str]:
    """Return the parts of a mixture's layer, in microseconds."""
    parts = ("route", "gather", "gate_up", "down", "combine")
    lines = _head("tokens", *parts, "layer", "roof", "share")
    for row in record["layers"]:
        told = [f"{row['parts'][part]:.1f}" if part in row["parts"] else "-" for part in parts]
        share = f"{row['roof'] / row['whole']:.2f}"
        whole = (f"{row['whole']:.1f}", f"{row['roof']:.1f}", share)
        lines.append(_row(f"{row['tokens']:,}", *told, *whole))
    return lines


def ranks(record: Record) -> list[str]:
    """Return steps over tensor-parallel ranks beside those of one."""
    one = {case["batch"]: case["us"] for case in record["cases"] if case["ranks"] == 1}
    goals = {(row["ranks"], row["batch"]): row.get("goal") for row in record["speedups"]}
    lines = _head("ranks", "sequences", "ms", "times as fast as one", "goal")
    for case in record["cases"]:
        speedup = one[case["batch"]] / case["us"]
        goal = goals.get((case["ranks"], case["batch"]))
        times = "-" if case["ranks"] == 1 else f"{speedup:.3f}"
        held = "-" if goal is None else _met(speedup, goal, f"{goal}")
        lines.append(_row(case["ranks"], case["batch"], _ms(case["us"]), times, held))
    return lines


def chunks(record: Record) -> list[str]:
    """Return first tokens by how prompts are cut: chunks that wait beside those ahead; medians."""
    found = {(r["chunk"], r.get("last", 0), r["is_ahead"]): r for r in record["records"]}
    titles = ("waits, ms", "ahead, ms", "sooner by", "gap beside, waits", "gap beside, ahead")
    lines = _head("chunks", "the last one", *titles)
    for chunk, last in dict.fromkeys((chunk, last) for chunk, last, _ in found):
        pair = [found[chunk, last, is_ahead] for is_ahead in (False, True)]
        waits, ahead = (statistics.median(one["first_ms"]) for one in pair)
        gaps = [_gap_beside(one) for one in pair]
        cells = (f"{waits:.1f}", f"{ahead:.1f}", f"{waits - ahead:.1f}", *gaps)
        lines.append(_row(f"{chunk:,}", f"{last or chunk:,}", *cells))
    return lines


def _gap_beside(record: Record) -> str:
    gaps = [gap["median"] for gap in record["beside"]]
    return f"{statistics.median(gaps):.1f}" if gaps else "-"


def drafts(record: Record) -> list[str]:
    """Return what drafts gave, by kind of chat, method where there are several, and draft count;
    where answers were timed also how much faster they came than without drafts.
    """
    rows, plain = record["yields"], {}
    methods = {row.get("method", "ngram") for row in rows}
    for row in rows:
        if row["k"] == 0:
            plain[row["prompts"]] = row["seconds"]
    by = ["method"] * (len(methods) > 1)
    speed = ["times as fast"] * bool(plain)
    lines = _head("chats", *by, "K", "output tokens", "tokens per row",
                  "accepted / proposed", *speed)  # fmt: skip
    for row in rows:
        if row["k"]:
            accepted, proposed = row["accepted"], row["proposed"]
            share = f"{accepted} / {proposed} = {accepted / max(proposed, 1):.2f}"
            faster = [f"{plain[row['prompts']] / row['seconds']:.2f}"] if plain else []
            how = (row["method"], row["k"]) if by else (row["k"],)
            cells = (row["tokens"], f"{row['tokens_per_row']:.2f}", share, *faster)
            lines.append(_row(row["prompts"], *how, *cells))
    return lines


def served(record: Record) -> list[str]:
    """Decode phases of real requests, the engine's beside another server's."""
    lines = _head("model", "sequences", "who", "ms a step", "tokens/s", "Baton's over it")
    ours = {(r["model"], r["rows"]): r for r in record["served"] if r["server"] == "baton"}
    for row in sorted(record["served"], key=lambda r: (list(MODELS).index(r["model"]), r["rows"])):
        who = "Baton" if row["server"] == "baton" else row["server"].replace(" 5.17.0", "")
        named = (MODELS[row["model"]], row["rows"], who)
        if "error" in row:
            lines.append(_row(*named, f"not measured: {row['error']}", "-", "-"))
            continue
        ratio = ours[row["model"], row["rows"]]["tokens_per_s"] / row["tokens_per_s"]
        told = "-" if who == "Baton" else f"{ratio:.1f}"
        lines.append(_row(*named, f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", told))
    return lines


KINDS: Mapping[str, Callable[..., list[str]]] = {
    "decode": decode,
    "prompt": prompt,
    "products": products,
    "layer": layer,
    "ranks": ranks,
    "chunks": chunks,
    "drafts": drafts,
    "served": served,
}


def source(name: str, record: Record) -> str:
    """Return what stands under a table: of which card, commit and record it is."""
    return f"{record['machine']['gpu']}, commit {record['commit']}: [numbers](results/{name})."


def block(words: str, read: Callable[[str], Record]) -> str:
    """Return what stands between two marks; `words`: the kind and its records' names.

    Raises:
        ValueError: there is no such kind.
    """
    kind, *names = words.split()
    if kind not in KINDS:
        raise ValueError(f"table: {kind!r} is none of {', '.join(KINDS)}")
    records = [read(name) for name in names]
    lines = KINDS[kind](*records)
    sources = [source(name, record) for name, record in zip(names, records, strict=True)]
    return "\n".join(["", *lines, "", " In bfloat16: ".join(sources), ""])


def filled(text: str, read: Callable[[str], Record]) -> str:
    """Return a page with its tables as the records have them.

    Raises:
        ValueError: a mark is none, or has no other to go with.
    """
    marks = {m.start(i) for m in BLOCK.finditer(text) for i in (1, 3)}
    for mark in MARK.finditer(text):
        if mark.start() not in marks:
            wanted = "`<!-- table: KIND RECORD -->` and, behind the table, `<!-- /table -->`"
            raise ValueError(f"{mark[0]!r} is half of no table: write {wanted}, each on its line")
    return BLOCK.sub(lambda m: m[1] + block(m["words"], read) + m[3], text)


def read_record(name: str) -> Record:
    """Return a record of docs/benchmarks/results."""
    record: Record = json.loads((PAGES / "results" / name).read_text())
    return record


def main(words: Sequence[str] | None = None) -> int:
    """Write every page's tables, or tell which are not their records'."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where one differs")
    options = parser.parse_args(words)
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text()
        try:
            after = filled(before, read_record)
        except (ValueError, OSError) as error:
            sys.exit(f"{page.name}: {error}")
        if after == before:
            continue
        stale.append(page.name)
        if not options.check:
            page.write_text(after)
    for name in stale:
        sys.stdout.write(f"{name}: {'differs' if options.check else 'written'}\n")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
