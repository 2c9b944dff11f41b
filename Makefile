# `make demo` and `make test` are all a newcomer needs; both build .venv first.
VENV ?= .venv
PY := $(VENV)/bin/python
# Most tests wait for processes that they start. With 0 everything runs in one process.
TEST_PROCESSES ?= 3
export OMP_NUM_THREADS ?= 1
export PATH := $(abspath $(VENV)/bin):$(PATH)

.PHONY: venv demo test lint bench clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml tests/constraints.txt tests/install.sh
	sh tests/install.sh $(VENV)
	touch $@

demo: venv
	$(PY) -m ftcore demo

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: venv lint
	sh tests/system_packages.sh
	sh tests/deploy/install.sh .deploy-tools || echo "tests/deploy is skipped in part"
	$(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

bench: venv
	$(PY) -m tests.bench

clean:
	rm -rf $(VENV) .deploy-tools
