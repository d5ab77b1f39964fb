# Each target installs what it needs first; a second `make setup` takes a second.

PYTHON ?= python3
VENV := $(or $(ONBELAY_VENVS),.venvs)/onbelay/bin

.PHONY: setup demo test gym-conformance power-cuts up down lint

setup:
	@$(PYTHON) workers/environments/install.py

demo: setup
	$(VENV)/onbelay demo $(DEMO_ARGS)

test: setup
	$(VENV)/python -m pytest $(PYTEST_ARGS)

gym-conformance: setup
	$(VENV)/python -m pytest -q -s tests/gym/test_conformance.py

power-cuts: setup
	$(VENV)/python -m pytest tests/e2e/test_power_cut.py -v --power-cuts 3

up: setup
	$(VENV)/onbelay up $(UP_ARGS)

down: setup
	$(VENV)/onbelay down

lint: setup
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/pyright
	$(VENV)/lint-imports
