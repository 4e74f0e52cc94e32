"""ops/tools/build_cuda.sh refuses what ptxas says, and what machine code has and has not.

The script is the real one; what stands for the compiler says what the pinned one has said.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1f' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7519) warpgroup.arrive is injected in around line 1245 by compiler to allow use \
of registers in GMMA in function '_Z1f'
"""
CODE = """\
HGMMA.64x128x16.F32 QGMMA.64x128x32.F32 QGMMA.64x8x32.F32 UTMALDG.2D UTMALDG.4D UTMALDG.5D UBLKCP
ACQBULK PREEXIT USETMAXREG MOVM REDUX LDGSTS F2FP.F16.E4M3 HMMA.16816.F32.BF16 LDSM.16.M88
LDSM.16.MT88 LDS.128
STG.E.128.STRONG STG.E.128 STG.E.64.STRONG.SYS LDG.E.64.STRONG.SYS MEMBAR.SC.SYS LDG.E.STRONG.SYS
LDG.E.128 R0
"""
"""All that the script looks for in any source."""
COMPILER = """\
#!/usr/bin/env bash
[[ "$1" != --version ]] || exec cat "$(dirname "$0")/version"
while [[ "$1" != -o ]]; do shift; done
echo code >"$2"
cat "$(dirname "$0")/says"
[[ ! -e "$(dirname "$0")/fails" ]]
"""
"""It says the same of every source, and compiles each to one code."""
CMAKE = """\
#!/usr/bin/env bash
here="$(dirname "$0")"
for word; do
  case "$word" in
    -DCMAKE_CUDA_COMPILER_LAUNCHER=*) echo "${word#*=}" >"$here/launcher" ;;
    *.cu.o)
      [[ -e "$2/$word" ]] && continue
      mkdir -p "$2/${word%/*}" && "$(<"$here/launcher")" "$here/nvcc" -o "$2/$word" || exit 1
      ;;
  esac
done
"""
"""It compiles the objects that it is asked for and that are not there, as it was told to."""


def built(
    folder: Path, says: str = CLEAN, code: str = CODE, at: str = "tools", version: str = "13.0"
) -> subprocess.CompletedProcess[str]:
    """Run the script with a compiler that says so, and leaves that code."""
    tools = folder / at
    tools.mkdir(exist_ok=True)
    (tools / "version").write_text(version)
    (tools / "says").write_text(says)
    (tools / "code").write_text(code)
    (tools / "nvcc").write_text(COMPILER)
    (tools / "cmake").write_text(CMAKE)
    (tools / "cuobjdump").write_text('#!/usr/bin/env bash\ncat "$(dirname "$0")/code"\n')
    for name in ("nvcc", "cmake", "cuobjdump"):
        (tools / name).chmod(0o755)
    return run(tools)


def run(tools: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with the tools of a folder."""
    # CMake is looked for beside Python, which the script itself does not run here.
    environment = {
        "NVCC": str(tools / "nvcc"),
        "PYTHON": str(tools / "python"),
        "BUILD_DIR": str(tools.parent / "build"),
    }
    script = ROOT / "ops" / "tools" / "build_cuda.sh"
    return subprocess.run(
        ["bash", script], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_code_that_has_all_it_should_is_taken(tmp_path: Path) -> None:
    """A wait that ptxas adds for some registers is no product that waits for each before it."""
    done = built(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "compile for sm_90a" in done.stdout


SERIALISED = """\
ptxas info    : (C75{code}) Potential Performance Loss: wgmma.mma_async instructions are \
serialized due to {why} in the function '_ZN9baton_ops4cuda12ScaledKernelEv'
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (11, "insufficient register resources for the wgmma pipeline"),
        (14, "non wgmma instructions defining accumulator registers of a wgmma between start and"
             " end of the pipeline stage"),
        (20, "what another ptxas may say"),
    ],
)  # fmt: skip
def test_products_that_wait_for_each_other_are_refused_by_their_function(
    tmp_path: Path, code: int, why: str
) -> None:
    done = built(tmp_path, CLEAN + SERIALISED.format(code=code, why=why))
    assert done.returncode == 1
    assert "'_ZN9baton_ops4cuda12ScaledKernelEv'" in done.stderr
    assert "matmul_many.log" in done.stderr, "the source is not named"
    assert "wait for each other" in done.stderr


def test_a_source_of_which_the_compiler_says_nothing_is_not_taken_for_a_good_one(
    tmp_path: Path,
) -> None:
    done = built(tmp_path, says="")
    assert done.returncode == 1
    assert "has said nothing of it" in done.stderr


SPILT = CLEAN.replace("0 bytes spill stores", "8 bytes spill stores")


def test_spilt_registers_are_refused(tmp_path: Path) -> None:
    done = built(tmp_path, SPILT)
    assert done.returncode == 1
    assert "spills registers" in done.stderr


def test_what_is_not_compiled_again_is_refused_again(tmp_path: Path) -> None:
    assert built(tmp_path, SPILT).returncode == 1
    done = built(tmp_path, CLEAN)
    assert done.returncode == 1
    assert "spills registers" in done.stderr


def test_a_compiler_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    """Whatever it has said and left before."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "fails").touch()
    done = built(tmp_path)
    assert done.returncode == 1
    assert "compile for sm_90a" not in done.stdout


@pytest.mark.parametrize("other", [{"at": "other"}, {"version": "13.1"}], ids=["path", "version"])
def test_another_compiler_is_asked_of_all_sources(tmp_path: Path, other: dict[str, str]) -> None:
    assert built(tmp_path).returncode == 0
    done = built(tmp_path, SPILT, **other)
    assert done.returncode == 1
    assert "spills registers" in done.stderr


def test_a_compiler_that_is_not_there_has_compiled_nothing(tmp_path: Path) -> None:
    assert built(tmp_path).returncode == 0
    (tmp_path / "tools" / "nvcc").unlink()
    done = run(tmp_path / "tools")
    assert done.returncode != 0
    assert "compile for sm_90a" not in done.stdout


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "word",
    [
        *("HGMMA.64x128x16.F32", "QGMMA.64x8x32.F32", "UTMALDG.4D", "UTMALDG.5D", "USETMAXREG"),
        *("REDUX", "LDSM.16.M88", "STG.E.128"),
    ],
)
def test_code_without_an_instruction_is_refused(tmp_path: Path, word: str) -> None:
    """Also where others are there whose names begin alike."""
    assert word in CODE.split()
    done = built(tmp_path, code=re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", "", CODE))
    assert done.returncode == 1
    assert "in its machine code" in done.stderr


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("word", ["LDL R0", "STL [R1]", "LDG.E.CONSTANT R0"])
def test_code_with_what_it_must_not_have_is_refused(tmp_path: Path, word: str) -> None:
    done = built(tmp_path, code=f"{CODE}{word}\n")
    assert done.returncode == 1
    assert "uses local memory" in done.stderr or "as if they were constant" in done.stderr
