"""Write docs/benchmarks/several-gpus.md from battery_two's JSON: every number is the run's.

    python tests/gpu/page_pair.py docs/benchmarks/results/several-gpus-h200.json docs
        [--part kills=FILE ...] [--ratios FILE ...]

bench_pair's own JSON does as well, and parts that it lacks may be other runs'. Draws the picture
too. Owns the goals of a pair and the order of its page; what a run lacks is named. What bounds a
goal that is missed is written by hand in page_pair_bounds.md, under the goal's subject.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page_pair_logprobs  # noqa: E402
import page_pair_more  # noqa: E402
import plots  # noqa: E402
from page import bounding, bounds_of, goals, read  # noqa: E402
from page_record import ABOVE, LEAST, TEXT, WHOLE, Group, Several  # noqa: E402
from page_text import Goal, Record, Run, share, table  # noqa: E402

BOUNDS = HERE / "page_pair_bounds.md"
BEHIND = "gateways"
"""Its words that stand below logprobs of a run apart, whose gateways are others."""
PICTURE = "pair-gaps"
FIRST_MS = {512: 2.0, 8192: 4.0}
"""What a first token may be later by than a mixed worker's, in ms, by prompt."""
GAP, TOKENS, FIRST, EQUAL = 0.35, 0.95, 1.0, 1.0
UNITS = ("B", "KB", "MB", "GB", "TB")
QUANTILE = page_pair_more.QUANTILE
FIRSTS = Group({"first": QUANTILE, "second": QUANTILE}, {"between": Several(QUANTILE, 2)})
HANDOFF = Group(
    {"count": LEAST, "bytes": LEAST, "seconds": LEAST, "transfer_seconds": LEAST,
     "import_seconds": LEAST}
)  # fmt: skip
STEADY = Group(
    {"way": TEXT, "chunk": WHOLE, "seconds": ABOVE, "gap_p50": QUANTILE, "gap_p99": QUANTILE,
     "gap_most": ABOVE,
     "tokens_per_s": ABOVE, "steady_tokens_per_s": ABOVE, "prompts": WHOLE,
     "unserved": WHOLE, "ttft_p50": QUANTILE, "ttft_p99": QUANTILE, "client_busy": LEAST,
     "prompts_per_s": ABOVE, "gaps": Several(Several(LEAST, 2), 1)},
    {"handoff": HANDOFF, "together": LEAST, "pause_p99": QUANTILE,
     "decode_chunk": WHOLE, "by_decode": LEAST,
     "queue": Group({"servers": WHOLE, "prompt_seconds": ABOVE, "p50": ABOVE, "p99": ABOVE})},
)  # fmt: skip
RECORD = Group(
    {"machine": Group({}), "commit": TEXT, "model": TEXT, "sizes": Group({"wide": Group({})})},
    {"ttft": Several(Group({"prompt": WHOLE, "pair": FIRSTS, "mixed": FIRSTS,
                            "difference": QUANTILE, "handoff": HANDOFF},
                           {"chunk": WHOLE, "handed_over": QUANTILE})),
     "steady": Several(STEADY),
     "capacity_tokens_per_s": Group({"computed": ABOVE, "handed_over": ABOVE}),
     "logprobs": Several(page_pair_logprobs.SCORES), "gateways": WHOLE,
     "logprobs_before": Several(page_pair_logprobs.SCORES),
     "exact": Several(Group({"k": WHOLE, "requests": ABOVE, "tokens": LEAST, "differ": WHOLE,
                             "accepted_drafts": LEAST, "first": Several(TEXT)},
                            {"kv": TEXT, "greedy": WHOLE, "bytes": LEAST, "ways": Several(TEXT),
                             "by_decode": LEAST,
                             "layers": WHOLE})),
     "starts": Several(Group({"way": TEXT, "chunk": WHOLE, "seconds": ABOVE})),
     "kills": page_pair_more.KILLS, "pull": page_pair_more.PULL,
     "pull_nixl": Group({"gpu": TEXT}), "rank_sum": page_pair_more.RANK_SUM,
     "unmeasured": Several(TEXT)},
)  # fmt: skip
MISSING = {
    "ttft": "the first token of an idle deployment, and what handing over adds",
    "steady": "steady streams while prompts arrive",
    "logprobs": "what logprobs cost many streams",
    "exact": "whether the answers are the same bits",
    "kills": "workers that are killed",
    "pull": "the rate at which another process's pool is read",
    "pull_nixl": "the rate at which NIXL reads it",
    "rank_sum": "sums over ranks",
    "ratios": "four GPUs: which ratio of prefill to decode",
}
"""What a run may lack, by the part."""
HEAD = """# Prefill and decode on two GPUs

For people who ask what a pair of GPUs brings over two that each do both, and what handing KV over
costs.

{program} on {machine}, commit {commit};
[its numbers]({results}). {model}. A pair
(1P+1D: one GPU computes prompts, the other decodes) and two mixed workers with chunked prefill
stood on the same two GPUs, one of them at work at a time. All of it is what clients see: gateway,
workers, SSE streams, times taken where the bytes arrive. In brackets stands what a number lies
between 19 times in 20, by order statistics; "?" where so few values do not bound it."""
FULL_LAYERS = {"qwen3-8b": 36}
"""Of a model whose every layer was run nothing is said."""
MODELS = {"qwen3-8b": "Qwen3-8B's shape, random bfloat16 weights", "tiny": "The tiny model"}


COUNTED = {2: "two", 4: "four", 8: "eight"}


def machine(told: Record, count: int = 2) -> str:
    """Return what it ran on."""
    if "gpu" not in told:
        return f"a machine without a GPU ({told.get('cores', '?')} cores)"
    link = f", linked by {told['linked']}" if told.get("linked") else ""
    return "{count} {gpu}{link} (driver {driver}, CUDA {cuda}, PyTorch {torch})".format(
        count=COUNTED.get(count, count), link=link, **told
    )


def ms(told: Record) -> str:
    """Return a quantile in milliseconds, and what it lies between."""
    value, low, high = (_scaled(told.get(name)) for name in ("value", "low", "high"))
    if value == low == high == "?":
        return "beyond all that came"
    return f"{value} ({low} to {high})"


def _scaled(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:.2f}"


def number(told: Record) -> float:
    """Return a quantile's value; infinite where so many never came."""
    value = told["value"]
    return math.inf if value is None else float(value)


def amount(n_bytes: float) -> str:
    """Return bytes as people read them."""
    for unit in UNITS:
        if n_bytes < 1000 or unit == UNITS[-1]:
            break
        n_bytes /= 1000
    return f"{n_bytes:.3g} {unit}"


def first_token(run: Run) -> str:
    """Single requests to idle deployments."""
    rows = []
    for one in run.record.get("ttft") or ():
        later, chunk = number(one["difference"]), one.get("chunk")
        told = ms(one["difference"])
        if (goal := FIRST_MS.get(one["prompt"])) is not None:
            name = f"a first token of the pair, {one['prompt']:,} tokens, later than a mixed one's"
            name += f", chunks of {chunk:,}" if chunk else ""
            told += f"; {run.held(Goal(name, 'first', 1e3 * later, goal, 'ms', least=False))}"
        rows.append([f"{one['prompt']:,}", f"{chunk:,}" if chunk else "-",
                     one["difference"]["n"], ms(one["pair"]["first"]),
                     ms(one["mixed"]["first"]), told, ms(one["pair"]["second"]),
                     ms(one["mixed"]["second"])])  # fmt: skip
    if not rows:
        return ""
    head = ["prompt", "chunk", "requests", "1P+1D, ms", "mixed, ms", "later by (goal)",
            "second token, 1P+1D", "second token, mixed"]  # fmt: skip
    return f"""## The first token of an idle deployment

One request at a time, the same prompt to each in turns; no prompt was seen before. One mixed
worker, with the larger chunks. "Later by" is the median of the differences of the same prompt. All
times are from sending the request.

{table(head, rows)}"""


def steady(run: Run) -> str:
    """Streams that decode while prompts arrive."""
    found = list(run.record.get("steady") or ())
    if not found:
        return ""
    sizes = run.record["sizes"]
    rows = [[
        _way(one), f"{one['seconds']:.1f}", ms(one["gap_p50"]), ms(one["gap_p99"]),
        share(one["together"]) if "together" in one else "-",
        ms(one["pause_p99"]) if "pause_p99" in one else "-",
        f"{1e3 * one['gap_most']:.1f}", f"{one['tokens_per_s']:,.0f}",
        f"{one['steady_tokens_per_s']:,.0f}", ms(one["ttft_p50"]), ms(one["ttft_p99"]),
        f"{one['unserved']} of {one['prompts']}", share(one["client_busy"]),
    ] for one in found]  # fmt: skip
    head = ["", "s", "gap p50, ms", "gap p99, ms", "gaps of 0", "p99 of the others, ms",
            "longest", "tokens/s, all", "of the streams",
            "first token p50, ms", "p99, ms", "without one", "busiest client"]  # fmt: skip
    rates = run.record.get("capacity_tokens_per_s") or {}
    computed, handed = (f"{rates.get(name, math.nan):,.0f}" for name in ("computed", "handed_over"))
    streams = f"{sizes['streams']} streams of {sizes['context']:,} tokens and more"
    prompts_per_s, load = f"{found[0]['prompts_per_s']:.2f}", share(sizes["load"])
    return f"""## Steady streams while prompts arrive

{streams} decode; prompts of {sizes["arriving"]:,} tokens arrive by
chance (Poisson, the same times for all), {prompts_per_s} a second: {load} of what one GPU
computes ({computed} tokens/s; {handed} where the KV is handed over too). A gap is the time
between two tokens of a stream; tokens that came together have gaps of 0. The gaps of all streams of
a step count as one draw.

{table(head, rows)}{_helped(found)}{_against(run, found)}{_queued(found)}{_pictured(found)}"""


def _helped(found: Sequence[Record]) -> str:
    """Return what decode computed itself, after an empty line; "" where none is told."""
    told = [
        f"Of {one['by_decode'] + one['handoff']['count']:.0f} prompts, those that the streams begin"
        f"\nwith among them, {one['by_decode']:.0f} were computed by decode, in chunks of "
        f"{one['decode_chunk']:,} beside its\nstreams ({_way(one)})."
        for one in found
        if _helps(one)
    ]
    return "".join(f"\n\n{one}" for one in told)


def _helps(one: Record) -> bool:
    return "by_decode" in one and "handoff" in one


def _queued(found: Sequence[Record]) -> str:
    """Return a table of first tokens beside those of a line that loses no time."""
    rows = [
        [_way(one), queue["servers"], f"{1e3 * queue['prompt_seconds']:.1f}",
         f"{1e3 * queue['p50']:.1f}", _scaled(one["ttft_p50"]["value"]),
         f"{1e3 * queue['p99']:.1f}", _scaled(one["ttft_p99"]["value"])]
        for one in found if (queue := one.get("queue"))
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["", "cards that compute prompts", "a prompt alone, ms", "line p50", "first token p50",
            "line p99", "first token p99"]  # fmt: skip
    return f"""

How much of a first token under load is waiting for other prompts: beside what clients saw stand the
same arrivals in the line of as many cards that do nothing but compute one prompt after the other,
each at the capacity above, and lose no time.

{table(head, rows)}"""


def _way(one: Record) -> str:
    return f"{one['way']}, chunks of {one['chunk']:,}"


def _pairs_and_mixed(found: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the pair and the one whose decode helps, those that there are, and the others."""
    pairs = [one for one in found if one["way"] == "1P+1D"][:1]
    pairs += [one for one in found if _helps(one)][:1]
    return pairs, [one for one in found if one["way"] != "1P+1D" and not _helps(one)]


def _against(run: Run, found: Sequence[Record]) -> str:
    """Return a table of each pair over each of the others, after an empty line."""
    pairs, others = _pairs_and_mixed(found)
    return "".join(_over_each(run, pair, others) for pair in pairs if others)


def _over_each(run: Run, pair: Record, others: Sequence[Record]) -> str:
    rows, ours = [], "the pair whose decode helps" if _helps(pair) else "the pair"
    for one in others:
        against = f"{ours} over {_way(one)}"
        gap = number(pair["gap_p99"]) / number(one["gap_p99"])
        tokens = pair["tokens_per_s"] / one["tokens_per_s"]
        told = [
            Goal(f"p99 of gaps, {against}", "gaps", gap, GAP, "ratio", least=False),
            Goal(f"tokens/s, {against}", "tokens", tokens, TOKENS, "ratio", least=True),
        ]
        for name, key in (("median", "ttft_p50"), ("p99", "ttft_p99")):
            ratio = _ratio(number(pair[key]), number(one[key]))
            subject = f"{name} of first tokens under load, {against}"
            told.append(Goal(subject, "prompts", ratio, FIRST, "ratio", least=False))
        rows.append([_way(one), *(f"{g.value:.2f} ({run.held(g)})" for g in told)])
    over = f"{pair['way']}{',' if _helps(pair) else ''} over"
    head = [over, "gap p99", "tokens/s", "first token p50", "first token p99"]
    return f"\n\n{table(head, rows)}"


def _ratio(ours: float, theirs: float) -> float:
    """Return a ratio that is no number only where neither is one: then neither is worse."""
    if math.isinf(theirs):
        return 1.0 if math.isinf(ours) else 0.0
    return ours / theirs


def picture(found: Sequence[Record]) -> str | None:
    """Return an SVG: which share of the gaps is longer; None where there is nothing to draw."""
    lines = [
        plots.Line(f"{one['way']}, {one['chunk']}", points, colour)
        for colour, one in enumerate(found)
        if (points := [(1e3 * gap, part) for gap, part in one["gaps"] if gap > 0])
    ]
    if not lines:
        return None
    points = [point for line in lines for point in line.points]
    x = plots.log_axis("milliseconds between two tokens of a stream", (x for x, _ in points))
    y = plots.log_axis("share of the gaps that are longer", (y for _, y in points),
                       [0.001, 0.01, 0.1, 0.5])  # fmt: skip
    return plots.picture(
        "Steady streams while prompts arrive, by prompt tokens a step", x, y, lines
    )


def _pictured(found: Sequence[Record]) -> str:
    return f"\n\n![Gaps between tokens](../images/{PICTURE}.svg)" if picture(found) else ""


def exact(run: Run) -> str:
    """Whether answers are the same bits."""
    found = list(run.record.get("exact") or ())
    if not found:
        return ""
    rows, lines = [], []
    for one in found:
        equal, kv = 1 - one["differ"] / one["requests"], one.get("kv")
        layers = f", {one['layers']} layers" if one.get("layers") else ""
        name = f"answers of the pair that are a mixed worker's, K = {one['k']}"
        name += f", KV over {kv}{layers}" if kv else ""
        told = run.held(Goal(name, "exact", equal, EQUAL, "share", least=True))
        rows.append([f"{kv or '-'}{layers}", one["k"], f"{one['requests']:,}",
                     one.get("greedy", "-"), f"{one['tokens']:,}",
                     amount(one["bytes"]) if "bytes" in one else "-",
                     f"{one['accepted_drafts']:,.0f}", one["differ"], told])  # fmt: skip
        lines += [f"- {line}" for line in one["first"]]
    head = ["KV over", "K", "requests", "greedy", "tokens", "KV", "drafts accepted", "differ",
            "equal (goal)"]  # fmt: skip
    helping = [one for one in found if one.get("by_decode")]
    own = sum(one["by_decode"] for one in helping)
    ways = " and ".join(sorted({one["kv"] for one in helping}))
    helped = f" With *{ways}* decode computes prompts too, {own:,.0f} of these." if ways else ""
    differing = "\n\nThe first that differ:\n\n" + "\n".join(lines) if lines else ""
    return f"""## The same bits

Requests of every kind of sampling and of logprobs, many at once, of the pair at each K and of a
mixed worker that drafts nothing: tokens, logprobs, alternatives, ranks, prompts' logprobs.{helped}

{table(head, rows)}{differing}"""


def handoffs(run: Run) -> str:
    """What the pair's KV took."""
    found = [(f"idle, prompts of {one['prompt']:,}, chunks of {one.get('chunk', '?')}",
              one.get("handoff")) for one in run.record.get("ttft") or ()]  # fmt: skip
    found += [(f"steady streams, {_way(one)}", one.get("handoff"))
              for one in run.record.get("steady") or ()]  # fmt: skip
    rows = [[name, *_handoff(told)] for name, told in found if told and told["count"]]
    if not rows:
        return ""
    head = ["", "handoffs", "KV", "by way", "read ahead", "place, ms", "held up by",
            "transfer, ms", "import, ms", "rate of a transfer"]  # fmt: skip
    return f"""## The handover of KV

As the workers count it; milliseconds are means of a handoff. A place is what prefill asks decode
for before it computes a prompt; who gets none at once was held up by what decode was short of
([metrics](../metrics.md) has the reasons). Read ahead is KV that decode had read when it
took the offer. A transfer is from the offer to decode's
word that the KV has arrived; handoffs that overlap each count their own time, and what was read
ahead counts among the bytes, so the rate is no link's and may be above it.

{table(head, rows)}"""


def _handoff(told: Record) -> list[str]:
    count, seconds = told["count"], told["transfer_seconds"]
    ways = ", ".join(
        f"{name} {amount(moved)}" for name, moved in (told.get("bytes_by_transport") or {}).items()
    )
    place = f"{1e3 * told['place_seconds'] / told['places']:.2f}" if told.get("places") else "-"
    held_up = ", ".join(f"{name} {n:.0f}" for name, n in (told.get("held_up") or {}).items())
    pulled = told.get("pulled_blocks") or {}
    ahead = f"{100 * pulled.get('ahead', 0.0) / sum(pulled.values()):.0f} %" if pulled else "-"
    rate = f"{amount(told['bytes'] / seconds)}/s" if seconds else "-"
    each = [f"{1e3 * told[name] / count:.2f}" for name in ("transfer_seconds", "import_seconds")]
    return [
        f"{count:.0f}",
        amount(told["bytes"]),
        ways or "-",
        ahead,
        place,
        held_up or "-",
        *each,
        rate,
    ]


SECTIONS = {
    first_token: "ttft",
    page_pair_more.handed_over: "ttft",
    steady: "steady",
    page_pair_logprobs.scored: "logprobs",
    exact: "exact",
    page_pair_more.killed: "kills",
    handoffs: "ttft",
    page_pair_more.pulled: "pull",
    page_pair_more.pulled_by_nixl: "pull_nixl",
    page_pair_more.summed: "rank_sum",
    page_pair_more.started: "starts",
}
"""In the page's order, with the part that each is of."""


def not_measured(record: Record, has: Container[str]) -> str:
    """Return what failed, and what the run lacks altogether; `has`: parts that it does not."""
    lines = [*(record.get("unmeasured") or ())]
    lines += [f"not in this run: {what}" for part, what in MISSING.items() if part not in has]
    return "## Not measured\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


class Ratios(NamedTuple):
    """bench_ratios' JSON, and how the page links to it."""

    record: Record
    results: str

    def section(self, is_first: bool) -> str:
        """What the page tells of it; the first run's heading names no card."""
        most = max(one["gpus"] for one in self.record["ratios"])
        where = machine(self.record["machine"], most)
        card = "" if is_first else f", {self.record['machine']['gpu']}"
        return page_pair_more.ratios(self.record, where, self.results, card)


class Part(NamedTuple):
    """A part of another run: bench_pair's or a program's own JSON, and how the page links to it."""

    name: str
    record: Record
    results: str

    @property
    def value(self) -> Any:
        """What the run would have under the part's name."""
        value = self.record.get(self.name)
        if self.name == "exact":
            of = self.record
            cut = {} if of["layers"] == FULL_LAYERS.get(of["model"]) else {"layers": of["layers"]}
            return [one | cut for one in value or ()]
        if self.name == "logprobs":
            gateways = self.record.get("gateways", 1)
            return [one | {"gateways": gateways} for one in value or ()]
        return value if isinstance(value, dict) else dict(self.record)

    @property
    def told(self) -> str:
        """Which run it is."""
        return f"[at {self.record['commit']}]({self.results})"


def with_parts(record: Record, parts: Sequence[Part]) -> dict[str, Any]:
    """Return a run with what it lacks of others; answers of several runs stand together, behind
    its own, logprobs of another one before its own.

    Raises:
        ValueError: the run has the part itself.
    """
    whole = dict(record)
    for part in parts:
        if part.name == "logprobs":
            whole |= {"logprobs": [], "logprobs_before": list(record.get("logprobs") or ())}
        elif record.get(part.name) and part.name != "exact":
            raise ValueError(f"{part.name}: the run has it itself")
        value, before = part.value, whole.get(part.name)
        whole[part.name] = [*(before or ()), *value] if isinstance(value, list) else value
    return whole


def _of_its_run(text: str, parts: Sequence[Part], own: int = 0) -> str:
    """Return a section that says below its heading which run it is of; `own`: the first so many
    rows of its table are of the run above.
    """
    if not (text and parts):
        return text
    heading, rest = text.split("\n\n", 1)
    runs = ", ".join(part.told for part in parts)
    first = "first row is" if own == 1 else f"first {own} rows are"
    which = f"The {first} of the run above, the others not" if own else "Not of the run above"
    return f"{heading}\n\n{which}: {runs}.\n\n{rest}"


def page(
    record: Record,
    results: str,
    written: str | None = None,
    ratios: Sequence[Ratios] = (),
    parts: Sequence[Part] = (),
) -> str:
    """Return the page; `written` holds the hand-written words, page_pair_bounds.md's by default."""
    own = len(record.get("exact") or ())
    record = with_parts(record, parts)
    run = Run(record)
    head = HEAD.format(
        machine=machine(record["machine"]),
        program="`tests/gpu/" + ("battery_two.py" if "steps" in record else "bench_pair.py") + "`",
        commit=record["commit"],
        model=MODELS.get(record["model"], record["model"]),
        results=results,
    )
    words = bounds_of(BOUNDS.read_text() if written is None else written)
    sections = [
        _of_its_run(
            section(run), [one for one in parts if one.name == part], own * (part == "exact")
        )
        for section, part in SECTIONS.items()
    ]
    if any(part.name == "logprobs" for part in parts):
        at = list(SECTIONS.values()).index("logprobs")
        sections[at] += "\n\n" + words[BEHIND]
    told = goals(run) if run.goals else ""
    texts = [head, told, bounding(run, words), *sections]
    has = {part for part in MISSING if record.get(part)} | ({"ratios"} if ratios else set())
    texts += [one.section(is_first=one is ratios[0]) for one in ratios]
    texts.append(not_measured(record, has))
    return "\n\n".join(text for text in texts if text) + "\n"


def problems(record: Any) -> list[str]:
    """Return what is wrong with a run's JSON."""
    return list(RECORD("", record))


PARTS = ("exact", "logprobs", "kills", "pull", "pull_nixl", "rank_sum")
"""What another run may have measured."""


def of_part(name: str) -> Callable[[Any], list[str]]:
    """Return what finds what is wrong with the head of another run's JSON."""
    needs = Group({"commit": TEXT} | ({"layers": WHOLE, "model": TEXT} if name == "exact" else {}))
    return lambda told: list(needs("", told))


def _named(word: str) -> tuple[str, Path]:
    name, found, path = word.partition("=")
    if not found or name not in PARTS:
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=FILE, NAME of {', '.join(PARTS)}")
    return name, Path(path)


def main(words: Sequence[str] | None = None) -> None:
    """Write the page and the picture; say whether missed goals have no words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON, in the docs' folder")
    parser.add_argument("docs", type=Path)
    parser.add_argument("--ratios", type=Path, action="append", default=[],
                        help="bench_ratios' JSON, there too; again for another run")  # fmt: skip
    parser.add_argument("--part", type=_named, action="append", default=[], metavar="NAME=FILE",
                        help="a part that it lacks, of another run; exact: of several")  # fmt: skip
    options = parser.parse_args(words)
    benchmarks = options.docs / "benchmarks"
    for path in (options.results, *options.ratios, *(path for _, path in options.part)):
        if not path.resolve().is_relative_to(benchmarks.resolve()):
            parser.error(f"{path} is not in {benchmarks}, and the page links to it")

    def linked(path: Path) -> str:
        return path.resolve().relative_to(benchmarks.resolve()).as_posix()

    try:
        record = read(options.results, problems)
        ratios = [
            Ratios(read(path, lambda told: list(page_pair_more.RATIOS("", told))), linked(path))
            for path in options.ratios
        ]
        parts = [Part(name, read(path, of_part(name)), linked(path)) for name, path in options.part]
        wrong = problems(with_parts(record, parts))
        if wrong:
            raise ValueError(f"with the parts of other runs: {wrong[0]}")
    except ValueError as error:
        sys.exit(f"[page] {error}")
    text = page(record, linked(options.results), ratios=ratios, parts=parts)
    if drawn := picture(record.get("steady") or ()):
        images = options.docs / "images"
        images.mkdir(parents=True, exist_ok=True)
        (images / f"{PICTURE}.svg").write_text(drawn)
    (benchmarks / "several-gpus.md").write_text(text)
    if "Not explained yet." in text:
        print(f"a missed goal is not explained: write of its subject in {BOUNDS}")


if __name__ == "__main__":
    main()
