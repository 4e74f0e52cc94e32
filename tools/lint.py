"""Run every static check and print one line for each; exit 1 if any fails.

Checks: ruff format and lint, mypy strict, import-linter contracts, clang-format, the size rules (no
file over 400 lines, no function over 60 lines or 9 parameters, tests over 600), the one version,
and that no key pair lies among the sources. That the GPU's code has moved on since its suite ran
is told and fails nothing: it may run elsewhere than here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_stamp
from version import disagreements

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
MAX_FILE_LINES, MAX_TEST_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 600, 60, 9


def tracked(*suffixes: str) -> list[Path]:
    """Return the repository's own files with these suffixes: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = listing.stdout.splitlines()
    return [ROOT / n for n in names if n.endswith(suffixes) and (ROOT / n).exists()]


def command(*words: str | Path) -> Callable[[], str]:
    """Return a check that runs a program and reports its output when it fails."""

    def check() -> str:
        done = subprocess.run(
            [str(w) for w in words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()

    return check


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield each function in a tree. Expressions hold none, and are most of its nodes."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions(child)


def oversize(path: Path) -> Iterator[str]:
    """Yield each size rule that a Python file breaks."""
    text = path.read_text()
    is_test = path.is_relative_to(ROOT / "tests")
    limit = MAX_TEST_LINES if is_test else MAX_FILE_LINES
    name = path.relative_to(ROOT)
    lines = text.count("\n")
    if lines > limit:
        yield f"{name}: {lines} lines, limit {limit}"
    for node in functions(ast.parse(text)):
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        count = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
        if size > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno} {node.name}: {size} lines, limit {MAX_FUNCTION_LINES}"
        if count > MAX_PARAMETERS and not is_test:
            yield f"{name}:{node.lineno} {node.name}: {count} parameters, limit {MAX_PARAMETERS}"


def sizes() -> str:
    """Check Python and native sources against the size rules."""
    found = [line for path in tracked(".py") for line in oversize(path)]
    for path in tracked(".cc", ".h", ".cu", ".cuh"):
        lines = path.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, limit {MAX_FILE_LINES}")
    return "\n".join(found)


def traps() -> str:
    """Refuse files that break Python from the repository root: `operator` shadows the library."""
    bad = [p for p in (ROOT / "operator").rglob("*.py") if p.name.startswith(("__init__", "test_"))]
    bad = [p for p in bad if "src" not in p.relative_to(ROOT).parts]
    return "\n".join(f"{p.relative_to(ROOT)} shadows the standard library's operator" for p in bad)


def versions() -> str:
    """Check that every place repeats the version of the file VERSION."""
    return "\n".join(disagreements(ROOT))


def keys() -> str:
    """Refuse key pairs and certificates: what `keygen` wrote is nobody's to commit."""
    suffixes = (".secret", ".public", ".pem", ".key")
    found = [str(path.relative_to(ROOT)) for path in tracked(*suffixes)]
    return "\n".join(
        f"{name}: a key; remove it, and replace it where it was used" for name in found
    )


def gpu_note() -> str:
    """Return what is to be said of the GPU suite's stamp; `make release-check` fails on it."""
    try:
        return gpu_stamp.note(gpu_stamp.read(), gpu_stamp.hashes())
    except ValueError as error:
        return str(error)


def run(checks: Mapping[str, Callable[[], str]]) -> int:
    """Run these one after another, a line for each, and return how many failed."""
    failed = 0
    for name, check in checks.items():
        started = time.monotonic()
        problem = check()
        failed += bool(problem)
        mark = "FAIL" if problem else "ok"
        line = f"[lint] {name:<14} {mark:<4} {time.monotonic() - started:5.1f} s\n"
        # In one piece: another line of checks writes meanwhile.
        sys.stdout.write(line + (f"{problem}\n" if problem else ""))
        sys.stdout.flush()
    return failed


def main() -> int:
    """Run the checks: mypy takes as long as all others, and both of its runs write one cache."""
    native = tracked(".cc", ".h", ".cu", ".cuh")
    by_mypy: dict[str, Callable[[], str]] = {
        "mypy strict": command(BIN / "mypy"),
        "mypy benches": command(BIN / "mypy", *sorted((ROOT / "tests/bench").glob("*.py"))),
    }
    others: dict[str, Callable[[], str]] = {
        "traps": traps,
        "version": versions,
        "keys": keys,
        "ruff format": command(BIN / "ruff", "format", "--check", "."),
        "ruff": command(BIN / "ruff", "check", "."),
        "clang-format": command(BIN / "clang-format", "--dry-run", "--Werror", *native),
        "sizes": sizes,
        "import layers": command(BIN / "lint-imports", "--no-cache"),
    }
    with ThreadPoolExecutor() as pool:
        failed = sum(pool.map(run, (by_mypy, others)))
    if told := gpu_note():
        sys.stdout.write(f"[lint] {'gpu stamp':<14} note {told}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
