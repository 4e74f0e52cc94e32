"""The operator's BATON_TENSOR_PARALLEL and BATON_NODES join the configuration or are refused."""

from __future__ import annotations

import pytest

from baton_worker.config import ConfigError, EngineConfig, ModelConfig, ProcessConfig
from baton_worker.ranks import with_ranks


def config(**engine) -> ProcessConfig:
    return ProcessConfig(model=ModelConfig("/models/m"), engine=EngineConfig(**engine))


@pytest.mark.parametrize(
    "environment",
    [{}, {"BATON_TENSOR_PARALLEL": "1", "BATON_NODES": "1"}, {"BATON_TENSOR_PARALLEL": ""}],
)
def test_one_rank_changes_nothing(environment):
    assert with_ranks(config(), environment) == config()
    assert with_ranks(config(tensor_parallel_size=4), environment).engine.tensor_parallel_size == 4


def test_the_pods_ranks_are_taken():
    ours = with_ranks(config(max_running=7), {"BATON_TENSOR_PARALLEL": "2", "BATON_NODES": "1"})
    assert ours == config(max_running=7, tensor_parallel_size=2)
    assert with_ranks(ours, {"BATON_TENSOR_PARALLEL": "2"}) == ours
    on_gpus = with_ranks(config(device="gpu"), {"BATON_TENSOR_PARALLEL": "8"})
    assert on_gpus.engine.tensor_parallel_size == 8


@pytest.mark.parametrize(
    ("engine", "environment", "message"),
    [
        ({}, {"BATON_NODES": "2"}, "BATON_NODES is 2, but a worker's ranks run on one node"),
        ({}, {"BATON_TENSOR_PARALLEL": "two"}, "BATON_TENSOR_PARALLEL is 'two', not a number"),
        ({}, {"BATON_TENSOR_PARALLEL": "0"}, "not a number in 1..64"),
        ({}, {"BATON_TENSOR_PARALLEL": "65"}, "not a number in 1..64"),
        (
            {"tensor_parallel_size": 4},
            {"BATON_TENSOR_PARALLEL": "2"},
            "is 2, but engine.tensor_parallel_size is 4",
        ),
        ({"device": "sim"}, {"BATON_TENSOR_PARALLEL": "2"}, "but engine.device is 'sim'"),
        ({"device": "gpu"}, {"BATON_TENSOR_PARALLEL": "3"}, "'gpu' has 1, 2, 4 or 8 ranks"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine, environment, message):
    with pytest.raises(ConfigError, match=message):
        with_ranks(config(**engine), environment)
