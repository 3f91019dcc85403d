# Two commands: `make demo` and `make test`. Each does all its own set-up; nothing but Python 3.11+, make and pip is needed.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip install --quiet --constraint constraints.txt

# What a caller's shell happens to have activated must not leak into the project's own environment.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

# Two test workers with one thread each: more threads than cores make small tensors slower.
# Models in the tests are built from configurations, never fetched: the hub is switched off so that it shows.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help install install-laplace demo test lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 24

install: $(STAMP)  ## make .venv with everything the tests and the demo need

# Without build isolation the build tools are pinned too, and nothing is resolved twice.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dubito needs Python 3.11 or newer, found " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	@echo "installing into $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# laplace-torch and BackPACK declare torchvision, which what we use does not import, and which has to match the build
# of torch: here they come without it, and the rest of their needs by name.
install-laplace: $(STAMP)  ## add laplace-torch, for those who use it
	@$(PIP) einconv einops linear_operator opt_einsum unfoldNd
	@$(PIP) --no-deps laplace-torch asdfghjkl backpack-for-pytorch curvlinops-for-pytorch

demo: $(STAMP)  ## compare the methods on real data; writes into ./demo/
	@$(VENV)/bin/dubito compare --output demo

test: lint  ## lint, type check and run the tests
	$(TEST_ENV) $(PY) -m pytest -n 2

lint: $(STAMP)  ## lint and type check only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)  ## put the code into the house style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove .venv, caches and the demo's output
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
