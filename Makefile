# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
# Where torch comes from, if not from pip's own index: on a machine without GPU whose index hands out the CUDA build,
# the index of torch's CPU wheels.
TORCH_INDEX ?=
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
PIP = $(BIN)/python -m pip --disable-pip-version-check --no-input
# --no-deps, here and below: the locks are complete, so nothing is resolved and no CUDA package is pulled in.
# torch is installed without a look at a lock's hashes, because each index has a build of its own under one version.
INSTALL_TORCH = $(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep -o '^torch==[^ ]*' requirements.lock)"
STAMP := $(VENV)/.installed
# Renews a lock: a pin that is there already stays, unless what is asked for has changed.
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command "make lock"
IMAGE := --python-version 3.11.15 --python-platform x86_64-manylinux_2_28
NAME ?= seeds
DOCS := .venv-docs
# Which recipe `demo`, `serve` and `up` are about: a file in qinglan/configs/, such as medical or answer_judge, or a path.
PROFILE := embedded
export DO_NOT_TRACK := true

.PHONY: setup setup-vllm demo test test-all test-unit lint up serve bench docs lock clean clean-all help

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install everything that is locked

$(STAMP): requirements.lock pyproject.toml
	@$(if $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || echo old),$(error Qinglan needs Python 3.11 or newer; set PYTHON=/path/to/python3.11))
	@echo "setup 1/3: virtual environment and torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL_TORCH)
	@echo "setup 2/3: $$(grep -c == requirements.lock) locked packages, about two minutes"
	@$(PIP) install --quiet --no-deps --require-hashes --requirement requirements.lock
	@echo "setup 3/3: Qinglan itself"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch' || { echo "error: torch can't be loaded; on a machine without GPU give its CPU wheels: make setup TORCH_INDEX=<index of CPU wheels>" >&2; rm -rf $(VENV); exit 2; }
	@# A new site begins with a copy of this database: its first run makes no tables.
	@database=$$($(BIN)/python -c 'from qinglan.ops.up.site import empty_database; print(empty_database())') \
	  && mkdir -p "$$(dirname "$$database")" \
	  && PREFECT_SERVER_DATABASE_CONNECTION_URL=sqlite+aiosqlite:///$$database $(BIN)/prefect server database upgrade --yes >/dev/null
	@touch $@

setup-vllm: setup $(VLLM)/.installed ## the trainer's environment with vLLM on the CPU, for PROFILE=embedded_vllm

$(VLLM)/.installed: BIN := $(VLLM)/bin
$(VLLM)/.installed: docker/trainer-cpu.lock docker/vllm-name/pyproject.toml pyproject.toml
	@echo "setup-vllm: torch, $$(grep -c == docker/trainer-cpu.lock) locked packages and Qinglan, some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VLLM)
	@$(INSTALL_TORCH)
	@$(PIP) install --quiet --no-deps --require-hashes --requirement docker/trainer-cpu.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation ./docker/vllm-name --editable .
	@touch $@

demo: setup ## the whole DAG without key and GPU, then a question to the released student; also PROFILE=medical, PROFILE=answer_judge
	@$(BIN)/qinglan run pipeline --report-suffices --profile $(PROFILE)
	@# What was printed above stays a result where the server fails.
	@$(BIN)/qinglan serve --check --if-released --profile $(PROFILE) || echo "The model was not asked; the result above stands."

test: setup ## the tests, a small real end-to-end run included; some ten minutes on two cores
	@$(PYTEST) -m "not extended"

test-all: setup ## `test` and what it leaves out: browser, kill series, faults, the other recipes' end-to-end runs
	@$(PYTEST)

test-unit: setup ## the fast tests only
	@$(PYTEST) -m "not slow"

lint: setup ## ruff, mypy in strict mode, and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

serve: setup ## the champion behind an OpenAI-compatible router on loopback, until Ctrl-C
	@$(BIN)/qinglan serve --profile $(PROFILE)

up: setup ## Prefect's and MLflow's pages on loopback, a worker for each pool, teacher and RAG to try, until Ctrl-C
	@$(BIN)/qinglan up --profile $(PROFILE)

bench: setup ## run benchmarks/$(NAME).py and print its table
	@$(BIN)/python benchmarks/$(NAME).py

lock: ## after a changed pin: the hashes of requirements.lock, and the images' locks
	@# Of a pin that was edited, uv would keep the old hashes: it is shown none.
	@grep -o '^[^# ]*==[^ ]*' requirements.lock | $(LOCK) --no-deps --python-version 3.11 --output-file $(VENV)/new.lock - >/dev/null
	@mv $(VENV)/new.lock requirements.lock
	@$(LOCK) $(IMAGE) --constraint requirements.lock --output-file docker/orchestrator.lock docker/orchestrator.in pyproject.toml
	@$(LOCK) $(IMAGE) --output-file docker/trainer.lock docker/trainer.in
	@$(LOCK) $(IMAGE) --override docker/trainer-cpu.overrides --output-file docker/trainer-cpu.lock docker/trainer-cpu.in

docs: $(DOCS)/.installed ## the documentation as pages in site/, in an environment of its own
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

$(DOCS)/.installed: docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r docs/requirements.txt
	@touch $@

clean: ## remove the environment and caches; runs and the ledger of paid answers stay
	rm -rf $(VENV) $(VLLM) $(DOCS) site build *.egg-info .pytest_cache .mypy_cache .ruff_cache

clean-all: clean ## remove all runs and the ledger as well
	rm -rf runs .qinglan
