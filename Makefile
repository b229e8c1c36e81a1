# minichunk: `make lab` does everything, from a fresh clone to JupyterLab. `make help` lists the rest.
#
#   PYTHON=python3.12     the Python (3.11 or newer) that makes the virtual environment
#   VENV=.venv            where that environment lies
#   PORT=8888             JupyterLab's port
#   TORCH_INDEX=…         where pip takes torch from. On Linux its own choice is PyTorch's CUDA build, several GB;
#                         PyTorch's CPU build is enough for the course: TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8888
TORCH_INDEX ?=

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
INSTALLED := $(VENV)/.installed

.PHONY: help lab demo setup model test test-fast test-browser notebooks lock

help:
	@echo "make lab           set up, then JupyterLab on notebook 00 (PORT=$(PORT))"
	@echo "make demo          set up, then a live table of mixed batches in the terminal"
	@echo "make setup         virtual environment, pinned packages, SmolLM2's weights"
	@echo "make test          set up, then every test and notebook (make test-browser: JupyterLab in a browser)"
	@echo "make test-fast     the quick tests, which need no download"
	@echo "make notebooks     write notebooks/ from notebooks/source/"
	@echo "make lock          renew requirements.lock from pyproject.toml (needs uv)"

lab: setup
	@$(BIN)/minichunk lab --port $(PORT)

demo: setup
	@$(BIN)/minichunk demo

setup: $(INSTALLED) model

$(BIN)/python:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "minichunk needs Python 3.11 or newer with its venv module; name one with 'make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)' (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The lock first: torch then finds its own requirements there at the pinned versions.
$(INSTALLED): $(BIN)/python requirements.lock requirements-torch.txt pyproject.toml
	@echo "Installing the pinned packages into $(VENV)"
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	@$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements-torch.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

model: $(INSTALLED)
	@$(BIN)/python -c 'from minichunk import smollm2; smollm2.ensure()'

$(VENV)/.triton: $(INSTALLED) requirements-triton.txt
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements-triton.txt
	@touch $@

test: setup $(VENV)/.triton
	$(PYTEST) --nbmake -m "not browser" --durations=10 tests notebooks

test-fast: $(INSTALLED) $(VENV)/.triton
	$(PYTEST) -m "not smollm2 and not notebook and not browser and not slow" tests

test-browser: setup
	$(PYTEST) -m browser tests

notebooks: $(INSTALLED)
	$(BIN)/python tools/build_notebooks.py

# For every platform and Python from 3.11 on, with the hashes of all files of a release. Left out: torch
# (requirements-torch.txt) and what only its CUDA build needs.
lock:
	@command -v uv >/dev/null || { echo "make lock needs uv: pip install uv"; exit 1; }
	@mkdir -p build
	echo hatchling | uv pip compile pyproject.toml - --extra notebooks --extra test --constraint requirements-torch.txt \
		--universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --upgrade -o build/all.lock
	{ echo "# Made by 'make lock'. Install with: pip install --require-hashes --no-deps -r requirements.lock"; \
	  echo "# then torch, whose builds share one version and so cannot have a hash: pip install -r requirements-torch.txt"; \
	  awk '/^[a-z]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' build/all.lock; } > requirements.lock
