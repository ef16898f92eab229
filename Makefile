# One command each. Everything runs in .venv, made on first use.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test faults lab bench spec-map lint types clean

demo: $(VENV)/.run        ## show the main job: two sessions write to each other on this box
	@$(BIN)/python demo/demo.py

test: $(VENV)/.dev        ## the whole suite but for what is marked lab and slow
	$(PYTEST) -m "not lab and not slow" -n auto --dist loadfile

faults: $(VENV)/.dev      ## SIGKILL between each pair of system calls; prints points x operations
	$(PYTEST) -m "faults and not lab and not slow" -q -s tests/faults

lab: $(VENV)/.dev         ## many boxes in a guest kernel
	$(PYTEST) -m "lab and not slow" -q tests/lab tests/netns tests/faults

bench: $(VENV)/.dev       ## speed, as ratios in one run
	$(BIN)/python -m benchmarks

spec-map: $(VENV)/.dev    ## each statement of the spec, and the tests that show it
	$(BIN)/python tests/spec/spec_map.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sotbus needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml $(VENV)/bin/python
	@$(PIP) install -e . && $(BIN)/python -m compileall -q sotbus && touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/bin/python
	@$(PIP) install -e '.[dev]' && $(BIN)/python -m compileall -q sotbus && touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist
