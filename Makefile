.DEFAULT_GOAL := help
SHELL := /bin/bash
# Let Python keep its bytecode even where the environment says not to: rewriting the tests' asserts
# anew takes each test process five seconds.
export PYTHONDONTWRITEBYTECODE :=
PY := .venv/bin/python
OPS_SOURCES := $(shell find ops -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cu*' -o -name '*.py' -o -name '*.txt' -o -name '*.toml' -o -name '*.cmake' \) -not -path '*/build/*')
CPP_SOURCES := $(shell find ops -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -not -path '*/build/*')
KEEP ?=
# Tests that wait leave a processor idle, which one process more can use.
ONE_MORE := $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
# Where the tests of real processes are, so that no process reads all the others to leave them out.
E2E = tests/e2e $$(grep -rlE 'mark\.e2e' --include 'test_*.py' --exclude-dir e2e --exclude-dir faults tests)

.PHONY: help env demo test lint unit e2e faults soak overload mutants slow fuzz explore bench bench-engine docs ops-cuda ops-arguments ops-cuda-fat gpu-test gpu-test-2 gpu-test-4 gpu-bench gpu-bench-2 gpu-bench-4 release-check format clean

help: ## Print the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.ready: constraints.txt pyproject.toml worker/pyproject.toml operator/pyproject.toml tools/setup.sh $(OPS_SOURCES)
	@tools/setup.sh
	@touch $@

env: .venv/.ready ## Make .venv with all that demo and tests need

demo: env ## Run the tiny model in PD on this machine and stream one chat completion (KEEP=1 leaves it serving)
	@PYTHONPATH=tests/support $(PY) examples/demo.py $(if $(KEEP),--keep)

# Fuzzing takes its least numbers of inputs here too, and a third of the time: seeds are the same in
# each run, so that more would show the same again.
test: env ## Everything: linters, unit tests, CUDA compile and calls, real processes, faults, a real API server and node, fuzzing
	@$(PY) tools/beside.py lint unit
	@BATON_FUZZ_SECONDS=20 $(PY) tools/beside.py --beside ops-cuda ops-arguments slow fuzz -- integration node-or-say e2e faults

lint: env ## Formatting, ruff, mypy strict, import layers, sizes, C++ formatting
	@$(PY) tools/lint.py

unit: env ## Fast tests, in a process more than there are processors, which take modules in turn
	@$(PY) tools/unit.py --processes $(ONE_MORE) -m 'not slow and not e2e and not gpu' --ignore tests/e2e tests

e2e: env ## Real deployments, a few at once: PD equals mixed, kill -9 of each, 500 requests, the openai client
	@tools/chromium.sh
	@$(PY) -m pytest -q -n $(ONE_MORE) --dist loadfile -m 'e2e and not fuzz' $(E2E)

faults: env ## Deployments under load while processes die, freeze and change versions, links break and clients flood (minutes)
	@$(PY) -m pytest -q -n 2 --dist loadfile --durations 8 tests/faults

soak: env ## An hour of faults on real processes and links, and fuzzing, with a table (SECONDS=600 shortens it)
	@mkdir -p out && PYTHONPATH=tests/faults $(PY) -m baton_faults.soak --seconds $(or $(SECONDS),3600) --markdown out/soak.md

overload: env ## What a queue of 16 times the slots, floods, slow clients and gateways cost others (ten minutes; URGENT=1 as root)
	@mkdir -p out && PYTHONPATH=tests/faults $(PY) -m baton_faults.overload $(if $(URGENT),--urgent) --seconds $(or $(SECONDS),120) --markdown out/overload.md

mutants: env ## Change the pure cores one place at a time and list what the fast tests let live (an hour or more; ONLY="outbox scaling")
	@mkdir -p out && $(PY) tools/mutants.py $(if $(ONLY),--only $(ONLY)) --jobs $$(nproc) --markdown out/mutants.md

slow: env ## The slow tests alone, a process for each processor: kernels in every drawn order, thousands of rollouts (LONG=1: all combinations, searches at their whole length)
	@$(if $(LONG),BATON_LONG=1) $(PY) -m pytest -q -n auto --maxprocesses 8 --dist worksteal -m '(slow or gpu) and not e2e and not fuzz$(if $(LONG),, and not long)' --ignore tests/e2e tests

fuzz: env ## 60 seconds of fuzzing for each parser of bytes, a process for each processor (make test takes 20)
	@$(PY) -m pytest -q -n auto --maxprocesses 8 --dist worksteal -m fuzz tests/fuzz

explore: env ## The property tests on new random examples (make test takes the same ones each time)
	@BATON_EXPLORE=1 $(PY) -m pytest -q -m hypothesis tests

bench: env ## Benchmarks, each with its baseline in the same run
	@$(PY) tests/bench/run.py

bench-engine: env ## What logprobs, overlap, drafts and batches cost the engine, paired in alternating rounds (six minutes)
	@mkdir -p out/bench && $(PY) tests/bench/bench_engine.py --seconds 360 --json out/bench/engine.json --markdown out/bench/engine.md

docs: env ## Regenerate the metrics and configuration pages from the code, and tables from their records
	@$(PY) tools/pages.py
	@$(PY) tools/tables.py

ops-cuda: env ## Compile the CUDA sources for sm_90a (no GPU needed)
	@ops/tools/build_cuda.sh

ops-arguments: env ## Show the CUDA ops every call that a step makes, on a machine without a GPU (builds them for sm_90a: minutes)
	@ops/tools/build_cuda.sh --library
	@PYTHONPATH=ops/build/cuda/site:ops/src $(PY) -m pytest -q tests/engine/device/test_every_call_fits_the_cuda_ops.py \
	  tests/engine/device/test_ops_take_what_a_step_gives_them.py tests/gpu/test_what_is_measured_is_a_step.py \
	  tests/ops/test_rank_sums_refuse_bad_arguments.py tests/ops/test_fp8_ops_refuse_bad_arguments.py \
	  tests/ops/test_latent_ops_refuse_bad_arguments.py

ops-cuda-fat: env ## Build the wheel with CUDA code for sm_80 to sm_100 (minutes; no GPU needed)
	@ops/tools/build_cuda.sh --fat

# A machine with a GPU has a Python of its own with PyTorch: these take that, and no .venv.
GPU_PY ?= python3

gpu-test: ## On a machine with a Hopper GPU, PyTorch and nvcc: the kernels' tests, the exactness suite, the stamp
	@$(GPU_PY) tools/gpu.py test $(ARGS)

gpu-test-2: ## The same on a machine with two such GPUs, of which tests that need both are skipped on one
	@$(GPU_PY) tools/gpu.py test --gpus 2 $(ARGS)

gpu-test-4: ## The same on four such GPUs of one host
	@$(GPU_PY) tools/gpu.py test --gpus 4 $(ARGS)

gpu-bench: ## On such a machine: a decode step, prefill and logprobs against memory's roof, with baselines
	@$(GPU_PY) tools/gpu.py bench $(ARGS)

gpu-bench-2: ## On two such GPUs: a pair against mixed workers, the same bits, workers that die, the links (ten minutes)
	@$(GPU_PY) tools/gpu.py --gpus 2 run tests/gpu/battery_two.py --out out/bench $(ARGS)

gpu-bench-4: ## On four such GPUs: which ratio of prefill to decode for which requests (ten minutes)
	@$(GPU_PY) tools/gpu.py --gpus 4 run tests/gpu/bench_ratios.py --json out/bench/gpu-ratios.json $(ARGS)

release-check: ## What is in the way of a release: the version's places, and a GPU stamp of other code or with failures
	@python3 tools/version.py && python3 tools/gpu_stamp.py --release

format: env ## Apply the formatters
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix . && .venv/bin/clang-format -i $(CPP_SOURCES)

clean: ## Remove build outputs (keeps .venv)
	@rm -rf build ops/build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.PHONY: dashboards
dashboards: env ## Regenerate the Grafana dashboards of the chart
	@PYTHONPATH=charts/mixin $(PY) -m baton_mixin.generate

.PHONY: observability
observability: env ## Deployment and operator at work, Prometheus on them, every panel and rule queried, the playground in Chromium
	@tools/chromium.sh
	@$(PY) -m pytest -q tests/observability

CLUSTER := PYTHONPATH=tests/cluster $(PY) -m baton_cluster
.PHONY: chart integration kube-e2e cluster-up cluster-down bench-operator

chart: env ## Regenerate the chart's derived files, lint it, render it with each optional value
	@$(PY) tools/chart.py
	@$(CLUSTER) programs chart
	@$(PY) -m pytest -q tests/charts

integration: env ## The operator against a real API server: control plane from source, pods faked by kwok
	@$(CLUSTER) programs integration
	@BATON_CLUSTER=integration $(PY) -m pytest -q tests/integration

kube-e2e: env ## The operator and the model on a real node: kubelet, containerd, our images (needs root)
	@$(CLUSTER) programs node
	@BATON_CLUSTER=node $(CLUSTER) isolated $(PY) -m pytest -v -s --durations=6 tests/kube_e2e

.PHONY: node-or-say
node-or-say: env # kube-e2e where a node can run; elsewhere what is missing, by name
	@if $(CLUSTER) check-node; then $(MAKE) --no-print-directory kube-e2e; \
	else echo "[test] the real node was NOT TESTED"; fi

cluster-up: env ## Start a real single-node Kubernetes with our images to play with (needs root)
	@$(CLUSTER) up

cluster-down: ## Stop it and remove every trace
	@$(CLUSTER) down

bench-operator: env ## Measure the operator against a real API server, a plain Deployment as the floor
	@$(CLUSTER) programs integration
	@PYTHONPATH=tests/cluster $(PY) tests/bench/operator/run.py
