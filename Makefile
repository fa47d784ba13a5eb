# make demo and make test set up everything that a fresh machine needs beyond Python 3.11+, pip and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# Python compiles a module at its first use and keeps the result, even if the environment disables that: pip would
# compile ten thousand modules, most of them never used, and the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast lint bench clean help
help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# An install is repeated only when pyproject.toml or constraints.txt has changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal with its server, its simulator and torch into $(VENV) (a few minutes the first time)"
	$(PIP) torch -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools into $(VENV)"
	$(PIP) -e '.[all,dev]'
	@touch $@

demo: $(VENV)/.installed ## set up, and show Shoal at work
	$(BIN)/python examples/demo.py

# Tests that start training processes or an installation mostly wait for them. They run after the others, which compute
# all the time. The longest files come first, so that none of them is left over at the end.
PROCESS_TESTS := tests/cluster tests/engines/test_ray.py tests/engines/test_slurm.py tests/torch tests/e2e \
	tests/integrations tests/install tests/agents/test_agents.py
PYTEST := $(BIN)/python tests/run.py

test: $(VENV)/.installed-dev ## set up, and run all tests
	$(PYTEST) $(addprefix --ignore=,$(PROCESS_TESTS)) $(PYTEST_ARGS)
	$(PYTEST) --no-loadscope-reorder $(PROCESS_TESTS) $(PYTEST_ARGS)

# Tests that mostly start servers, workers, browsers or other programs, run the experiments of a paper, or play long
# random histories.
NOT_FAST := $(PROCESS_TESTS) tests/cli tests/executors tests/papers tests/report/test_browser.py \
	tests/server/test_crash.py tests/sim/test_command.py tests/sim/test_comparison.py tests/sim/test_first_use.py \
	tests/sim/test_docs.py tests/sim/test_interrupts.py tests/sim/test_published.py tests/fair/test_possible.py \
	tests/scheduler/test_safety.py $(addprefix tests/server/test_,backup.py control_port.py outsiders.py processes.py \
	restart.py suggestions.py upgrade.py)

test-fast: $(VENV)/.installed-dev ## run the quick tests, few of which start processes (a few minutes)
	$(PYTEST) $(addprefix --ignore=,$(NOT_FAST)) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! git grep -InE '^(<<<<<<<|>>>>>>>) '  # markers of an unresolved merge

bench: $(VENV)/.installed-dev ## every measurement, each as JSON (minutes)
	@for b in bench/*.py; do case $$b in */_*) ;; *) echo "== $$b"; $(BIN)/python $$b || exit 1;; esac; done

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
