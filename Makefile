# `make demo` and `make test` do everything on a fresh machine; both make `.venv` in the checkout if there is none.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that share the tests of `make test`, a file at a time. Tests wait a third of their time, so two cores take three.
WORKERS ?= 3
LOCK_VENV := build/lock-venv
# Its wheels are those of the lock for accelerators.
GPU_PYTHON ?= python3.12
# Pure Python, and published as sources only; nothing else is built.
WITHOUT_WHEEL := antlr4-python3-runtime
# Beside a CPU build of torch it loads only with the help of tests/vision, so it has a folder of its own.
VISION := $(VENV)/vision
TORCHVISION := torchvision==0.28.0
# Libraries of agents that only a test runs.
AGENTS := $(VENV)/agents
PIP := -m pip --disable-pip-version-check
# End-to-end tests that also run with SGLang.
ON_SGLANG := crash critic drills elastic faults flags fully_async kept_tokens learning lost_agents lost_replica \
  model_engine one_step_off partial_rollout published_weights rehearsal replacement signals stalls tensor_parallel \
  trainer_features

# The stack is import-bound and runs many processes on few cores: one thread each.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test test-one test-all test-sglang test-gpu mutants lint docs lock lock-gpu clean

help:
	@echo 'make demo      set up, then train on the built-in task (writes to runs/demo)'
	@echo 'make test      set up, then run the tests'
	@echo 'make test-one T=tests/core/test_gate.py   some of them: files, folders or names as pytest has them'
	@echo 'make test-all  the same with the long drills'
	@echo 'make test-sglang  end-to-end tests that name no engine, with SGLang'
	@echo 'make test-gpu  the tests that need an accelerator, in the active environment'
	@echo 'make mutants   plants faults in core and settings, and says which of them no test notices (takes hours)'
	@echo 'make lint      ruff, the import contracts and type checking'
	@echo 'make docs      write docs/configuration.md from the config types'
	@echo 'make lock      make requirements/cpu.lock again from requirements/cpu.in'
	@echo 'make lock-gpu  make requirements/gpu.lock again from requirements/gpu.in'

setup: $(STAMP)

# Tried in this order: $PYTHON, then the interpreters verl 0.9.1 is tested with here.
$(BIN)/python:
	@for candidate in $(PYTHON) python3.11 python3.12 python3; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	    found="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo 'No Python 3.11 or 3.12 found. Install one, or name it: make setup PYTHON=/path/to/python3.11' >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$$found has no working venv module (on Debian and Ubuntu: the package python3.11-venv)." >&2; exit 1; }

# --no-deps: the lock is complete, and leaves out packages that break the stack (see docs/dependencies.md).
# An accelerator build of torch needs libraries that the lock does not have; its own requirements bring them.
$(STAMP): requirements/cpu.lock requirements/sglang-cpu.txt setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install --quiet --no-deps -r requirements/cpu.lock -r requirements/sglang-cpu.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/python $(PIP) install --quiet "$$(grep '^torch==' requirements/cpu.lock)"
	$(BIN)/python $(PIP) install --quiet --no-deps --upgrade --target $(VISION) $(TORCHVISION)
	$(BIN)/python $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/python -m recipe.fully_async.main preset=tiny_cpu_long_tail trainer.default_local_dir=runs/demo
	@$(BIN)/python -m recipe.report runs/demo

test: setup
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=30

# Slow ones too, where they are named.
test-one: setup
	@test -n '$(T)' || { echo 'Name them: make test-one T=tests/core/test_gate.py' >&2; exit 2; }
	$(BIN)/python -m pytest -m 'not gpu' --durations=5 $(T)

$(AGENTS): requirements/agents.txt $(STAMP)
	$(BIN)/python $(PIP) install --quiet --no-deps --upgrade --target $@ -r $<
	@touch $@

test-all: test-sglang $(AGENTS)
	$(BIN)/python -m pytest -m 'not gpu' --durations=60

# Those that name no engine run with vLLM otherwise; a mark `vllm` says why a test runs with vLLM only.
test-sglang: setup
	E2E_ENGINE=sglang $(BIN)/python -m pytest -m 'not gpu' $(addsuffix .py,$(addprefix tests/e2e/test_,$(ON_SGLANG)))

# Meant for ten minutes on one accelerator; with two, trainer and rollout run apart as well.
test-gpu:
	python -m pytest -m gpu

mutants: setup
	$(BIN)/python tools/mutants.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

docs: setup
	$(BIN)/python tools/config_docs.py docs/configuration.md

lock: $(BIN)/python
	rm -rf $(LOCK_VENV)
	$(BIN)/python -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python $(PIP) install --quiet -r requirements/cpu.in
	$(LOCK_VENV)/bin/python tools/make_lock.py > requirements/cpu.lock.new
	mv requirements/cpu.lock.new requirements/cpu.lock

# Downloads little: pip reads the metadata of wheels, and installs nothing.
lock-gpu:
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo 'The lock is for Linux on x86_64, and is made there.' >&2; exit 1; }
	rm -rf $(LOCK_VENV)
	$(GPU_PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python $(PIP) install --quiet --upgrade pip
	$(LOCK_VENV)/bin/python $(PIP) install --quiet --dry-run --ignore-installed \
	  --only-binary=:all: --no-binary=$(WITHOUT_WHEEL) --report $(LOCK_VENV)/report.json -r requirements/gpu.in
	$(LOCK_VENV)/bin/python tools/make_lock.py $(LOCK_VENV)/report.json > requirements/gpu.lock.new
	mv requirements/gpu.lock.new requirements/gpu.lock

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
