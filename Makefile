# The one list of commands; .ci/run and the README call these.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
EXTRAS ?= train,demo,sweeps,dev

.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## make the environment in .venv

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: setup  ## train both drafters and the router of SmolLM2-135M, and measure them (under 25 minutes)
	$(PY) data_prep/generate.py experiment=demo
	$(PY) train.py task=ar_drafter experiment=demo
	$(PY) train.py task=diffusion_drafter experiment=demo
	$(PY) data_prep/profile_costs.py experiment=demo
	$(PY) data_prep/log_rounds.py experiment=demo
	$(PY) train.py task=router experiment=demo
	$(PY) evaluate.py checkpoint=artifacts/smollm2_135m/router experiment=demo

test: setup  ## the fast tests, about half an hour on two cores
	$(PY) -m pytest -q -m "not slow"

test-slow: setup  ## the tests on the real target, some minutes
	$(PY) -m pytest -q -m slow

format: setup  ## format the code
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

check: setup  ## format, lint, types, import contracts
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/basedpyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports

.PHONY: help setup demo test test-slow format check
