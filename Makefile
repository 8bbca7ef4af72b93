# One-word commands. Needs Python 3.11 or newer with its venv module, git and make; `make help` lists the targets.
# Variables: PYTHON       interpreter for .venv (default: the first of the candidates below that is 3.11 or newer)
#            TORCH_INDEX  package index that torch alone comes from (default: none, your own pip settings)
#            WORKERS      test processes (default: 2; 0: all in one process, needed for a debugger)
#            REAL         REAL=1: demo-serving on real model workers instead of fakes
#            ARGS         more arguments for pytest, for example ARGS="tests/test_layers.py -x"

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?=
TORCH_INDEX ?=
WORKERS ?= 2
MINUTES ?= 10
FIRST ?= 1000000
ARGS ?=
VLLM_ENV := .envs/vllm
VLLM_STAMP := $(VLLM_ENV)/.installed
VLLM_LIST := tests/real/vllm-requirements.txt
DYNAMO_ENV := .envs/dynamo
DYNAMO_STAMP := $(DYNAMO_ENV)/.installed
DYNAMO_LIST := tests/real/dynamo-requirements.txt
HYBRID_ENV := .envs/hybrid
HYBRID_STAMP := $(HYBRID_ENV)/.installed
HYBRID_LIST := tests/real/hybrid-requirements.txt
REAL ?=
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
# One thread per process and a fixed hash seed, so that a test run is the same everywhere.
TEST_ENV := PYTHONHASHSEED=0 OMP_NUM_THREADS=1
# A file stays in one process, so that what its tests share is made once.
PYTEST := $(TEST_ENV) $(PY) -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo demo-serving bench test test-slow test-serving-slow test-vllm test-dynamo test-hybrid sim-to-real fuzz lint format constraints clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Make .venv with the pinned packages and this project (does nothing when up to date)

$(STAMP): pyproject.toml constraints.txt
	@if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		found=; \
		for candidate in $(CANDIDATES); do \
			if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
				>/dev/null 2>&1; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "make install: no Python 3.11 or newer with venv (tried: $(CANDIDATES)); install one" \
				"(Debian, Ubuntu: also python3-venv) or name it: make install PYTHON=/path/to/python" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV); \
	fi
	$(if $(TORCH_INDEX),$(PY) -m pip install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## Run the demonstration; its results go to runs/demo
	$(VENV)/bin/prfaas demo --out runs/demo

demo-serving: install $(if $(REAL),$(HYBRID_STAMP)) ## Run the router on a fake cluster: thresholds, margins, policies (REAL=1: on real workers)
	$(PY) -m prfaas_serving.demo$(if $(REAL),_real --environment $(HYBRID_ENV))

bench: install ## Measure speed and memory against the targets (results: runs/bench.json)
	mkdir -p runs
	$(VENV)/bin/prfaas bench --out runs/bench.json

test: install ## Run the default test suite
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: install ## Run the tests that take minutes
	$(PYTEST) -m slow $(ARGS)

test-serving-slow: install ## Run the long tests of the router: chaos, memory, abort storm, strange requests
	$(PYTEST) -n 0 -m slow tests/serving $(ARGS)

test-vllm: install $(VLLM_STAMP) ## Run the router in front of real vLLM workers on CPUs (own environment of 2.7 GB in .envs/vllm)
	$(TEST_ENV) PRFAAS_REAL=1 PRFAAS_VLLM_ENV=$(VLLM_ENV) PRFAAS_VLLM_FOLDER=runs/vllm \
		$(PY) -m pytest -n 0 -v --durations=5 tests/real/test_vllm_*.py $(ARGS)

$(VLLM_STAMP): $(VLLM_LIST) | $(STAMP)
	$(PY) -m venv --clear $(VLLM_ENV)
	$(if $(TORCH_INDEX),$(VLLM_ENV)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) \
		$$(grep '^torch==' $(VLLM_LIST)))
	$(VLLM_ENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r $(VLLM_LIST)
	@touch $@

test-dynamo: install $(DYNAMO_STAMP) ## Run the router in front of Dynamo's mocker and frontend (own environment of 0.7 GB in .envs/dynamo)
	$(TEST_ENV) PRFAAS_REAL=1 PRFAAS_DYNAMO_ENV=$(DYNAMO_ENV) PRFAAS_DYNAMO_FOLDER=runs/dynamo \
		$(PY) -m pytest -n 0 -v --durations=5 tests/real/test_dynamo_*.py $(ARGS)

$(DYNAMO_STAMP): $(DYNAMO_LIST) | $(STAMP)
	$(PY) -m venv --clear $(DYNAMO_ENV)
	$(DYNAMO_ENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r $(DYNAMO_LIST)
	@touch $@

test-hybrid: install $(HYBRID_STAMP) ## Run the project's own hybrid model workers behind the router (own environment of 1.6 GB in .envs/hybrid)
	$(TEST_ENV) PRFAAS_REAL=1 PRFAAS_HYBRID_ENV=$(HYBRID_ENV) PRFAAS_HYBRID_FOLDER=runs/hybrid \
		$(PY) -m pytest -n 0 -v --durations=5 tests/real/test_hybrid_*.py $(ARGS)

sim-to-real: install $(HYBRID_STAMP) ## Fit on one run of real workers, predict and measure others (root, two quiet cores, an hour; resumes in runs/sim-to-real)
	$(TEST_ENV) $(PY) -m tests.real.sim_to_real --python $(HYBRID_ENV)/bin/python $(ARGS)

# The project itself is installed without anything else: the list is its dependencies.
$(HYBRID_STAMP): $(HYBRID_LIST) | $(STAMP)
	$(PY) -m venv --clear $(HYBRID_ENV)
	$(if $(TORCH_INDEX),$(HYBRID_ENV)/bin/python -m pip install --no-deps --index-url $(TORCH_INDEX) \
		$$(grep '^torch==' $(HYBRID_LIST)))
	$(HYBRID_ENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r $(HYBRID_LIST)
	$(HYBRID_ENV)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

fuzz: install ## Compare the engines on random worlds (MINUTES=10, FIRST=1000000)
	$(TEST_ENV) $(PY) -m tests.differential.fuzz --minutes $(MINUTES) --first $(FIRST)

lint: install ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install ## Format the code and apply the safe style fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The newest versions that pyproject.toml allows, without the project itself and without build tags such as +cpu.
constraints: install ## Pin the newest allowed packages anew in constraints.txt (downloads them)
	$(PY) -m venv --clear build/constraints
	build/constraints/bin/python -m pip install --disable-pip-version-check -e '.[dev]'
	build/constraints/bin/python -m pip freeze --all --exclude pip --exclude prfaas-env > build/constraints/freeze
	{ sed -n '/^#/p' constraints.txt; sed -E 's/\+[^ ]*$$//' build/constraints/freeze; } > build/constraints/pins
	mv build/constraints/pins constraints.txt
	rm -rf build/constraints

clean: ## Remove caches and build output (keeps .venv, .envs and runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o -path ./.envs -prune -o -type d -name __pycache__ -exec rm -rf {} +
