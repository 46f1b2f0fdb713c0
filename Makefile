# Two commands: `make demo` runs the main job in miniature, `make test` sets up and passes the tests.
# The newest supported Python on the PATH; PYTHON=python3.11 chooses another.
PYTHON ?= $(or $(shell for p in python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '' 2>/dev/null && { echo $$p; break; }; done),python3)
# `no` leaves PyTorch out, and skips what is compared with it: it has no small build for every Python.
ORACLE ?= yes
# Which constraints-*.txt: `newest` (JAX 0.12, the default from Python 3.12 on) or `oldest` (JAX 0.10).
STACK ?= $$($(BIN)/python -c 'import sys; print("newest" if sys.version_info >= (3, 12) else "oldest")')
BIN := .venv/bin
# Files in this order: the longest test must not begin last.
COMPUTING := tests/training tests/models tests/steps
ENGINE := tests/pipeline tests/data tests/test_readme.py
FIRST_PARTY := pipeline steps data models training experiments

# Hundreds of processes start in a run of the tests; none need compile Python's sources again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints-$(STACK).txt

.PHONY: demo test test-computing test-engine test-rest fast test-fast lint docs setup clean

demo: .venv/installed
	$(BIN)/ponente run experiments/run_200m.py --smoke

# Three parts side by side: one computes, two start clusters, kill processes and wait a lot.
test: .venv/installed $(if $(filter yes,$(ORACLE)),.venv/oracle)
	$(MAKE) --jobs 4 lint test-computing test-engine test-rest

test-computing: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(COMPUTING)

test-engine: .venv/installed
	$(BIN)/python -m pytest $(ENGINE)

test-rest: .venv/installed
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTING) $(ENGINE))

fast: .venv/installed
	$(MAKE) --jobs 2 lint test-fast

test-fast: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check $(FIRST_PARTY)

# The pages of docs/ as dist/site/index.html: a warning is an error, and so is a dead link or anchor. What the
# tool complains of docstrings does not count.
docs: .venv/docs
	$(BIN)/zensical build --clean --strict
	rm -rf dist/site/runs # of the notebook, which runs in docs/

setup: .venv/installed

# uv installs in a quarter of pip's time; it comes from the same registry, into the environment. An
# environment of another Python, such as a set-up that was refused has left, is made again.
OLDEST := $(if $(filter newest,$(STACK)),3.12,3.11)
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
.venv/installed: pyproject.toml $(wildcard constraints-*.txt)
	@case "$$($(PYTHON) $(VERSION))" in $(OLDEST)|3.12|3.13|3.14) ;; *) echo "error: $(PYTHON) is Python \
	$$($(PYTHON) $(VERSION)); ponente needs $(OLDEST) to 3.14: make $(or $(MAKECMDGOALS),demo) PYTHON=python$(OLDEST)" >&2; exit 1;; esac
	@[ "$$($(BIN)/python $(VERSION) 2>/dev/null)" = "$$($(PYTHON) $(VERSION))" ] || rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	$(INSTALL) -e '.[dev]'
	touch $@

# What only tests need, and 2 GB of it: PyTorch with transformers. Where pip is told of local wheels
# (PIP_FIND_LINKS), such as PyTorch's CPU build, uv is told of them too.
.venv/oracle: .venv/installed
	$(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)") \
	$(INSTALL) -e '.[dev,oracle]'
	touch $@

.venv/docs: .venv/installed
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv runs dist .cache
