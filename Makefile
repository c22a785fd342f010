# make train    a small transformer on the CPU, in minutes (PRESET=h200 EXTRAS=cuda13,train on a GPU)
# make sample   text from what was trained
# make serve    a completions server on 127.0.0.1:8000 for what was trained
# make test     the whole suite
# make test-oldest  what changes between JAX releases, on the oldest one allowed
# make lint     formatting, lint, types
#
# Each makes .venv first, from the first Python >= 3.12 that it finds; PYTHON=... names another.

PRESET ?= cpu
OUT ?= runs/$(PRESET)
ARGS ?=
EXTRAS ?= flax,train
TEST_EXTRAS ?= flax,train,test,sass
TESTS ?= tests
# One process a core, whole files at a time: fixtures that compile are shared by a file. In their own
# order: with the files of fewest tests last, which are the longest here, one core would end alone.
WORKERS ?= -n auto --dist loadfile --no-loadscope-reorder

VENV := .venv
RUN := $(VENV)/bin/python

# The oldest JAX that pyproject.toml allows, and the tests that touch what changes between releases.
OLDEST_JAX := 0.11.2
OLDEST_TESTS ?= tests/test_transforms.py tests/test_forward.py tests/test_predicate.py \
    tests/test_lowering.py tests/test_mosaic_lowering.py tests/test_sharding.py \
    tests/test_flax_attention_fn.py

.PHONY: train sample serve test test-oldest lint format clean
.DELETE_ON_ERROR:

# A run that was interrupted goes on; OUT=runs/other starts another.
train: $(VENV)/train.stamp
	$(RUN) -m models.train --preset $(PRESET) --out $(OUT) --resume $(ARGS)

sample: $(VENV)/train.stamp
	$(RUN) -m models.sample $(OUT) $(ARGS)

serve: $(VENV)/serve.stamp
	$(RUN) -m models.serve $(OUT) $(ARGS)

test: $(VENV)/test.stamp
	$(RUN) -m pytest $(TESTS) $(WORKERS) $(ARGS)

test-oldest: .venv-oldest/test.stamp
	.venv-oldest/bin/python -m pytest $(OLDEST_TESTS) $(WORKERS) -m "not sass" $(ARGS)

.venv-oldest/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	    jax==$(OLDEST_JAX) --editable ".[flax,test]"
	touch $@

lint: $(VENV)/test.stamp
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyrefly check --python-interpreter-path $(RUN)

format: $(VENV)/test.stamp
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info

$(VENV)/train.stamp: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	touch $@

$(VENV)/serve.stamp: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS),serve]"
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(TEST_EXTRAS)]"
	touch $@

# Asks each candidate itself: a name on the PATH may be a shim for a version that is not there.
define FIND_PYTHON
fits() { \
    "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; \
}; \
for python in "$(PYTHON)" python3 python3.12 python3.13 python3.14 python \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python \
    /opt/homebrew/bin/python3 /usr/local/bin/python3 \
    "$$(uv python find --no-project '>=3.12' 2>/dev/null)"; do \
    if [ -n "$$python" ] && fits "$$python"; then break; fi; \
    python=""; \
done
endef

$(VENV)/bin/python:
	@$(FIND_PYTHON); \
	if [ -n "$$python" ]; then \
	    echo "$$python -m venv $(VENV)"; \
	    "$$python" -m venv --clear $(VENV); \
	elif command -v uv >/dev/null; then \
	    echo "uv venv --seed --python 3.12 $(VENV)"; \
	    uv venv --seed --python 3.12 $(VENV); \
	else \
	    echo "No Python 3.12 or newer (with venv and ensurepip) was found." >&2; \
	    echo "Install one and run make again, for example:" >&2; \
	    echo "    apt install python3.12 python3.12-venv    (Ubuntu 24.04)" >&2; \
	    echo "    brew install python@3.13                  (macOS)" >&2; \
	    echo "    curl -LsSf https://astral.sh/uv/install.sh | sh    (uv; any Linux)" >&2; \
	    echo "or name one: make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	fi
