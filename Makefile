# make demo    the headline operators, from template to result
# make test    lint, types and the tests that this machine can run; make test-all: the exhaustive ones too
#
# Both create .venv first. Another interpreter: make demo PYTHON=python3.12
# CUDA 12:     make demo EXTRA=cu12 CONSTRAINTS=constraints-cu12.txt

PYTHON ?= python3
EXTRA ?= cu13
CONSTRAINTS ?= constraints.txt
# More workers than this gain nothing: the rest of the time is one compiler run after another.
JOBS ?= auto
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRA)

.PHONY: demo test test-all lint gpu-test clean

demo: $(INSTALLED)
	$(BIN)/jitconv demo
	@echo '(first: . $(BIN)/activate)'

# pytest comes last: its closing line is the summary of the run. The tests of tests/gpu share one
# worker (tests/gpu/conftest.py), so that they do not compete for the memory of the device.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadgroup $(PYTEST_ARGS)

# The same and the tests marked exhaustive.
test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadgroup -m '' $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/mypy

# Only the tests that need a CUDA device, in one process; fails where there is none.
gpu-test: $(INSTALLED)
	JITCONV_REQUIRE_GPU=1 $(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written only after everything is installed: an interrupted install starts again.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		-e '.[$(EXTRA),dev]' -c $(CONSTRAINTS)
	rm -f $(VENV)/.installed-*
	touch $@
