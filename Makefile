# make demo    set up and press the demo model: checkpoint -> 4-bit artifact -> .cbk, perplexity before and after, text
# make test    set up and run the fast tests
# make check   ruff and mypy        make test-slow   the long tests        make clean
# Needs python3 (3.11 or newer) with its venv module; everything else is installed into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= demo-out
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-slow check clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.runtime
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.test
	$(PIP) --editable '.[test,lint]'
	@touch $@

demo: $(VENV)/.runtime
	@$(BIN)/python benchmarks/demo.py models/books-2m models/sample.txt $(OUT)

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not network"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "slow and not gpu and not network"

check: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
