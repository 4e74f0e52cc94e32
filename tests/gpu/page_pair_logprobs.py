"""The section of a pair's page that tells what logprobs of every token cost many streams.

Owns its goal. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

from page_record import ABOVE, LEAST, WHOLE, Group
from page_text import Goal, Record, Run, share, table

SCORED = 0.97
CPU = Group({"gateway": LEAST, "gateway_first_thread": LEAST, "decode": LEAST})
SCORES = Group(
    {"none": ABOVE, "top": ABOVE, "ratio": ABOVE},
    {"cpu_us_per_token": Group({"none": CPU, "top": CPU}), "gateways": WHOLE},
)


def scored(run: Run) -> str:
    """What logprobs cost; of a run apart, and then of the run whose other parts are told too."""
    rounds = list(run.record.get("logprobs") or ())
    if not rounds:
        return ""
    streams = run.record["sizes"]["wide"]["streams"]
    name = f"tokens/s with logprobs, k = 20, over none, {streams} streams{_behind(rounds)}"
    middle, told = _middle(rounds, run.record["sizes"].get("rounds"))
    verdict = run.held(Goal(name, "logprobs", middle, SCORED, "share", least=True))
    shown = f"""## Logprobs of every token

{streams} streams on 1P+1D{_behind(rounds)}, the phase in which all run; with and without in turns.
The median of {told} ({verdict}); they lie between {_ends(rounds)}.

{_rates(rounds)}"""
    if not (before := list(run.record.get("logprobs_before") or ())):
        return shown
    middle, told = _middle(before)
    return f"""{shown}

Before that, in the run of the other parts, behind one gateway: the median of {told}, between
{_ends(before)}.

{_rates(before)}"""


def _middle(rounds: Sequence[Record], asked: int | None = None) -> tuple[float, str]:
    """Return the median of the rounds' ratios, and what it is in words."""
    ratios = sorted(one["ratio"] for one in rounds)
    middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2
    of = f"the ratios of {len(ratios)} rounds"
    if asked and len(ratios) < asked and "gateways" not in rounds[0]:
        of = f"the ratios of {len(ratios)} of {asked} rounds (*Not measured* has the others)"
    return middle, f"{of} is {share(middle)}"


def _ends(rounds: Sequence[Record]) -> str:
    ratios = sorted(one["ratio"] for one in rounds)
    return f"{share(ratios[0])} and {share(ratios[-1])}"


def _behind(rounds: Sequence[Record]) -> str:
    n = rounds[0].get("gateways", 1)
    return f" behind {n} gateways on one port" if n > 1 else ""


def _rates(rounds: Sequence[Record]) -> str:
    rows = [
        [n + 1, f"{one['none']:,.0f}", f"{one['top']:,.0f}", share(one["ratio"]), *_loop(one)]
        for n, one in enumerate(rounds)
    ]
    head = ["round", "none, tokens/s", "k = 20, tokens/s", "k = 20 over none"]
    if _loop(rounds[0]):
        head += ["loops, none, us a token", "k = 20", "processors, none", "k = 20"]
    return table(head, rows)


def _loop(one: Record) -> list[str]:
    """Return what gateways' event loops took of processors, together, if it was looked at."""
    cpu = one.get("cpu_us_per_token")
    if not cpu:
        return []
    took = {name: cpu[name]["gateway_first_thread"] for name in ("none", "top")}
    busy = [f"{took[name] * one[name] / 1e6:.2f}" for name in took]
    return [*(f"{us:.1f}" for us in took.values()), *busy]
