# Every target does its own set-up. `make demo` and `make test` work on a fresh machine with Python 3.10+, make and, for Slurm, root and apt.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# A machine with a GPU build of torch may name its own: make setup TORCH=torch
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SEED ?=
RUNS ?= 20000

.PHONY: help setup demo test lint type arch bench check sim test-slurm-other clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## make the virtual environment

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; say make PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian, apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -U 'pip>=25.1'
	$(BIN)/python -m pip install -q --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e . --group test --group lint
	@touch $@

demo: setup  ## a real training run, preempted twice and resumed, with the log at the end
	@$(BIN)/python deploy/demo/demo.py

test: setup  ## all tests, real Slurm included (installs Slurm where it runs as root with apt)
	@$(BIN)/python deploy/lab/lab.py install || test -z "$$CI"
	$(MAKE) --no-print-directory lint type arch
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .

type: setup  ## mypy --strict
	$(BIN)/mypy

arch: setup  ## import contracts
	$(BIN)/lint-imports --no-cache

sim: setup  ## the simulator: make sim RUNS=20000, or make sim SEED=255 to replay one run with its trace
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED) --trace,--runs $(RUNS))

bench: setup  ## the figures of README, with their bars beside them
	$(BIN)/python -m tests.bench.bench $(BENCH_ARGS)

check: lint type arch  ## everything that runs no test

test-slurm-other: setup  ## the Slurm tests on the other Slurm version, in a chroot (root; takes some minutes)
	$(BIN)/python tests/slurm/other.py $(PYTEST_ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
