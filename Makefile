PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a worker per core, each of one thread and about 1 GB; the slowest tests are listed at the end
TEST_WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --maxprocesses 8 --dist worksteal --durations 15
# seconds that a whole test run may take: `test` took 220 to 640 with two cores
TEST_LIMIT ?= 2700
TEST_ALL_LIMIT ?= 7200

export OMP_NUM_THREADS := 1

.PHONY: venv compat demo docs test test-all lint clean

COMPAT := .venv-compat

# the venv for everything but testing; made again when the requirements change
$(VENV)/.base: pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

# peers that `test-all` runs against the server; they want other versions of our dependencies
$(COMPAT)/.done:
	rm -rf $(COMPAT)
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install --quiet 'lm-eval[api]==0.4.13' 'guidellm==0.8.1' 'transformers>=5.10' 'torch==2.13.0'
	touch $@

compat: $(COMPAT)/.done

venv: $(VENV)/.test

# with no arguments `generate` runs the bundled model over its demo prompts
demo: $(VENV)/.base
	$(BIN)/gapless generate

# docs/options.md, from the option dataclasses
docs: $(VENV)/.base
	$(BIN)/python tools/make_option_docs.py

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	timeout $(TEST_LIMIT) $(PYTEST) -m 'not slow and not gpu'

test-all: lint compat
	HYPOTHESIS_PROFILE=full timeout $(TEST_ALL_LIMIT) $(PYTEST) -m 'not gpu'

clean:
	rm -rf $(VENV) $(COMPAT) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find gapless tests -name __pycache__ -type d -prune -exec rm -rf {} +
