"""CUDA kernels as functions of the host: sources rewritten to C++, compiled, called over NumPy.

Owns the rewriting of what is no C++ (shared variables, launches, instructions written as such), the
layout of the launches' arguments, and a library that stands where `baton_ops` expects its own. The
language and the runtime are stood for by `tests/ops/cuda_on_host/shims`. Knows no test.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from baton_testing import host_orders, kept_builds

ROOT = Path(__file__).parents[3]
OPS = ROOT / "ops"
HERE = ROOT / "tests" / "ops" / "cuda_on_host"
OPS_TESTS = ROOT / "tests" / "ops" / "cuda"
SOURCES = ("sampling.cu", "step.cu")
SUFFIXES = (".cc", ".cu", ".cuh", ".h")
OPTIONS = (
    *("-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    "-U_FORTIFY_SOURCE",  # a fortified longjmp takes a jump between stacks for an attack
    "-fno-gnu-unique",  # else the settings of two libraries in one process are one variable
)
FIRST_FIRST = 2**64 - 1
"""The seed by which of the threads that may run the first always does: these run ahead."""

INSTRUCTIONS = {
    "mov.u32 %0, %%cluster_ctarank;": "ClusterRank",
    "barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;": "ClusterSync",
    "ld.shared::cluster.u32 %0, [%1];": "ClusterLoad<uint32_t>",
    "ld.shared::cluster.u64 %0, [%1];": "ClusterLoad<uint64_t>",
    "st.shared::cluster.f32 [%0], %1;": "ClusterStore",
    "mapa.shared::cluster.u32 %0, %1, %2;": "ClusterPlace",
    "griddepcontrol.wait;": "WaitForGrids",
    "griddepcontrol.launch_dependents;": "LetGridsStart",
    "max.NaN.f32 %0, %1, %2;": "MaxOrNan",
}
"""What stands for an instruction: a function of its inputs, by name."""
_OPERAND = re.compile(r'"(=?)[rlfdn]"\(')


def _operands(text: str) -> tuple[list[str], list[str]]:
    """Return the expressions of an asm statement's outputs and inputs."""
    found: tuple[list[str], list[str]] = ([], [])
    for match in _OPERAND.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        expression = " ".join(text[match.end() : end - 1].split())
        found[0 if match[1] else 1].append(expression)
    return found


def _call(match: re.Match[str], instructions: Mapping[str, str]) -> str:
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[1]))
    lines = "\n" * match[0].count("\n")  # what follows stays on its line
    if not text:
        return ";" + lines
    name = instructions.get(text)
    if name is None:
        raise NotImplementedError(f"no host function stands for {text!r}")
    outputs, inputs = _operands(match[2])
    if name == "ClusterSync":
        inputs = ["__LINE__"]
    call = f"host_cuda::{name}({', '.join(inputs)});{lines}"
    return f"{outputs[0]} = {call}" if outputs else call


def _shared(match: re.Match[str]) -> str:
    kind, name, bounds = match.groups()
    # Of all that stands before it: the same in each process, so that builds are known again.
    number = zlib.crc32(match.string[: match.end()].encode()) & 0x7FFFFFFF
    return f"auto& {name} = host_cuda::Shared<{kind}{bounds}>({number});"


def rewritten(source: str, instructions: Mapping[str, str] = INSTRUCTIONS) -> str:
    """Return a CUDA source as C++ over the shims, line by line where it was.

    Raises:
        NotImplementedError: it has an instruction that nothing stands for.
    """
    dynamic = r"auto* \2 = host_cuda::DynamicShared<\1>();"
    source = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", dynamic, source)
    source = re.sub(r"__shared__ ([\w:<> ]+?) (\w+)((?:\[[^\]]*\])*);", _shared, source)
    source = re.sub(
        r'\basm(?: volatile)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)(.*?)\);',
        lambda match: _call(match, instructions),
        source,
        flags=re.S,
    )
    launcher = r"host_cuda::Launcher(\1, \2)("
    source = re.sub(r"(\w+)<<<(.*?)>>>\(", launcher, source, flags=re.S)
    passed_by = r"if (!host_cuda::IsSkipped(__FILE__, __LINE__)) \1::Sync();"
    source = re.sub(r"\b(Group|RowGroup<kBlocks>)::Sync\(\);", passed_by, source)
    bounds = r"__launch_bounds__\(([^)]*)\)(\s*(?:void )?\w+\([^{]*\)\s*\{)"
    return re.sub(bounds, r"\2 host_cuda::CheckBounds(\1);", source)


BARRIER = re.compile(r"^\s+(__syncthreads|Group::Sync|RowGroup<kBlocks>::Sync)\(\);")


def barriers(headers: Iterable[str]) -> list[tuple[str, int]]:
    """Return file and line of every statement of these kernels' headers that is a barrier."""
    found = []
    for name in headers:
        text = (OPS / "include" / "baton_ops" / name).read_text()
        lines = enumerate(text.splitlines(), start=1)
        found += [(name, number) for number, line in lines if BARRIER.match(line)]
    return found


@dataclass(frozen=True)
class Unit:
    """What is compiled into one library: sources of ops/csrc/cuda, and what the tests call."""

    sources: tuple[str, ...]
    entry: str
    rewrite: Callable[[str, str], str]
    """Of a file's name and text."""
    language: str = "device_language.h"
    """The shim that is included before anything else."""
    stand_ins: tuple[str, ...] = ()
    """Headers of shims that stand for the kernels' own."""


SAMPLER = Unit(SOURCES, "entry.cc", lambda _, text: rewritten(text))


def _lay_out(to: Path, unit: Unit) -> list[Path]:
    """Write what is compiled; return the translation units."""
    (to / "baton_ops").mkdir(parents=True)
    (to / "rewritten").mkdir()
    for header in (OPS / "include" / "baton_ops").glob("*.h"):
        (to / "baton_ops" / header.name).write_text(header.read_text())
    csrc = OPS / "csrc" / "cuda"
    texts = {to / "rewritten" / name: (csrc / name).read_text() for name in unit.sources}
    for path in csrc.glob("*.h"):
        texts[to / "rewritten" / path.name] = path.read_text()
    wanted = re.compile(r'#include "baton_ops/(\w+\.cuh)"')
    known: set[str] = set(unit.stand_ins)
    for name in unit.stand_ins:
        (to / "baton_ops" / name).write_text((HERE / "shims" / name).read_text())
    for source in (*(csrc / name for name in unit.sources), HERE / unit.entry):
        queue = wanted.findall(source.read_text())
        while queue:
            header_name = queue.pop()
            if header_name not in known:
                known.add(header_name)
                text = (OPS / "include" / "baton_ops" / header_name).read_text()
                queue += wanted.findall(text)
                texts[to / "baton_ops" / header_name] = text
    for path, text in texts.items():
        path.write_text(unit.rewrite(path.name, text))
    return [to / "rewritten" / name for name in unit.sources]


def build(compiler: str, to: Path, unit: Unit = SAMPLER) -> Path:
    """Return the kernels' library in an empty folder: compiled, or kept since it was.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    sources = [*_lay_out(to, unit), HERE / unit.entry]
    command = [compiler, "-I", str(to), *_flags(unit)]
    library = to / "libkernels_on_host.so"
    version = subprocess.run([compiler, "-v"], check=True, capture_output=True, text=True).stderr
    laid_out, ours = (
        sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
        for folder in (to, HERE)
    )
    # No folder: a checkout in another one has the same kernels.
    words = [version, *OPTIONS, unit.language, unit.entry]
    name = kept_builds.digest(words, [*laid_out, *ours])
    kept_builds.take(unit.entry, name, library, lambda: _compile(command, sources, library))
    return library


def _flags(unit: Unit) -> list[str]:
    shims = HERE / "shims"
    folders = ["-I", str(shims), "-I", str(HERE)]
    return [*OPTIONS, *folders, "-include", str(shims / unit.language)]


def _compile(command: list[str], sources: list[Path], library: Path) -> None:
    def compiled(source: Path) -> Path:
        target = library.parent / f"{source.stem}.o"
        subprocess.run([*command, "-x", "c++", "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([command[0], "-shared", *objects, "-o", library], check=True)


def _word(value: Any) -> int:
    return 0 if value is None else int(value.ctypes.data) if hasattr(value, "ctypes") else value


def _words(*values: Any) -> Any:
    """Return a structure whose members have eight bytes each: sizes and addresses of arrays."""
    return (ctypes.c_int64 * len(values))(*map(_word, values))


class HostLibrary(host_orders.Ordered):
    """The sampler's ops of `baton_ops`' CUDA library, over NumPy arrays.

    Every op raises RuntimeError with what a kernel did that no kernel may.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.set(seed=1)

    def set(
        self,
        seed: int,
        capability: int = 9,
        skipped: tuple[str, int] = ("", 0),
        shared_bytes: int = 227 << 10,
    ) -> None:
        """Set the order of threads, the device's generation, a barrier that is passed by, and the
        shared memory that a block may have.
        """
        file, line = skipped
        self._library.host_settings(
            ctypes.c_uint64(seed), capability, shared_bytes, ctypes.c_char_p(file.encode()), line
        )

    def _run(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, f"host_{name}")
        function.restype = ctypes.c_char_p
        plain = [a if isinstance(a, ctypes.Array) else ctypes.c_int64(_word(a)) for a in arguments]
        error = function(*plain)
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")

    def cuda_process(self, logits: Any, cu_rows: Any, *rest: Any) -> None:
        *state, processed, broken = rest
        slot, counts, seen, draft, *penalties, starts, ids, bias, mask_starts, masked = state
        sizes = (logits, *logits.shape, len(cu_rows) - 1, draft.shape[1], len(counts))
        given = (cu_rows, slot, counts, seen, draft, *penalties, starts, ids, bias, len(ids))
        words = _words(*sizes, *given, mask_starts, masked, len(masked))
        self._run("process", words, processed, broken)

    def cuda_argmax(self, logits: Any, token: Any, broken: Any) -> None:
        self._run("argmax", _words(logits, *logits.shape), token, broken)

    def cuda_probabilities(self, logits: Any, *rest: Any) -> None:
        *params, probs, broken = rest
        rows = _words(logits, *logits.shape)
        self._run("probabilities", rows, _words(len(params[0]), *params), probs, broken)

    def cuda_uniforms(self, seeds: Any, positions: Any, cu_rows: Any, out: Any) -> None:
        self._run("uniforms", _words(len(seeds), len(out), seeds, positions, cu_rows), out)

    def cuda_count_tokens(self, n: Any, token: Any, slot: Any, counts: Any, seen: Any) -> None:
        counted = _words(slot, *counts.shape, counts, seen)
        self._run("count_tokens", _words(*token.shape, n, token), counted)

    def cuda_scatter_tokens(self, n: Any, token: Any, *rest: Any) -> None:
        flat = _words(*rest, len(rest[-1]))
        self._run("scatter_tokens", _words(*token.shape, n, token), flat)

    def cuda_seed_drafts(self, n_accepted: Any, *seeds: Any) -> None:
        self._run("seed_drafts", n_accepted, len(n_accepted), _words(*seeds))

    def cuda_advance(self, n: Any, token: Any, starts: Any, drafts: Any, *rest: Any) -> None:
        first, draws, *out = rest
        accepted = (*token.shape, n, token)
        words = _words(*accepted, starts, drafts, *drafts.shape, first, draws)
        self._run("advance", words, _words(*out, out[-1].shape[1]))

    def cuda_look_up(self, n: Any, token: Any, *rest: Any) -> None:
        starts, first, slot, tokens, drafts, n_before, *ngrams = rest
        places = (starts, first, slot, *tokens.shape, *ngrams)
        words = _words(*token.shape, n, token, *places)
        self._run("look_up", words, _words(tokens, drafts, len(drafts), n_before, drafts.shape[1]))

    def cuda_verify_greedy(self, target: Any, draft: Any, *rest: Any) -> None:
        count, cu_rows, *out = rest
        drafts = _words(*draft.shape, draft, count, cu_rows)
        self._run("verify_greedy", target, drafts, _words(*out))

    def cuda_verify_sampled(self, probs: Any, uniform: Any, *rest: Any) -> None:
        proposals, residual, draft, count, cu_rows, *out = rest
        rows, vocab = probs.shape
        weights = _words(probs, vocab, vocab, rows, uniform, proposals, residual)
        drafts = _words(*draft.shape, draft, count, cu_rows)
        self._run("verify_sampled", weights, drafts, _words(*out))

    def cuda_plan(self, n: Any, token: Any, *rest: Any) -> None:
        cu_rows, k, temperature, first_row, top_p, *out = rest
        batch, columns = token.shape
        given = (n, token, cu_rows, k, temperature, first_row, top_p)
        self._run("plan", _words(batch, columns - 1, len(out[1]), *given), _words(*out))


class HostTensor(np.ndarray[Any, Any]):
    """An array with the few methods of PyTorch's tensors that the kernels' tests use."""

    def cpu(self) -> HostTensor:
        return self

    def cuda(self) -> HostTensor:
        return self

    def numpy(self) -> Any:
        return np.array(self)

    def clone(self) -> HostTensor:
        return self.copy()

    def to(self, dtype: Any) -> HostTensor:
        return self.astype(dtype)

    def double(self) -> HostTensor:
        return self.astype(np.float64)


_VECTOR = 16


def _tensor(values: Any, dtype: Any = None) -> HostTensor:
    """Return a copy at a place where vectors may begin, as a device's memory does."""
    array = np.asarray(values, dtype)
    raw = np.zeros(array.nbytes + 2 * _VECTOR, np.uint8)
    start = -raw.ctypes.data % _VECTOR
    aligned = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned.view(HostTensor)


class HostTorch:
    """What of PyTorch the kernels' tests use, over NumPy."""

    int32, float32, float64, uint8 = np.int32, np.float32, np.float64, np.uint8

    def as_tensor(self, values: Any, device: str) -> HostTensor:
        return _tensor(values)

    def tensor(self, values: Any, device: str) -> HostTensor:
        array = np.asarray(values)
        return _tensor(array, np.float32 if array.dtype == np.float64 else None)

    def full(self, shape: Any, value: Any, dtype: Any = None, device: str = "") -> HostTensor:
        return _tensor(np.full(shape, value, dtype or np.float32))

    def zeros(self, *shape: int, dtype: Any = np.float32, device: str = "") -> HostTensor:
        return _tensor(np.zeros(shape, dtype))

    def full_like(self, other: HostTensor, value: Any) -> HostTensor:
        return _tensor(np.full(other.shape, value, other.dtype))

    def equal(self, a: HostTensor, b: HostTensor) -> bool:
        return bool((a == b).all())


def load_gpu_tests(name: str) -> ModuleType:
    """Return a module of tests/ops/cuda, whose tests ask for `torch` and take what stands for it.

    It is loaded anew, so that its tests may be collected in two places.
    """
    spec = importlib.util.spec_from_file_location(f"{name}_on_host", OPS_TESTS / f"{name}.py")
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
