"""Start-up: what the configuration asks for is checked against model and Paddle before serving."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.backends.device.expert_kernels import ExpertLimits
from baton_worker.engine.backends.paddle.framework import DeviceError
from baton_worker.engine.build import build_engine
from baton_worker.engine.options import resolve_options

NO_MTP = SpeculativeConfig(method="none", num_speculative_tokens=0)


def _config(speculative: SpeculativeConfig | None = None, **engine: Any) -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig(path=str(TINY_MODEL)),
        speculative=speculative or SpeculativeConfig(),
        engine=EngineConfig(**engine),
    )


def test_an_engine_from_a_folder_serves(key: Any) -> None:
    from baton_worker.messages import Submit
    from baton_worker.sampling import SamplingParams

    engine = build_engine(_config(max_model_len=64))
    engine.submit(
        Submit(
            *key(1),
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=3, temperature=0.0),
        )
    )
    emitted = 0
    while engine.has_work():
        emitted += engine.step().stats.emitted_tokens
    assert emitted == 3
    assert engine.max_model_len == 64
    assert engine.num_speculative_tokens == 1
    assert len(engine.model_fingerprint) == 32


def test_defaults_follow_the_model(tiny: Any) -> None:
    options = resolve_options(_config(max_running=4, block_size=8), tiny.shape)
    assert options.max_model_len == tiny.shape.max_position_embeddings
    assert options.n_blocks == 4 * tiny.shape.max_position_embeddings // 8
    assert options.use_mtp
    assert not resolve_options(_config(NO_MTP), tiny.shape).use_mtp


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_model_len": 1}, "engine.max_model_len is 1"),
        ({"max_model_len": 5000}, "engine.max_model_len is 5000"),
        (
            {"max_model_len": 100, "kv_blocks": 6},
            "engine.kv_blocks is 6, one request of engine.max_model_len 100 needs 7 blocks of 16: "
            "give that at least, or 0 for enough, or lower engine.max_model_len to 96 at most",
        ),
        ({"kv_blocks": 6}, "engine.max_model_len 1024, the model's own, needs 64 blocks"),
    ],
)
def test_impossible_limits_name_field_and_value(
    tiny: Any, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_options(_config(**engine), tiny.shape)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_kv_that_no_host_holds_is_refused_by_its_fields(device: str) -> None:
    with pytest.raises(DeviceError, match=rf"engine.kv_blocks {1 << 60} takes .* GiB") as error:
        build_engine(_config(device=device, kv_blocks=1 << 60, max_running=3))
    assert str(error.value).endswith(
        f"lower one of the three; engine.kv_blocks is {1 << 60}, engine.max_running 3, "
        "engine.max_model_len 0, all that the model can"
    )


@pytest.mark.parametrize(("n_layers", "used"), [(1, 1), (3, 3), (8, 5)])
def test_as_many_draft_layers_are_used_as_drafts_may_be_made(
    make_model: Any, n_layers: int, used: int
) -> None:
    """Whatever K is now, and however many of K are looked up: prefill and decode may differ there,
    and their KV may not.
    """
    shape = dataclasses.replace(make_model().shape, n_mtp_layers=n_layers)
    for speculative in (SpeculativeConfig(), SpeculativeConfig("mtp_ngram", 3)):
        options = resolve_options(_config(speculative), shape)
        assert (options.n_mtp, options.n_open_tokens) == (used, used)
    options = resolve_options(_config(NO_MTP), shape)
    assert (options.n_mtp, options.n_open_tokens) == (0, 1)


def test_a_chunk_holds_what_all_draft_layers_take(make_model: Any) -> None:
    shape = dataclasses.replace(make_model().shape, n_mtp_layers=3)
    with pytest.raises(ConfigError, match=r"engine\.prefill_chunk_tokens is 2, and 3 draft layers"):
        resolve_options(_config(prefill_chunk_tokens=2), shape)


def test_the_log_tells_how_many_layers_draft(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_engine(_config(device="sim", max_model_len=64))
    (ready,) = [record for record in caplog.records if record.getMessage() == "engine ready"]
    assert ready.draft_layers == 1  # type: ignore[attr-defined]


def test_drafting_needs_a_model_that_drafts(make_model: Any) -> None:
    model = make_model(n_mtp_layers=0)
    with pytest.raises(ConfigError, match=r"speculative\.method is 'mtp'"):
        resolve_options(_config(), model.shape)
    assert not resolve_options(_config(NO_MTP), model.shape).use_mtp


def test_prompt_lookup_needs_no_mtp_layer(make_model: Any) -> None:
    model = make_model(n_mtp_layers=0)
    options = resolve_options(_config(SpeculativeConfig("ngram", 3)), model.shape)
    assert (options.use_mtp, options.n_draft) == (False, 3)
    with pytest.raises(ConfigError, match=r"speculative\.method is 'mtp_ngram'"):
        resolve_options(_config(SpeculativeConfig("mtp_ngram", 3)), model.shape)


@pytest.mark.parametrize(
    ("speculative", "n_model"),
    [
        (SpeculativeConfig("mtp", 4), 4),
        (SpeculativeConfig("ngram", 4), 0),
        (SpeculativeConfig("mtp_ngram", 4), 1),
        (SpeculativeConfig("mtp_ngram", 4, num_model_steps=2), 2),
        (SpeculativeConfig("mtp_ngram", 1, num_model_steps=2), 1),
    ],
)
def test_the_method_splits_k_between_layer_and_lookup(
    tiny: Any, speculative: SpeculativeConfig, n_model: int
) -> None:
    options = resolve_options(_config(speculative), tiny.shape)
    assert options.drafts.model_steps(options.n_draft) == n_model
    assert (options.drafts.ngram is None) == (speculative.method == "mtp")


def test_without_drafting_no_mtp_weights_are_needed(make_model: Any, make_bench: Any) -> None:
    bench = make_bench(make_model(n_mtp_layers=0))
    key = bench.submit(1, (5, 6, 7), temperature=0.0, max_tokens=4)
    bench.drain()
    assert len(bench.reader[key].tokens) == 4


def test_a_cpu_build_refuses_a_gpu_configuration() -> None:
    with pytest.raises(DeviceError, match=r"engine\.device is 'gpu' but paddle .* has no CUDA"):
        build_engine(_config(device="gpu", framework="paddle"))


def test_a_gpu_build_without_a_gpu_says_what_paddle_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_worker.engine.backends.paddle import framework

    monkeypatch.setattr(framework.paddle, "is_compiled_with_cuda", lambda: True)
    with pytest.raises(DeviceError, match=r"engine\.device is 'gpu', but paddle 3\.3"):
        build_engine(_config(device="gpu", framework="paddle"))


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_no_gpu_serves_is_refused_where_there_is_none(
    make_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Who has no CUDA is not told to install it for a model that it will not serve."""
    from baton_worker.engine.backends.kernels import OpsKernels

    monkeypatch.setattr(OpsKernels, "expert_limits", ExpertLimits(7, 32, 32))
    config = ProcessConfig(
        model=ModelConfig(path=str(make_checkpoint("glm4_moe").path)),
        engine=EngineConfig(device="gpu", framework="paddle", tensor_parallel_size=size),
    )
    with pytest.raises(DeviceError, match=r"glm4_moe\) has 8 experts in a layer, .* 'cpu'"):
        build_engine(config)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50
    )


@pytest.mark.slow
def test_the_contract_and_the_output_need_no_accelerator_stack() -> None:
    """R25: only what computes imports Paddle."""
    rooms = ["api", "engine", "kv", "metrics", "model", "options", "output", "sampling"]
    rooms += ["scheduling", "step"]
    done = _python(
        "import importlib, pkgutil, sys\n"
        "from baton_worker.engine import build\n"
        f"for name in {rooms}:\n"
        "    room = importlib.import_module(f'baton_worker.engine.{name}')\n"
        "    for found in pkgutil.iter_modules(getattr(room, '__path__', ())):\n"
        "        importlib.import_module(f'{room.__name__}.{found.name}')\n"
        "assert 'paddle' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_import_is_silent_and_leaves_logging_and_signals_alone() -> None:
    done = _python(
        "import logging\n"
        "from baton_worker.engine.backends.paddle.framework import require_device\n"
        "require_device('cpu')\n"
        "assert logging.getLogger().handlers == [], logging.getLogger().handlers\n"
        f"assert logging.getLogger().level == {logging.WARNING}\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == -15, "Paddle's handler would print a trace and exit 143"


@pytest.mark.slow
def test_a_signal_to_end_that_comes_while_paddle_loads_is_ours() -> None:
    """Its own handler, which is in place then, would print a trace and exit 143, or, in a
    container's first process, be the end of nothing but the signal.
    """
    done = _python(
        "import importlib.abc, os, signal, sys\n"
        "from baton_worker import held_signals\n"
        "from_the_start = held_signals.held()\n"  # as in `main`, before others have threads
        "from_the_start.__enter__()\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b'told\\n') - 5))\n"
        "held_signals.let_through()\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'paddle.nn':\n"
        "            assert 'paddle.base' in sys.modules, 'which installs the handler'\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import baton_worker.engine.backends.paddle.framework\n"
        "print('loaded')"
    )
    assert (done.stdout, done.returncode) == ("told\n", 0), done.stderr
