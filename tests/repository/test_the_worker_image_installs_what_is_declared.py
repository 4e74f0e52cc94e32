"""The lists that worker/Dockerfile installs from are those of the packages, for each device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "worker" / "Dockerfile").read_text()


def listed(tmp_path: Path, device: str, framework: str) -> tuple[list[str], list[str]]:
    """Return what the image's build and what the worker itself would be installed from."""
    (program,) = re.findall(r'RUN python3 -c "(.*?)" \\\n &&', DOCKERFILE, re.DOTALL)
    program = program.replace("\\\n", "").replace("'/src/build", f"'{tmp_path}/build")
    program = program.replace("'/src/run", f"'{tmp_path}/run").replace("/src/", f"{ROOT}/")
    program = program.replace("${DEVICE}", device).replace("${FRAMEWORK}", framework)
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    build, run = (tmp_path / name for name in ("build.txt", "run.txt"))
    return build.read_text().splitlines(), run.read_text().splitlines()


@pytest.mark.parametrize(
    ("device", "framework", "wanted"),
    [
        ("cpu", "torch", "paddlepaddle=="),
        ("gpu", "torch", "torch>="),
        ("gpu", "paddle", "paddlepaddle-gpu=="),
    ],
)
def test_a_device_brings_its_framework_and_no_other(
    tmp_path: Path, device: str, framework: str, wanted: str
) -> None:
    build, run = listed(tmp_path, device, framework)
    frameworks = [need for need in run if need.startswith(("torch", "paddle"))]
    assert len(frameworks) == 1
    assert frameworks[0].startswith(wanted)
    assert "baton-ops" not in run, "it is built from the sources"
    assert {"msgspec>=0.20", "numpy>=2.0"} <= set(run)
    assert any(need.startswith("scikit-build-core") for need in build)


def test_a_framework_that_is_not_known_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        listed(tmp_path, "gpu", "jax")


def test_the_compilers_wheels_that_the_image_takes_are_pinned() -> None:
    assert "-r /src/ops/constraints-cuda.txt" in DOCKERFILE
    pins = (ROOT / "ops" / "constraints-cuda.txt").read_text().splitlines()
    assert any(pin.startswith("nvidia-cuda-nvcc==") for pin in pins)
