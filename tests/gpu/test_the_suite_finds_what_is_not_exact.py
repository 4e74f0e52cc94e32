"""The controls: kernels whose sums depend on the batch are found, and where they first differ."""

from __future__ import annotations

import pytest

from baton_testing.exactness import devices, properties, trace
from baton_testing.exactness.asks import Ask, serve
from baton_testing.exactness.controls import WRONG, LeakingAttention

FEW = ("any batch", "any chunks", "any drafts")


@pytest.mark.slow
@pytest.mark.parametrize("name", devices.parameters(devices.CONTROLLED))
def test_kernels_that_are_not_exact_break_properties_by_name(name: str) -> None:
    """On a GPU: cuBLAS in place of the canonical matmul, which chooses its split by the batch."""
    with devices.subject(name, wrong=WRONG[devices.KNOWN[name].device]) as subject:
        found = properties.broken(subject, FEW)
    print(f"{name}: broken are {sorted(found)}")
    for lines in found.values():
        print(f"  {lines[0]}")
    assert found


@pytest.mark.slow
def test_reading_what_is_not_a_requests_own_is_found_by_memory_of_nan_alone() -> None:
    with devices.subject("numpy-tiny", wrong=LeakingAttention) as subject:
        found = properties.broken(subject, ("any batch", "overlapped", "poisoned"))
    assert set(found) == {"poisoned"}


@pytest.mark.parametrize("name", devices.parameters(devices.CONTROLLED))
def test_the_first_tensor_that_differs_is_named_by_layer(name: str) -> None:
    """One request alone, and among others: the first difference is a product of some layer."""
    wrong = WRONG[devices.KNOWN[name].device]
    notes = []
    with devices.subject(name, wrong=wrong, traced=True) as subject:
        asks = [Ask(ask.prompt, 4, {"temperature": 0.0}) for ask in subject.asks(8)]
        for some in (asks[:1], asks):
            with subject.engine(max_running=8, prefill_tokens=64) as engine:
                taken = subject.tracing.begin()
                said = serve(engine, some)
                subject.tracing.end()
            notes.append((taken, said[0]))
    (one, said), (other, _) = notes
    text = [*asks[0].prompt, *said.tokens]
    told = trace.first_differing(one, other, text)
    print(f"{name}: {told}")
    assert "layer" in told or "head" in told
