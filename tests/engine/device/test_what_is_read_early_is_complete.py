"""What an op reads before it waits for the launches before it is not theirs to write.

An op's launch begins while those before it may still run: see `baton_ops/grid_order.cuh`. Most wait
before they read anything and before they let the next one begin. Held here, in the order of an
engine's steps, is what the others read meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.fp8_folder import quantise_folder
from baton_testing.numpy_device import NumpyDevice, on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from baton_worker.engine.backends.device.start import start_engine
from baton_worker.engine.backends.kernels import OpsKernels
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

LETS_GO_AT_ONCE = {
    "matmul", "attend", "add_norm", "rank_sum", "rank_gather", "combine",
    "rank_sum_norm", "norm_route", "combine_norm", "rope_store",
}  # fmt: skip
"""Whose next launch may begin before they have waited themselves."""

OF_EXPERTS = {
    "few": {"expert_matmul", "expert_gate_up_silu"},
    "many": {"expert_gate_up_silu", "gate_up_silu"},
}
"""Which gated and which expert's products do so, by how many rows both have. Of few an expert's
gated one does where its groups are known, else it has waited.
"""

BEGINS_LATE = {"plan_scores", "normalise_top_p"}
"""Launched when all before them is complete."""

READ_EARLY: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, weight, out: weight,
    "gate_up_silu": lambda x, weight, out: weight,
    "scaled_matmul": lambda x, weight, out: weight,
    "scaled_gate_up_silu": lambda x, weight, out: weight,
    "scaled_expert_gate_up_silu": lambda x, row, starts, weight, out: (starts, weight),
    "quantise_expert_matmul": lambda x, room, starts, weight, out, beside: (
        starts,
        weight,
        beside.weight if beside else (),
    ),
    "quantise_matmul": lambda x, room, weight, out: weight,
    "quantise_gate_up_silu": lambda x, room, weight, out: weight,
    "add_norm": lambda x, residual, weight, eps, out: weight,
    "rope_store": lambda qkv, rotation, places, kv, layer, query: (rotation, places),
    "combine": lambda made, routes, beside, out: (routes.place, routes.weight),
    "norm_route": lambda x, residual, norm, normed, router, *rest: (norm.weight, router.weight),
    "rank_sum_norm": lambda part, exchange, room, residual, norm, out: norm.weight,
    "combine_norm": lambda sum_, residual, norm, out: (
        sum_.routes.place,
        sum_.routes.weight,
        norm.weight,
    ),
    "attend": lambda query, kv, layer, tables, contexts, scale, out, scratch: (tables, contexts),
}

READ_EARLY_OF_FEW: dict[str, Callable[..., Any]] = {
    "expert_matmul": lambda x, starts, weight, out: (starts, weight),
    "expert_gate_up_silu": lambda x, starts, weight, out, known: (starts, weight) if known else (),
    "quantise_expert_gate_up_silu": lambda x, room, row, starts, weight, out, beside: (
        beside.weight if beside else ()
    ),
}
"""Of many rows nothing is."""

WRITES: dict[str, Callable[..., Any]] = {
    "embed": lambda table, tokens, out: out,
    "matmul": lambda x, weight, out: out,
    "gate_up_silu": lambda x, weight, out: out,
    "quantise": lambda x, out: out,
    "quantise_matmul": lambda x, room, weight, out: (room, out),
    "quantise_gate_up_silu": lambda x, room, weight, out: (room, out),
    "scaled_expert_gate_up_silu": lambda x, row, starts, weight, out: out,
    "quantise_expert_gate_up_silu": lambda x, room, row, starts, weight, out, beside: (
        room,
        out,
        (beside.room, beside.out) if beside else (),
    ),
    "quantise_expert_matmul": lambda x, room, starts, weight, out, beside: (
        room,
        out,
        (beside.room, beside.out) if beside else (),
    ),
    "add_norm": lambda x, residual, weight, eps, out: (residual, out),
    "rope_store": lambda qkv, rotation, places, kv, layer, query: (kv, query),
    "attend": lambda query, kv, layer, tables, contexts, scale, out, scratch: (out, scratch),
    "expert_gate_up_silu": lambda x, starts, weight, out, known: out,
    "expert_matmul": lambda x, starts, weight, out: out,
    "combine": lambda made, routes, beside, out: out,
    "norm_route": lambda x, residual, norm, normed, router, out: (
        residual,
        normed,
        out,
    ),
    "combine_norm": lambda sum_, residual, norm, out: (residual, out),
    "latent.norm": lambda x, weight, eps, out: out,
    "latent.fold": lambda queries, kv_up, mla, out: out,
    "latent.rotate": lambda queries, rotation, places, mla, query: query,
    "latent.store": lambda row, norm, rotation, places, kv, layer: kv,
    "latent.attend": lambda query, kv, layer, tables, contexts, scale, out, scratch: (out, scratch),
    "latent.unfold": lambda attended, kv_up, mla, out: out,
    "rank_sum": lambda part, exchange, out: (part, out),
    "rank_sum_norm": lambda part, exchange, room, residual, norm, out: (part, room, residual, out),
    "rank_gather": lambda part, exchange, out: (part, out),
}
"""Of the others all that they are given is taken for written."""

Launch = tuple[str, tuple[Any, ...]]


class NotedLatent:
    """Those of compressed rows, which are noted beside the others."""

    def __init__(self, kernels: Any, launches: list[Launch]) -> None:
        self._kernels = kernels
        self._launches = launches

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*arguments: Any) -> None:
            self._launches.append((f"latent.{name}", on_device(arguments)))
            kernel(*arguments)

        return call


class Noted(NumpyKernels):
    """NumPy's kernels, and what they were called with, in order."""

    def __init__(self, device: NumpyDevice) -> None:
        super().__init__(device)
        self.launches: list[Launch] = []
        self.latent = NotedLatent(self.latent, self.launches)

    def __getattribute__(self, name: str) -> Any:
        kernel = object.__getattribute__(self, name)
        is_op = not name.startswith("_") and not name.endswith("_bytes") and callable(kernel)
        if not is_op or not hasattr(OpsKernels, name):
            return kernel

        def call(*arguments: Any) -> None:
            self.launches.append((name, on_device(arguments)))
            kernel(*arguments)

        return call


class EarlyKeys(NumpyKernels):
    """NumPy's kernels, which hold the pool's keys that attention reads early to what was there
    before the launch before it.
    """

    def __init__(self, device: NumpyDevice) -> None:
        super().__init__(device)
        self.n_compared, self.wrong = 0, set[tuple[int, int]]()
        self._before: Any = None

    def rope_store(
        self, qkv: Any, rotation: Any, places: Any, kv: Any, layer: int, query: Any
    ) -> None:
        self._launch(self._keep, kv)
        super().rope_store(qkv, rotation, places, kv, layer, query)

    def attend(
        self, query: Any, kv: Any, layer: int, tables: Any, contexts: Any, *rest: Any
    ) -> None:
        self._launch(self._compare, query, kv, layer, tables, contexts)
        super().attend(query, kv, layer, tables, contexts, *rest)

    def _keep(self, kv: Any) -> None:
        self._before = kv.copy()

    def _compare(self, query: Any, kv: Any, layer: int, tables: Any, contexts: Any) -> None:
        own, block_size = len(query) // len(tables), kv.shape[4]
        for table, context in zip(tables, contexts.tolist(), strict=True):
            for position in range(context - own):
                block, offset = table[position // block_size], position % block_size
                now, early = (pool[block, layer, :, :, offset] for pool in (kv, self._before))
                self.n_compared += 1
                if not np.array_equal(now, early):
                    self.wrong.add((layer, position))


def still_running(
    launches: list[Launch], rows: str = "few"
) -> Iterator[tuple[Launch, list[Launch]]]:
    """Yield each launch, and those before it that may run when it begins."""
    done = 0  # so many of the first are complete when the next one begins
    for index, launch in enumerate(launches):
        name = launch[0]
        if name in BEGINS_LATE:
            done = index
        yield launch, launches[done:index]
        waits = rows == "few" and name == "expert_gate_up_silu" and not launch[1][-1]
        if waits or name not in LETS_GO_AT_ONCE | OF_EXPERTS[rows]:
            done = index


def arrays_of(argument: Any) -> Iterator[Any]:
    if isinstance(argument, np.ndarray):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from arrays_of(part)


def conflicts(launches: list[Launch], rows: str = "few") -> list[str]:
    """Return who reads early what a launch that may still run writes, if experts' rows are few or
    many.
    """
    reads = READ_EARLY | (READ_EARLY_OF_FEW if rows == "few" else {})
    found = []
    for (name, arguments), running in still_running(launches, rows):
        if name not in reads:
            continue
        for early in arrays_of(reads[name](*arguments)):
            for other, given in running:
                written = WRITES[other](*given) if other in WRITES else given
                if any(np.may_share_memory(early, array) for array in arrays_of(written)):
                    found.append(f"{name} behind {other}")
    return found


def launches_of_an_engine(
    model: Path = TINY_MODEL, method: SpeculativeMethod = "mtp"
) -> list[Launch]:
    """Return what an engine launches."""
    device = NumpyDevice(64 << 20)
    kernels = Noted(device)
    serve(device, kernels, model, method)
    return kernels.launches


def serve(
    device: NumpyDevice,
    kernels: NumpyKernels,
    model: Path = TINY_MODEL,
    method: SpeculativeMethod = "mtp",
) -> None:
    """Serve prompts in chunks, drafts, drawn tokens and logprobs."""
    config = ProcessConfig(
        model=ModelConfig(path=str(model)),
        speculative=SpeculativeConfig(method=method, num_speculative_tokens=3),
        engine=EngineConfig(
            device="gpu", dtype="float32", max_model_len=64, max_running=2, prefill_chunk_tokens=16
        ),
    )
    engine = start_engine(config, device, kernels, time.monotonic)
    for number, temperature in enumerate((0.0, 0.7), 1):
        sampling = SamplingParams(
            max_tokens=12, ignore_eos=True, temperature=temperature, top_p=0.9, seed=number
        )
        engine.submit(
            Submit(number, 0, prompt_token_ids=tuple(range(5, 26)), sampling=sampling, logprobs_k=1)
        )
    while engine.has_work():
        engine.step()


@pytest.mark.slow
def test_no_launch_reads_what_one_that_may_still_run_was_given() -> None:
    launches = launches_of_an_engine(method="mtp_ngram")
    called = {name for name, _ in launches}
    assert {"matmul", "gate_up_silu", "rope_store", "seed_drafts", "advance", "look_up"} <= called
    assert conflicts(launches) == []


@pytest.mark.slow
def test_nor_does_one_of_a_quantised_model(make_checkpoint: Callable[..., Any]) -> None:
    folder = make_checkpoint("glm4_moe").path
    quantise_folder(folder, with_drafts=True)
    launches = launches_of_an_engine(folder)
    called = {name for name, _ in launches}
    assert {"quantise", "scaled_matmul", "scaled_gate_up_silu", "rope_store"} <= called
    assert "quantise_expert_matmul" in called
    of_one = {"quantise_matmul", "quantise_gate_up_silu", "quantise_expert_gate_up_silu"}
    assert of_one <= called
    assert conflicts(launches) == []


LATENT = {"norm", "fold", "rotate", "store", "attend", "unfold"}
"""All of `LatentKernels`: each waits before it reads, and before it lets the next begin."""


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True])
def test_nor_does_one_of_a_model_with_compressed_rows(
    make_checkpoint: Callable[..., Any], is_fp8: bool
) -> None:
    folder = make_checkpoint("deepseek_v3").path
    if is_fp8:
        quantise_folder(folder, with_drafts=True)
    launches = launches_of_an_engine(folder)
    called = {name for name, _ in launches}
    assert {f"latent.{name}" for name in LATENT} <= called
    assert ("scaled_matmul" in called) is is_fp8
    assert {"norm_route", "combine_norm"} <= called
    for rows in OF_EXPERTS:
        assert conflicts(launches, rows) == []


@pytest.mark.slow
def test_a_store_of_compressed_rows_that_wrote_a_norms_weight_would_be_found(
    make_checkpoint: Callable[..., Any],
) -> None:
    launches = launches_of_an_engine(make_checkpoint("deepseek_v3").path)
    at = next(i for i, launch in enumerate(launches) if launch[0] == "add_norm" and i > 8)
    weight = launches[at][1][2]
    stored = next(given for name, given in launches if name == "latent.store")
    writes_weight = ("latent.store", (*stored[:4], weight, *stored[5:]))
    assert "add_norm behind latent.store" in conflicts(
        [*launches[:at], writes_weight, *launches[at:]]
    )


@pytest.fixture
def of_a_mixture(make_checkpoint: Callable[..., Any]) -> list[Launch]:
    return launches_of_an_engine(make_checkpoint("glm4_moe").path)


@pytest.mark.slow
@pytest.mark.parametrize("rows", OF_EXPERTS)
def test_no_launch_of_a_mixture_reads_what_one_that_may_still_run_was_given(
    of_a_mixture: list[Launch], rows: str
) -> None:
    assert "expert_matmul" in {name for name, _ in of_a_mixture}
    assert conflicts(of_a_mixture, rows) == []


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.slow
def test_nor_does_one_of_a_mixture_where_nothing_is_shared(
    make_checkpoint: Callable[..., Any], is_fp8: bool
) -> None:
    """Nothing stands between the choice and the first product, which is told so, or beside it."""
    folder = make_checkpoint("qwen3_moe").path
    if is_fp8:
        quantise_folder(folder)
    launches = launches_of_an_engine(folder, "ngram")
    assert conflicts(launches) == []
    first = "quantise_expert_gate_up_silu" if is_fp8 else "expert_gate_up_silu"
    assert {given[-1] for name, given in launches if name == first} == {None if is_fp8 else False}


@pytest.mark.slow
def test_an_experts_second_product_right_behind_the_choice_would_be_found(
    of_a_mixture: list[Launch],
) -> None:
    names = [name for name, _ in of_a_mixture]
    at = names.index("expert_gate_up_silu")
    assert names[at + 1] == "expert_matmul"
    routed = of_a_mixture[names.index("norm_route")]
    without = [*of_a_mixture[:at], routed, *of_a_mixture[at + 1 :]]
    assert {*conflicts(without)} == {
        "expert_matmul behind norm_route",
        "combine_norm behind norm_route",
    }


@pytest.mark.slow
def test_an_experts_second_product_of_fp8_right_behind_the_choice_would_be_found(
    make_checkpoint: Callable[..., Any],
) -> None:
    folder = make_checkpoint("glm4_moe").path
    quantise_folder(folder, with_drafts=True)
    launches = launches_of_an_engine(folder)
    names = [name for name, _ in launches]
    at = names.index("quantise_expert_matmul")
    assert names[at - 1] == "quantise_expert_gate_up_silu"
    routed = launches[names.index("norm_route")]
    moved = [*launches[:at], routed, *launches[at:]]
    for of in ("few", "many"):
        assert {*conflicts(moved, of)} == {"quantise_expert_matmul behind norm_route"}


@pytest.mark.slow
def test_an_experts_first_product_of_fp8_right_behind_the_choice_would_be_found(
    make_checkpoint: Callable[..., Any],
) -> None:
    """Of some tokens, whose rows are quantised between the two, and which share nothing."""
    folder = make_checkpoint("qwen3_moe").path
    quantise_folder(folder)
    launches = launches_of_an_engine(folder, "ngram")
    names = [name for name, _ in launches]
    at = names.index("scaled_expert_gate_up_silu")
    assert names[at - 2 : at] == ["norm_route", "quantise"]
    assert conflicts(launches[: at + 1]) == []
    without = [*launches[: at - 1], launches[at]]
    assert {*conflicts(without)} == {"scaled_expert_gate_up_silu behind norm_route"}


@pytest.mark.slow
def test_an_experts_first_product_that_is_told_too_early_would_be_found(
    of_a_mixture: list[Launch],
) -> None:
    """What all share lies between it and the choice here, but for the call that is moved."""
    names = [name for name, _ in of_a_mixture]
    at = names.index("expert_gate_up_silu")
    assert of_a_mixture[at][1][-1] is True
    shared = next(i for i in range(at, 0, -1) if names[i] == "gate_up_silu")
    without = [*of_a_mixture[:shared], *of_a_mixture[shared + 1 :]]
    assert "expert_gate_up_silu behind norm_route" in conflicts(without)


def lies_behind(own: Any, behind: Any) -> bool:
    """Whether a tensor begins where another one ends, as those have it that multiply both."""
    first, second = on_device(own), on_device(behind)
    return bool(second.ctypes.data == first.ctypes.data + first.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("is_one", [True, False], ids=["one", "some"])
def test_what_all_share_of_few_tokens_is_computed_beside_their_experts(
    make_checkpoint: Callable[..., Any], is_one: bool
) -> None:
    folder = make_checkpoint("glm4_moe").path
    quantise_folder(folder, with_drafts=True)
    launches = launches_of_an_engine(folder)
    names = [name for name, _ in launches]
    at = next(
        i
        for i, (name, given) in enumerate(launches)
        if name == "quantise_expert_gate_up_silu" and (given[0].shape[0] == 1) is is_one
    )
    wanted = ["norm_route", "quantise_expert_gate_up_silu", "quantise_expert_matmul"]
    assert names[at - 1 : at + 2] == [*wanted]
    first, second = (launches[at + i][1][-1] for i in range(2))
    assert first.out is second.x
    x, room, _, _, out, _ = launches[at + 1][1]
    for own, behind in ((x, second.x), (out, second.out), *zip(room, second.room, strict=True)):
        assert lies_behind(own, behind), "it would be launched alone"
    assert conflicts(launches[: at + 2]) == []


@pytest.mark.slow
def test_a_sum_right_behind_an_experts_first_product_of_many_rows_would_be_found(
    of_a_mixture: list[Launch],
) -> None:
    names = [name for name, _ in of_a_mixture]
    at = names.index("expert_matmul")
    routed = of_a_mixture[names.index("norm_route")]
    without = [*of_a_mixture[: at - 1], routed, of_a_mixture[at - 1], *of_a_mixture[at + 1 :]]
    assert {*conflicts(without, "many")} == {"combine_norm behind norm_route"}


@pytest.mark.slow
def test_keys_that_attention_reads_early_are_those_of_earlier_launches() -> None:
    device = NumpyDevice(64 << 20)
    kernels = EarlyKeys(device)
    serve(device, kernels)
    assert kernels.n_compared > 1000
    assert kernels.wrong == set()


def test_places_written_right_before_the_projection_would_be_found() -> None:
    launches = launches_of_an_engine()
    at = next(i for i, launch in enumerate(launches) if launch[0] == "rope_store")
    writes_places = ("seed_drafts", (launches[at][1][2].position,))
    for distance, is_safe in ((0, False), (1, False), (2, False), (3, True)):
        moved = [*launches[: at - distance], writes_places, *launches[at - distance :]]
        assert [name for name, _ in launches[at - 3 : at]] == ["embed", "add_norm", "matmul"]
        assert (conflicts(moved) == []) is is_safe, distance
