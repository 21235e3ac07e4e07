# All development tasks. `make` lists them.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Tests wait for processes and servers longer than they compute, so there are two workers per core.
CORES := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
WORKERS ?= $(shell expr 2 \* $(CORES))
QUICK_TESTS ?= -n $(CORES) --dist worksteal -m "not server and not full and not docs"

.PHONY: help setup up demo quick test test-all postgres pythons soak check format bench load failover docs reference contracts conformance dashboards deploy-tools kafka kafka-stop lock wheel clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/.ready ## Create the virtual environment, with uv if it is installed, otherwise with venv and pip

.venv/.ready: requirements-dev.lock pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) scripts/setup

demo: setup ## Run all five parts on sample data and check each guarantee; about 20 seconds
	@$(BIN)/penstock demo --folder .build/demo

up: setup ## Run the demo and continue serving until Ctrl-C
	@$(BIN)/penstock demo --keep --folder .build/up

quick: setup ## Run the pure tests: no servers, no processes; about half a minute
	@PENSTOCK_QUICK=1 PENSTOCK_EXAMPLES_DIVISOR=4 $(BIN)/pytest -q $(QUICK_TESTS)

test: setup ## Run at least one test of every clause with the servers that are installed; list what was skipped
	@PENSTOCK_TEST_CLAUSES=1 PENSTOCK_EXAMPLES_DIVISOR=2 $(BIN)/pytest -n $(WORKERS) --dist worksteal -q -m "not full"

test-all: setup deploy-tools ## Run every test with the real servers, which scripts/install-servers installs
	@PENSTOCK_TEST_CLAUSES=1 scripts/with-servers $(BIN)/pytest -n $(WORKERS) --dist worksteal -q

postgres: setup ## Run the tests that use a database on PostgreSQL 15, 16 and 17; needs Maven
	@WORKERS=$(WORKERS) scripts/postgres test

pythons: setup ## Run the demo and the quick tests on every installed Python version
	@PENSTOCK_QUICK=1 PENSTOCK_EXAMPLES_DIVISOR=4 QUICK_TESTS='$(QUICK_TESTS)' scripts/test-pythons

soak: setup deploy-tools ## Run the long campaigns in full and write docs/soak.md; ONLY=flows selects campaigns by name
	@PENSTOCK_SOAK=1 scripts/with-servers $(BIN)/pytest -n $(CORES) --dist worksteal -v -m soak --timeout=7200 $(if $(ONLY),-k '$(ONLY)')

check: setup ## Check lint, format, names and words, types, import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && scripts/wording && $(BIN)/mypy && $(BIN)/lint-imports

format: setup ## Format the code and apply automatic fixes
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup ## Run the benchmarks; BENCH_ARGS="--json", "--rounds 3", "NAME --smoke"; Ctrl-C prints the finished rounds
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

load: setup ## Run a load test, locally or against a cluster, and write a report; DRILL_ARGS="--help" lists the options
	@$(BIN)/python -m drills load $(DRILL_ARGS)

failover: setup ## Run a load test that kills one component after the other; fails if a guarantee was broken
	@$(BIN)/python -m drills failover $(DRILL_ARGS)

dashboards: setup ## Generate the Grafana dashboards
	@$(BIN)/python scripts/dashboards

contracts: setup ## Generate docs/contracts: JSON Schemas, AsyncAPI and OpenAPI
	@$(BIN)/python scripts/contracts

docs: reference ## Build the documentation site in .build/docs; a broken link fails the build
	@$(BIN)/sphinx-build -q -E -W --keep-going -b html -d .build/doctrees docs .build/docs
	@echo "open .build/docs/index.html"

conformance: setup ## Generate docs/conformance.md from the docstrings of the tests
	@$(BIN)/python scripts/conformance

reference: contracts ## Generate docs/reference and the diagrams of state machines
	@$(BIN)/python scripts/reference

deploy-tools: setup ## Install Helm, Envoy and the schemas for the tests of deploy/; needs Go
	@scripts/deploy-tools

kafka: ## Download Apache Kafka with Maven and start one node on 127.0.0.1
	@scripts/kafka start

kafka-stop: ## Stop the Kafka node
	@scripts/kafka stop

wheel: setup ## Build the wheel into dist/
	@$(BIN)/python -m hatchling build --target wheel

lock: setup ## Update the lock files from pyproject.toml
	@scripts/lock

clean: ## Delete build output and the virtual environment; data directories stay
	@rm -rf .venv .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
