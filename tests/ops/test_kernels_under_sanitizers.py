"""The kernels neither leave their buffers, nor overflow, nor race, nor allocate in a call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
CHECK = Path(__file__).parent / "native" / "kernels_check.cc"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # above that of the check, which says what it printed
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_native_check_passes(tmp_path: Path, sanitizers: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    binary = tmp_path / "kernels_check"
    sources = sorted((OPS / "csrc" / "cpu").glob("*.cc"))
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    # The check replaces operator new with malloc on purpose, to count; gcc 12 inlines one half.
    flags += ["-Wno-mismatched-new-delete"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    includes = ["-I", str(OPS / "include"), "-I", str(OPS / "csrc")]
    subprocess.run(
        [compiler, *flags, *includes, str(CHECK), *map(str, sources), "-o", str(binary)], check=True
    )
    done = subprocess.run([binary], capture_output=True, text=True, timeout=3000, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
