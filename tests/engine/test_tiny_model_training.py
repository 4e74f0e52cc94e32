"""The training script runs anywhere and writes a folder that a worker loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

SUPPORT = Path(__file__).parents[1] / "support"
# Each run imports Paddle in a process of its own, whose time ends first and says what it printed.
pytestmark = pytest.mark.slow


def run(script: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=1600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_steps_on_python_text_make_a_loadable_folder(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    script = tiny_model_dir / "train.py"
    output = run(script, "--corpus", "python", "--steps", "2", "--out", str(tmp_path / "model"))
    assert "step 2/2" in output
    assert "first-draft acceptance" in output
    shape = load_shape(tmp_path / "model")
    assert load_weights(tmp_path / "model", shape).embed.shape == (512, 64)
    assert shape == load_shape(tiny_model_dir)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shape.vocab_size


def test_help_names_every_option_with_its_default(tiny_model_dir: Path) -> None:
    output = run(tiny_model_dir / "train.py", "--help")
    for option in ("--out", "--corpus", "--steps", "--window", "--chat-share", "--seed"):
        assert option in output
    assert "default: 1200" in output
