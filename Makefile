# Two commands: `make demo` runs the main job in miniature, `make test` sets up and passes the tests.
PYTHON ?= python3
BIN := .venv/bin
FIRST_PARTY := pipeline steps data models training experiments

.PHONY: demo test fast lint setup clean

demo: .venv/installed
	$(BIN)/python experiments/run_200m.py --preset smoke

test: .venv/installed lint
	$(BIN)/python -m pytest

fast: .venv/installed lint
	$(BIN)/python -m pytest -m "not slow"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check $(FIRST_PARTY)

setup: .venv/installed

# uv installs in a quarter of pip's time; it comes from the same registry, into the environment.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
