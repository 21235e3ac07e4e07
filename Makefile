# Everything a developer or a newcomer does with Penstock. `make` alone explains itself.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Tests wait for processes and servers more than they compute.
CORES := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
WORKERS ?= $(shell expr 2 \* $(CORES))
QUICK_TESTS ?= -n $(CORES) --dist worksteal -m "not server and not full and not docs"

.PHONY: help setup up demo quick test test-all postgres pythons soak check format bench load failover docs reference contracts conformance dashboards deploy-tools kafka kafka-stop lock wheel clean

help: ## Say what can be done here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: .venv/.ready ## Make the virtual environment (uv when it is there, else venv and pip)

.venv/.ready: requirements-dev.lock pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) scripts/setup

demo: setup ## One morning through all five parts: what was promised, what happened; ends by itself
	@$(BIN)/penstock demo --folder .build/demo

up: setup ## The same morning, and it goes on serving, until Ctrl-C
	@$(BIN)/penstock demo --keep --folder .build/up

quick: setup ## Run the pure tests: no servers, no processes; for the inner loop
	@PENSTOCK_QUICK=1 PENSTOCK_EXAMPLES_DIVISOR=4 $(BIN)/pytest -q $(QUICK_TESTS)

test: setup ## Run the tests of every promise with the servers at hand; says what it skipped and why
	@PENSTOCK_TEST_CLAUSES=1 PENSTOCK_EXAMPLES_DIVISOR=2 $(BIN)/pytest -n $(WORKERS) --dist worksteal -q -m "not full"

test-all: setup deploy-tools ## Run every test, with the real servers, which must be there: scripts/install-servers
	@PENSTOCK_TEST_CLAUSES=1 scripts/with-servers $(BIN)/pytest -n $(WORKERS) --dist worksteal -q

postgres: setup ## Run the tests that use a database on PostgreSQL 15, 16 and 17; needs Maven
	@WORKERS=$(WORKERS) scripts/postgres test

pythons: setup ## Run the demo and the quick tests on every Python that is at hand
	@PENSTOCK_QUICK=1 PENSTOCK_EXAMPLES_DIVISOR=4 QUICK_TESTS='$(QUICK_TESTS)' scripts/test-pythons

soak: setup deploy-tools ## Run the long campaigns in full and write docs/soak.md; ONLY=flows for those whose name has it
	@PENSTOCK_SOAK=1 scripts/with-servers $(BIN)/pytest -n $(CORES) --dist worksteal -v -m soak --timeout=7200 $(if $(ONLY),-k '$(ONLY)')

check: setup ## Lint, types, import rules
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: setup ## Rewrite the code in our format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup ## Measure; BENCH_ARGS="--json" for data, "--rounds 3" for less, "NAME --smoke" to check that it runs; Ctrl-C prints finished rounds
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

load: setup ## Put a load on Penstock, here or on a cluster, and report; DRILL_ARGS="--help" says what can be set
	@$(BIN)/python -m drills load $(DRILL_ARGS)

failover: setup ## The same, and kill one thing after the other; fails when a promise was broken
	@$(BIN)/python -m drills failover $(DRILL_ARGS)

dashboards: setup ## Write the Grafana dashboards anew
	@$(BIN)/python scripts/dashboards

contracts: setup ## Write docs/contracts anew: JSON Schemas, AsyncAPI and OpenAPI, from the code
	@$(BIN)/python scripts/contracts

docs: reference ## Build the documentation as a site in .build/docs; a link that leads nowhere fails it
	@$(BIN)/sphinx-build -q -E -W --keep-going -b html -d .build/doctrees docs .build/docs
	@echo "open .build/docs/index.html"

conformance: setup ## Write docs/conformance.md anew, from the tests' docstrings
	@$(BIN)/python scripts/conformance

reference: contracts ## Write docs/reference and the pictures of state machines anew, from the code
	@$(BIN)/python scripts/reference

deploy-tools: setup ## Bring Helm, Envoy and the schemas that the tests judge deploy/ by; needs Go
	@scripts/deploy-tools

kafka: ## Bring a real Apache Kafka with Maven and start one node on 127.0.0.1
	@scripts/kafka start

kafka-stop: ## Stop that node
	@scripts/kafka stop

wheel: setup ## Build the wheel into dist/
	@$(BIN)/python -m hatchling build --target wheel

lock: setup ## Renew the lock files from pyproject.toml
	@scripts/lock

clean: ## Remove what was built; data directories stay
	@rm -rf .venv .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
