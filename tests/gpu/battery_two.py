"""All that is measured on two GPUs of one host, one program after the other, in a bounded time.

    python3 tools/gpu.py --gpus 2 run tests/gpu/battery_two.py --out FOLDER [--seconds 540]
        [--only STEP ...] [--skip STEP ...]
    python3 tests/gpu/battery_two.py --join ONE.json OTHER.json --out FOLDER

Owns the order (what is worth most comes first), each step's share of the seconds, and the one JSON
that `page_pair` makes the page of: FOLDER/several-gpus.json, written behind every step, so that who
is killed loses the step under way and no more - and of that all but the last number, for programs
write theirs as they go. Programs that this checkout lacks are named as missing. The model's folder
is written once for all. `--model tiny --engine cpu` tries it without a GPU. Measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools")]

from bench_gateway import FOLDER_BYTES, write_folder_apart  # noqa: E402
from pair_report import Limit, machine, say, write_json  # noqa: E402
from pair_sizes import SIZES  # noqa: E402

import gpu  # noqa: E402

NAME = "several-gpus.json"
PAIR = "tests/gpu/bench_pair.py"
GRACE_SECONDS, END_SECONDS, LEAST_SECONDS = 15.0, 5.0, 10.0
"""What a program may take longer than it was told; to end when it is asked to; and the least that
one is started for."""
JOINED = ("ttft", "exact", "steady", "logprobs", "starts", "unmeasured", "steps")
"""Lists that several programs, or runs, add to; all else is one program's."""
SAME = ("commit", "engine", "model", "machine")
"""What must be the same of all that comes together."""


class Step(NamedTuple):
    """A program to run.

    Attributes:
        name: what `--only` calls it.
        program: of this checkout.
        words: what it is told; FOLDER and LAYERS stand for the model's.
        seconds: its share of the time.
        part: where its JSON goes in the whole; "" for that of `bench_pair`, whose parts are the
            whole's own.
        told_seconds: whether it takes `--seconds`.
        needs: a file of the checkout without which it makes no sense.
        on_cpu: what it is told instead, in a trial without a GPU; None: it cannot be tried so.
        is_named: run only where `--only` names it: it is another step with more in it.
    """

    name: str
    program: str
    words: tuple[str, ...]
    seconds: float
    part: str = ""
    told_seconds: bool = True
    needs: str = ""
    on_cpu: tuple[str, ...] | None = None
    is_named: bool = False


NIXL = "tests/bench/gpu/bench_pull_nixl.py"
MODEL = ("--model", "MODEL", "--engine", "ENGINE", "--folder", "FOLDER", "--layers", "LAYERS")
STEPS = (
    Step("idle", PAIR, (*MODEL, "--only", "ttft", "exact", "--kv", "nvlink"), 190.0,
         on_cpu=(*MODEL, "--only", "ttft", "exact", "--kv", "nvlink", "--chunks", "64", "32")),
    Step("loaded", PAIR, (*MODEL, "--only", "steady", "logprobs"), 220.0,
         on_cpu=(*MODEL, "--only", "steady", "logprobs", "--chunks", "64", "32")),
    Step("helped", PAIR, (*MODEL, "--only", "steady", "logprobs", "--decode-chunk", "512"), 320.0,
         on_cpu=(*MODEL, "--only", "steady", "logprobs", "--chunks", "64", "32",
                 "--decode-chunk", "32"), is_named=True),
    Step("kills", "tests/gpu/bench_kills.py", ("--engine", "ENGINE"), 110.0, "kills",
         on_cpu=("--engine", "sim", "--cells", "1", "--kills", "4")),
    Step("pull", "tests/bench/gpu/bench_pull.py", (), 40.0, "pull", told_seconds=False),
    Step("nixl", PAIR, (*MODEL, "--only", "exact", "--kv", "nixl", "--exact", "250"), 100.0,
         needs=NIXL),
    Step("pull_nixl", NIXL, (), 90.0, "pull_nixl", told_seconds=False),
    Step("ranks", "tests/gpu/bench_ranks.py", (), 150.0, "ranks", told_seconds=False),
    Step("rank_sum", "tests/bench/gpu/bench_rank_sum.py", (), 60.0, "rank_sum",
         told_seconds=False),
    Step("zmq", PAIR, (*MODEL, "--only", "exact", "--kv", "zmq", "--exact", "120"), 100.0,
         on_cpu=(*MODEL, "--only", "exact", "--kv", "zmq", "--chunks", "32")),
)  # fmt: skip
"""In the order of what they are worth. `helped` is `loaded` and more, a pair whose decode computes
prompts while prefill's line is long: name it instead. Answers over zmq come last: the tests of the
engine hold them too, and the whole model's KV takes long there."""


def command(step: Step, words: Mapping[str, str], seconds: float, out: Path) -> list[str]:
    """Return what is run for a step."""
    told = step.words
    if words["ENGINE"] != "gpu":
        told = step.on_cpu or ()
    filled = [words.get(word, word) for word in told]
    if not words["FOLDER"] and "--folder" in filled:
        where = filled.index("--folder")
        del filled[where : where + 2]
    timed = ["--seconds", f"{seconds:.0f}"] if step.told_seconds else []
    return [sys.executable, str(ROOT / step.program), *filled, *timed, "--json", str(out)]


def joined(whole: dict[str, Any], told: Mapping[str, Any], part: str) -> None:
    """Put a program's JSON into the whole."""
    if part:
        whole[part] = dict(told)
        return
    for name, value in told.items():
        if name in JOINED:
            whole.setdefault(name, []).extend(value)
        elif name == "seconds":
            whole.setdefault(name, {}).update(value)
        elif name not in SAME:
            whole.setdefault(name, value)


def together(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole of several runs of parts, of one commit on machines of the same cards.

    Raises:
        ValueError: they are not.
    """
    whole: dict[str, Any] = {name: runs[0][name] for name in SAME}
    for run in runs:
        for name in SAME:
            if run[name] != whole[name]:
                raise ValueError(f"{name} is {run[name]!r} in one, {whole[name]!r} in another")
        joined(whole, run, "")
    return whole


class Battery:
    """A run: the steps, and the JSON of what they left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._limit = options, Limit(options.seconds)
        self._out: Path = options.out.resolve()  # programs run at the checkout's root
        self.whole: dict[str, Any] = {
            "machine": machine(options.engine),
            "commit": gpu.commit(),
            "engine": options.engine,
            "model": options.model,
            "steps": [],
            "unmeasured": [],
        }

    def run(self) -> None:
        """Run all steps that were asked for."""
        self._write()
        with self._folder() as folder:
            words = {"ENGINE": self._options.engine, "MODEL": self._options.model,
                     "FOLDER": folder, "LAYERS": str(self._options.layers)}  # fmt: skip
            for step in steps_of(self._options):
                self._step(step, words)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        """Give the model's folder, "" for one that needs none; it stays where it was named."""
        options = self._options
        if options.model == "tiny":
            yield ""
            return
        folder: Path = options.folder or place_of(options)
        if not folder.exists():
            began, longest = time.monotonic(), SIZES[options.model].longest + 128
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            write_folder_apart(unfinished, options.layers, longest, drafts=True)
            unfinished.rename(folder)
            self.whole["folder_seconds"] = time.monotonic() - began
        yield str(folder)

    def _step(self, step: Step, words: Mapping[str, str]) -> None:
        if problem := missing(step, words["ENGINE"]):
            self._lacks(step, problem)
            return
        seconds = min(step.seconds, self._limit.left - GRACE_SECONDS)
        if seconds < LEAST_SECONDS:
            self._lacks(step, f"no time is left ({self._limit.left:.0f} s)")
            return
        path = self._out / f"{step.name}.json"
        path.unlink(missing_ok=True)
        say(f"== {step.name}: at most {seconds:.0f} s, {self._limit.left:.0f} s are left")
        began = time.monotonic()
        code = ended(begun(command(step, words, seconds, path)), seconds + GRACE_SECONDS)
        took = {"name": step.name, "seconds": time.monotonic() - began, "status": code}
        self.whole["steps"].append(took)
        if path.exists():
            joined(self.whole, json.loads(path.read_text()), step.part)
        if code:
            self.whole["unmeasured"].append(f"{step.name} ended with status {code}")
        self._write()
        path.unlink(missing_ok=True)  # all of it is in the whole
        say(f"== {step.name}: {took['seconds']:.0f} s, status {code}")

    def _lacks(self, step: Step, why: str) -> None:
        say(f"== {step.name}: not run: {why}")
        self.whole["unmeasured"].append(f"{step.name}: not run: {why}")
        self._write()

    def _write(self) -> None:
        write_json(self._out / NAME, self.whole)


def missing(step: Step, engine: str) -> str:
    """Return why a step cannot run here, "" where it can."""
    for name in (step.program, step.needs):
        if not (ROOT / name).exists():
            return f"this checkout has no {name}"
    return "" if engine == "gpu" or step.on_cpu is not None else "it needs GPUs"


def place_of(options: argparse.Namespace) -> Path:
    """Return where the model is kept: in memory where it is, or fits.

    Raises:
        OSError: it fits nowhere.
    """
    name = f"baton-{options.model}-{options.layers}"
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir() and (
            (place / name).exists() or shutil.disk_usage(place).free > FOLDER_BYTES
        ):
            return place / name
    raise OSError(f"nowhere are {FOLDER_BYTES / 1e9:.0f} GB for the model: name a --folder")


def begun(words: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, its neighbours there to be imported."""
    known = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(Path(words[1]).parent), *([known] if known else [])])
    environment = dict(os.environ) | {"PYTHONPATH": path}
    return subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **more)


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait so long for a program, end its process group, and return its status."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        say(f"== over its time by {GRACE_SECONDS:.0f} s: ending it")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def steps_of(options: argparse.Namespace) -> list[Step]:
    """Return the steps that were asked for, in their order."""
    only = options.only or [step.name for step in STEPS if not step.is_named]
    return [step for step in STEPS if step.name in only and step.name not in options.skip]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--seconds", type=float, default=540, help="of the whole run")
    parser.add_argument("--model", choices=[*SIZES], default="qwen3-8b")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument("--folder", type=Path, help="of the model; what is there is used")
    parser.add_argument("--only", nargs="+", choices=names, help="steps to run")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], help="steps to leave out")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE",
                        help="run nothing: put the JSON of runs of parts together")  # fmt: skip
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run or join; 1 if something was not measured."""
    options = parsed(words)
    if options.join:
        try:
            whole = together([json.loads(path.read_text()) for path in options.join])
        except ValueError as error:
            sys.exit(f"[battery] {error}")
        write_json(options.out / NAME, whole)
        return 0
    battery = Battery(options)
    battery.run()
    for line in battery.whole["unmeasured"]:
        say(f"not measured: {line}")
    return int(bool(battery.whole["unmeasured"]))


if __name__ == "__main__":
    sys.exit(main())
