# make demo, make test: all the set-up a fresh machine needs (Python 3.11+, pip, make).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# Modules are compiled as they are first used, and kept, whatever the environment says: pip would compile ten thousand of
# which most are never used, and tests begin hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint bench clean help
help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# An install is redone only when what it depends on has changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal into $(VENV) (a minute or two the first time)"
	$(PIP) -e '.'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal with torch and the test tools into $(VENV) (a few minutes the first time)"
	$(PIP) torch
	$(PIP) -e '.[torch,dev]'
	@touch $@ $(VENV)/.installed

# The demo trains: it needs torch, and none of the test tools.
$(VENV)/.installed-torch: $(VENV)/.installed
	$(PIP) torch
	@touch $@

demo: $(VENV)/.installed-torch ## set up, and show Shoal at work
	$(BIN)/python examples/demo.py

# Tests with training processes mostly wait for them: apart from the others, which compute all the time.
PROCESS_TESTS := tests/torch tests/e2e
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

test: $(VENV)/.installed-dev ## set up, and run all tests
	$(PYTEST) $(addprefix --ignore=,$(PROCESS_TESTS)) $(PYTEST_ARGS)
	$(PYTEST) $(PROCESS_TESTS) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev ## every measurement, each as JSON (minutes)
	@for b in bench/*.py; do case $$b in */_*) ;; *) echo "== $$b"; $(BIN)/python $$b || exit 1;; esac; done

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
