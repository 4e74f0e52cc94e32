"""What is read off the times of tokens that another server tells."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bench_transformers as bench
from bench_phase import TIMED


def served(rows: int, steps: int, step_s: float, apart: int = 0) -> list[list[float]]:
    """Return the times of a server's tokens; each request begins so many steps after the last."""
    late = 1e-6  # the tokens of a step are told one after the other
    return [
        [(row * apart + step) * step_s + row * late for step in range(steps)] for row in range(rows)
    ]


def test_a_full_batch_of_equal_steps_is_rows_tokens_a_step() -> None:
    found = bench.steps_of(served(4, 160, 0.02))
    assert found.steps == TIMED
    assert found.tokens_per_s == pytest.approx(200)
    assert found.step_ms == pytest.approx(20)


def test_steps_count_from_where_the_last_request_has_been_in_for_a_while() -> None:
    times = served(3, 40, 0.01, apart=10)
    alone = [[at / 10 for at in one] for one in times]  # ten times as fast, until
    slow = [[alone[row][k] if times[row][k] < 0.295 else times[row][k] for k in range(40)]
            for row in range(3)]  # fmt: skip
    found = bench.steps_of(slow)
    assert found.step_ms == pytest.approx(10)
    assert found.tokens_per_s == pytest.approx(300)


def test_steps_end_where_the_first_request_does() -> None:
    times = served(2, 100, 0.01)
    times[0] = times[0][:31]
    found = bench.steps_of(times)
    assert found.steps in (19, 20)
    assert found.tokens_per_s == pytest.approx(200, rel=0.03)


def test_a_step_that_took_long_counts_in_the_rate_and_not_in_the_median() -> None:
    times = [[at + (1.0 if at > 0.3 else 0.0) for at in one] for one in served(2, 160, 0.01)]
    found = bench.steps_of(times)
    assert found.step_ms == pytest.approx(10)
    assert found.tokens_per_s == pytest.approx(2 * TIMED / (TIMED * 0.01 + 1))


@pytest.mark.parametrize("times", [[[1.0], []], [[1.0, 2.0], [1.0, 2.0]]])
def test_too_little_in_time_says_what_to_give(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="give the phase more seconds"):
        bench.steps_of(times)


def test_without_transformers_nothing_is_measured_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = bench.measured_apart(bench.LIMITS)
    assert found == {"version": None, "phases": []}
    assert "transformers is not installed" in capsys.readouterr().out


def test_a_shape_is_told_in_transformers_fields() -> None:
    dense = bench.fields_of(bench.CONFIGS["mimo-7b"])
    assert "head_dim" not in dense, "Qwen2's is what its heads leave of the hidden size"
    assert dense["hidden_size"] // dense["num_attention_heads"] == 128
    mixed = bench.fields_of(bench.CONFIGS["qwen3-30b-a3b"])
    assert (mixed["num_experts"], mixed["num_experts_per_tok"]) == (128, 8)
    assert (mixed["moe_intermediate_size"], mixed["head_dim"]) == (768, 128)
