# make demo: set up and run the main job; make test: set up and run the tests; make setup: prepare .venv only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test setup lint bench clean

demo: setup
	$(BIN)/atoll demo

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Speed against a hand-written JAX program and PyTorch, which has an environment of its own.
bench: setup
	@test -x .venv-bench/bin/python || ($(PYTHON) -m venv .venv-bench && .venv-bench/bin/pip install -q torch==2.13.0 numpy)
	$(BIN)/python benchmarks/speed.py --torch .venv-bench/bin/python
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/images.py cnn --runs 1 --rounds 1 --torch .venv-bench/bin/python
	$(BIN)/python benchmarks/parties.py
	$(BIN)/python benchmarks/deployment.py
	$(BIN)/python benchmarks/vertical.py --torch .venv-bench/bin/python

setup: .venv/ready

.venv/ready: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || (echo "Atoll needs Python 3.11 or newer; name one: make PYTHON=python3.12" && false)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e ".[dev,flower,parties]"
	touch .venv/ready

clean:
	rm -rf .venv .venv-bench build dist *.egg-info
