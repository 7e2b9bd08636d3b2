# Both commands need nothing but Python 3.11+: they make .venv from the pinned versions in constraints.txt first.
#   make train [ARGS="experiment=… trainer.max_steps=…"]     train, evaluate, print samples
#   make test  [ARGS="tests/kernels -k gates"]               the test suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test lint clean

train: $(VENV)/installed
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/installed $(VENV)/lm-eval
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; try make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/lm-eval: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lm-eval]'
	@touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache
