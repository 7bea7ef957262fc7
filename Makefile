# Every verb installs what it needs. Without arguments: make help.
PYTHON ?= $(or $(firstword $(foreach name,python3.11 python3.12,$(if $(shell $(name) -c "" 2>&1 || echo missing),,$(name)))),python3)
PYTHON := $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
# cpu or cuda; without: the build that the package index offers
TORCH ?=
STAMP := $(VENV)/.installed$(addprefix -torch-,$(TORCH))
DEV := $(VENV)/.installed-dev
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps
PEERS := .bench-packages
DOCS := .venv-docs
# embedded or vllm
ENGINE ?= embedded
# torch or deepspeed
LEARNER ?= torch
VLLM := $(VENV)/.installed-vllm
DEEPSPEED := $(VENV)/.installed-deepspeed
DEMO := $(VENV)/.installed-demo
VERIFIERS := .venv-verifiers/.installed
# Groups of tests side by side (GROUPS in tests/conftest.py); WORKERS= runs all tests one after the other.
WORKERS ?= -n 2 --dist loadscope --no-loadscope-reorder
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Two busy processes on two cores slow each other down 10 to 30 times with OpenMP's default spin-wait.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart demo test test-slow campaigns chaos simulate-protocol check docs docs-reference docs-capture bench gpu-day bench-peers format images

help: ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

ifeq ($(ENGINE),vllm)
install: $(VLLM)
quickstart demo: override ARGS += engine.kind=vllm
endif

ifeq ($(LEARNER),deepspeed)
install: $(DEEPSPEED)
endif

ifeq ($(ENVIRONMENTS),verifiers)
install: $(VERIFIERS)
endif

install: $(STAMP) ## create .venv with the locked packages (TORCH=cpu|cuda, ENGINE=vllm, LEARNER=deepspeed, ENVIRONMENTS=verifiers; docs/installing.md)

$(STAMP): requirements.lock requirements-cuda.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or 3.12, or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) infra/install.py $(VENV) --torch "$(TORCH)"
	@touch $@ $(VENV)/.installed

$(VLLM): $(STAMP) requirements-vllm.lock requirements-gpu.lock
	@$(PYTHON) infra/install.py $(VENV) --add vllm
	@touch $@

$(DEEPSPEED): $(STAMP) requirements-deepspeed.lock
	$(PIP) --no-build-isolation -r requirements-deepspeed.lock
	@touch $@

$(DEMO): $(STAMP) requirements-demo.lock
	$(PIP) -r requirements-demo.lock
	@touch $@

$(VERIFIERS): requirements-verifiers.lock
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-verifiers.lock
	@touch $@

$(DEV): $(STAMP) requirements-dev.lock
	$(PIP) -r requirements-dev.lock
	@touch $@

quickstart: install ## train the quickstart model and print where its report is
	$(BIN)/pipelinerl train quickstart $(ARGS)

demo: install $(DEMO) ## train SmolLM2, a chat model of 135 M parameters (docs/demo.md)
	$(BIN)/pipelinerl train smollm2 $(ARGS)

test: install $(DEV) ## unit, contract and integration tests
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow and not gpu" $(ARGS)

test-slow: install $(DEV) $(VLLM) $(DEEPSPEED) ## whole runs, with real vLLM, DeepSpeed, Prefect workers, S3, crashes
	$(BIN)/python -m pytest -v --durations=20 $(WORKERS) -m "slow and not gpu and not campaign" $(ARGS) || [ $$? -eq 5 ]

campaigns: install $(DEV) $(VLLM) $(DEEPSPEED) $(VERIFIERS) ## tests that are not part of .ci/run: minutes each, of what other tests check in parts
	$(BIN)/python -m pytest -q --durations=10 -m "campaign" $(ARGS)

chaos: install $(DEV) ## 200 faults at random moments, on local disk and S3 (ARGS="--faults 20 --store file")
	$(BIN)/python -m tests.chaos $(ARGS)

simulate-protocol: install $(DEV) ## simulated runs with faults, each repeated from its seed (SEEDS=1000, or SEED=7 for the trace of one run)
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),100)) $(ARGS)

check: install $(DEV) ## lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install $(DEV) ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)/.installed ## build the documentation as a site in site/; a broken link is an error
	$(DOCS)/bin/zensical build --strict --clean

$(DOCS)/.installed: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-docs.lock
	@touch $@

docs-reference: install ## write the generated pages: configuration, commands, schemas, views, metrics, tasks
	$(BIN)/python -m infra.reference

docs-capture: install $(DEV) ## take the pictures in docs/images (Debian's chromium; about 15 minutes)
	PIPELINERL_UPDATE_SCREENSHOTS=1 $(BIN)/python -m pytest -q -m slow tests/integration/test_browser.py

images: ## build the container images of all roles (needs Docker)
	for target in control actor trainer; do \
		docker build --file infra/docker/Dockerfile --target $$target --tag pipelinerl-$$target:$(VERSION) . || exit 1; \
	done

bench-peers: $(PEERS)/.installed ## install what the benchmarks `learning` and `learner` compare with, beside .venv

$(PEERS)/.installed: $(STAMP) requirements-bench.lock
	$(PIP) --upgrade --target $(PEERS) -r requirements-bench.lock
	@touch $@

gpu-day: ## run a stage of the GPU day: STAGE=1 to 7, or STAGE=pack on another machine (docs/gpu-day.md)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) infra/gpu_day.py $(or $(STAGE),--help) $(ARGS)

bench: install $(DEV) ## run a benchmark (NAME=engine ARGS=--json; NAME=--help lists them)
	$(BIN)/python -m benchmarks $(or $(NAME),engine) $(ARGS)
