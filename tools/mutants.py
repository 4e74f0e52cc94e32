"""Change the pure cores one place at a time, and say which changes the fast tests let live.

    python tools/mutants.py [--only outbox ...] [--operators bounds|all] [--jobs N]

cosmic-ray makes the mutants. It lives in an environment of its own under build/mutants, for nothing
else needs it. (mutmut copies sources to where it can switch mutants inside one process, by the
names under which they are imported; with `src` folders and pytest's importlib mode it finds none of
them.) tools/mutant_judge.py runs the tests on each. What is changed is a copy of the last commit,
never the working tree. Prints a table and each survivor as a diff; exits 1 when a core's own tests
fail before anything is changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
COSMIC_RAY = "cosmic-ray==8.7.0"
GIT_ARCHIVE, UNPACK = ("/usr/bin/env", "git", "archive", "HEAD"), ("/usr/bin/env", "tar", "-x")
JUDGE, ANSWER_SECONDS = ROOT / "tools" / "mutant_judge.py", 60.0
"""Who ends a mutant that makes the tests hang, and how long he may take to say so."""

WORKER, OPERATOR = "worker/src/baton_worker", "operator/src/baton_operator"
RECORDS = {
    "tests/records/test_[egnort]*.py tests/records/test_con*.py": "prefix control decode header"
    " encode extensions checks rows columns layout",
    "tests/records/test_[tr]*.py tests/records/test_coa*.py": "scored",
    "tests/records/test_coa*.py tests/records/test_records*.py": "coalesce",
}
CORES: dict[str, tuple[str, str]] = {
    "outbox": (f"{WORKER}/link/outbox.py", "tests/link/test_outbox*.py"),
    "inbox": (f"{WORKER}/link/inbox.py", "tests/link/test_inbox.py"),
    "worker_table": (f"{WORKER}/link/worker_table.py", "tests/link/test_worker_table.py"),
    "ledger": (f"{WORKER}/handoff/ledger.py", "tests/handoff/test_ledger.py"),
    **{
        name: (
            f"{WORKER}/handoff/{name.removeprefix('places.')}.py",
            "tests/handoff/test_places*d.py tests/handoff/test_places.py",
        )
        for name in ("places", "places.room", "places.shares")
    },
    "timers": (f"{WORKER}/handoff/timers.py", "tests/handoff/test_timers.py"),
    "pace": (f"{WORKER}/link/pace.py", "tests/link/test_pace.py"),
    "asks": (f"{WORKER}/handoff/asks.py", "tests/handoff/test_asks.py"),
    "offers": (f"{WORKER}/handoff/offers.py", "tests/handoff/test_offers.py"),
    "merge": (f"{WORKER}/gateway/output/merge.py", "tests/gateway/test_merge*.py"),
    "balance": (
        f"{WORKER}/gateway/serving/balance.py",
        "tests/gateway/test_balance*.py tests/gateway/test_a_failing*.py",
    ),
    "assignment": (
        f"{WORKER}/gateway/serving/assignment.py",
        "tests/gateway/test_choices_are_placed*.py tests/gateway/test_balance*.py",
    ),
    "capacity": (
        f"{WORKER}/gateway/serving/capacity.py",
        "tests/gateway/test_choices_are_placed*.py tests/gateway/test_nobody*.py",
    ),
    "pair_counts": (
        f"{WORKER}/gateway/serving/pair_counts.py",
        "tests/gateway/test_choices_are_placed*.py",
    ),
    "retry": (
        f"{WORKER}/gateway/serving/retry.py",
        "tests/gateway/test_what_is_tried*.py tests/gateway/test_retries*.py",
    ),
    "listening": (
        f"{WORKER}/listening.py",
        "tests/process/test_others_are_late_by_the_time_that_one_listened.py",
    ),
    "precedence": (
        f"{WORKER}/gateway/serving/precedence.py",
        "tests/gateway/test_the_interrupted_come_before_the_line.py",
    ),
    "ejection": (
        f"{WORKER}/gateway/serving/ejection.py",
        "tests/gateway/test_failures_in_a_row.py",
    ),
    "suspects": (f"{WORKER}/gateway/serving/suspects.py", "tests/gateway/test_suspects*.py"),
    "stops": (f"{WORKER}/gateway/output/stops.py", "tests/gateway/test_stop*.py"),
    "scheduler": (f"{WORKER}/engine/scheduling/scheduler.py", "tests/engine/test_scheduler.py"),
    "admission": (f"{WORKER}/engine/scheduling/admission.py", "tests/engine/test_admission.py"),
    "prefix": (f"{WORKER}/engine/scheduling/prefix_cache.py", "tests/engine/test_prefix.py"),
    "request_book": (
        f"{WORKER}/engine/scheduling/request_book.py",
        "tests/engine/test_request_book.py",
    ),
    "sampler": (f"{WORKER}/engine/sampling/sampler.py", "tests/engine/serving/test_sampler.py"),
    **{
        f"records.{name}": (f"{WORKER}/records/{name}.py", tests)
        for tests, names in RECORDS.items()
        for name in names.split()
    },
    "work_queue": (f"{OPERATOR}/reconciling/work_queue.py", "tests/operator/test_workqueue.py"),
    "scaling": (f"{OPERATOR}/planning/scaling.py", "tests/operator/test_scaling_ratio.py"),
    "plan": (f"{OPERATOR}/planning/plan.py", "tests/operator/test_plan*.py"),
    **{
        name: (f"{OPERATOR}/planning/{name}.py", "tests/operator/test_rollout_*.py")
        for name in ("rollout", "step_limits", "pairs")
    },
    "deadline": (f"{OPERATOR}/planning/deadline.py", "tests/operator/test_deadline.py"),
    "renderer": (
        f"{OPERATOR}/children/renderer.py",
        "tests/operator/test_a_pass*.py tests/operator/test_gateways_take*.py",
    ),
    "status": (f"{OPERATOR}/status/status.py", "tests/operator/test_status.py"),
    "pair_template": (
        f"{OPERATOR}/models/pair_template.py",
        "tests/operator/test_templates_become_one.py tests/operator/test_pairs_in_one_pod.py",
    ),
    "kv_ways": (f"{OPERATOR}/pods/kv_ways.py", "tests/operator/test_the_way_of_kv_is_told.py"),
}

COMPARISONS = "ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq)$"
KEPT = {
    "bounds": f"{COMPARISONS}|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|AddNot",
    "all": f"{COMPARISONS}|NumberReplacer|Replace(And|Or|Break|Continue|True|False|Unary|Binary)"
    "|AddNot|ZeroIteration|ExceptionReplacer|RemoveDecorator",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one core's mutants; `problem`: why there are none."""

    core: str
    killed: int = 0
    survivors: tuple[str, ...] = ()
    problem: str = ""


def say(line: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"[mutants] {line}\n")
    sys.stderr.flush()


def tool(name: str) -> str:
    """Return a program of the environment that makes mutants; make that if it is missing."""
    folder = WORK / "venv"
    if not (folder / "bin" / "cosmic-ray").exists():
        say(f"installing {COSMIC_RAY} into {folder.relative_to(ROOT)}")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", COSMIC_RAY]
        subprocess.run(pip, check=True)
    return str(folder / "bin" / name)


def copy_of_last_commit(number: int) -> Path:
    """Return a fresh tree with the last commit's files."""
    tree = WORK / f"tree-{number}"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(GIT_ARCHIVE, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(UNPACK, cwd=tree, input=archive.stdout, check=True)
    return tree


@contextlib.contextmanager
def judge(tree: Path, module: str, tests: str) -> Iterator[float | None]:
    """Yield the seconds after which a mutant's tests are said to hang; None: they fail without."""
    found = [path for pattern in tests.split() for path in sorted(tree.glob(pattern))]
    names = [str(path.relative_to(tree)) for path in found]
    packages = ":".join(str(tree / part / "src") for part in ("worker", "operator"))
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # a process is forked while it has one thread only
    with subprocess.Popen(
        [ROOT / ".venv/bin/python", JUDGE, "serve", module, *names],
        cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **one_thread, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as serving:  # fmt: skip
        assert serving.stdin is not None
        assert serving.stdout is not None
        told = serving.stdout.readline()
        yield float(told) if told else None
        serving.stdin.close()


def mutate(core: str, operators: str, tree: Path) -> Outcome:
    """Make a core's mutants, run its tests on each, and return what became of them."""
    module, tests = CORES[core]
    (tree / "judge.sock").unlink(missing_ok=True)
    config, session = tree / "mutants.toml", tree / f"{core}.sqlite"
    ask = shlex.join([sys.executable, "-I", "-S", str(JUDGE), "ask"])
    with judge(tree, module, tests) as seconds:
        if seconds is None:
            return Outcome(core, problem="its tests fail unchanged, see above")
        config.write_text(
            f"[cosmic-ray]\nmodule-path = '{module}'\ntimeout = {seconds + ANSWER_SECONDS}\n"
            f"excluded-modules = []\ntest-command = {json.dumps(ask)}\n"
            "[cosmic-ray.distributor]\nname = 'local'\n"
            "[cosmic-ray.filters.operators-filter]\n"
            f"exclude-operators = ['^(?!core/({KEPT[operators]}))']\n"
        )
        for program, *rest in (
            ("cosmic-ray", "init", config.name, session.name),
            ("cr-filter-operators", session.name, config.name),
            ("cosmic-ray", "exec", config.name, session.name),
        ):
            subprocess.run([tool(program), *rest], cwd=tree, check=True, capture_output=True)
    return read(core, tree, session)


def read(core: str, tree: Path, session: Path) -> Outcome:
    """Return what a finished session says."""
    dump = [tool("cosmic-ray"), "dump", session.name]
    done = subprocess.run(dump, cwd=tree, check=True, capture_output=True, text=True)
    results = [json.loads(line)[1] for line in done.stdout.splitlines()]
    ran = [result for result in results if result["worker_outcome"] != "skipped"]
    alive = tuple(sorted(r["diff"] for r in ran if r["test_outcome"] == "survived"))
    return Outcome(core, len(ran) - len(alive), alive)


def report(outcomes: list[Outcome]) -> str:
    """Return the table and the survivors."""
    lines = ["| core | mutants | killed | lived | killed, % |", "|---|---|---|---|---|"]
    for found in outcomes:
        lived = len(found.survivors)
        share = 100.0 * found.killed / max(1, found.killed + lived)
        lines.append(
            f"| {found.core} | {found.killed + lived} | {found.killed} | {lived} | {share:.0f} |"
        )
    for found in outcomes:
        if found.problem:
            lines.append(f"\n{found.core}: {found.problem}")
        lines += [f"\n```diff\n{diff.strip()}\n```" for diff in found.survivors]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Parse the command line, mutate, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(CORES), default=list(CORES))
    parser.add_argument("--operators", choices=sorted(KEPT), default="bounds",
                        help="bounds: comparisons, numbers, and, or, not")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="cores that are mutated side by side")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    options = parser.parse_args()
    tool("cosmic-ray")
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(options.jobs):
        trees.put(copy_of_last_commit(number))

    def one(core: str) -> Outcome:
        tree, started = trees.get(), time.monotonic()
        try:
            found = mutate(core, options.operators, tree)
        finally:
            trees.put(tree)
        lived = found.problem or f"{found.killed} killed, {len(found.survivors)} lived"
        say(f"{core}: {lived}, {time.monotonic() - started:.0f} s")
        return found

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(one, options.only))
    text = report(outcomes)
    sys.stdout.write(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 1 if any(found.problem for found in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
