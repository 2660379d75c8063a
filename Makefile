# The same targets for people and for CI. `make demo` and `make test` do all set-up themselves.
SHELL := bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ARGS ?=

.PHONY: help demo test check setup lock clean

help: ## what can be called
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## set up, then run a whole campaign on a real model on this machine
	@bash infra/bootstrap.sh demo
	$(BIN)/bessemer run --profile demo --campaign demo

test: setup check ## set up, check, then run every test on real parts (ARGS= for pytest)
	$(BIN)/python -m pytest $(ARGS)

setup: ## everything that demo and tests need
	@bash infra/bootstrap.sh test

check: ## style, types, import rule, module names, links in the docs
	@bash infra/bootstrap.sh packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m infra.checks.module_names
	$(BIN)/python -m infra.checks.doc_links

lock: ## write infra/locks/cpu.txt anew from pyproject.toml (ARGS=--upgrade for newer versions)
	@[ -x $(BIN)/python ] || bash infra/bootstrap.sh packages
	$(BIN)/python -m infra.relock $(ARGS)

clean: ## remove the environment and every tool's cache; state in .bessemer and the shared cache stay
	rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.bessemer/*' -prune -exec rm -rf {} +
