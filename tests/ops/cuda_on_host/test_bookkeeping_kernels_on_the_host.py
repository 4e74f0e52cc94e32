"""What a step needs besides arithmetic, and processing: the GPU's tests, run on the host."""

from __future__ import annotations

from baton_testing.host_cuda import load_gpu_tests

for _name in (
    "test_sampling_bookkeeping_of_a_step",
    "test_sampling_process_has_the_cpus_bits",
    "test_look_up_finds_what_the_index_does",
):
    _tests = vars(load_gpu_tests(_name))
    globals().update({name: test for name, test in _tests.items() if name.startswith("test_")})
