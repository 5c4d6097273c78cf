PYTHON ?= python3
VENV   ?= .venv

BIN     := $(abspath $(VENV))/bin
# Always with the constraints, the versions that the tests run with. docs/install.md: the CPU build of torch.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# The dev installation contains the run installation, so it stamps both.
RUN     := $(VENV)/.stamp-run
DEV     := $(VENV)/.stamp-dev

.DEFAULT_GOAL := help
.PHONY: help demo deployment calibration test test-all lint format typecheck layers docs fresh clean

help:  ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(RUN)  ## install bayesfed into .venv and run a first experiment
	$(BIN)/bayesfed run experiments/grunfeld.toml

deployment: $(DEV)  ## a fit over three institutions with Flower, TLS and a killed node, on this machine: five minutes
	@echo "installing Flower into $(VENV), a minute or two"
	$(INSTALL) -e '.[dev,flower]'
	$(BIN)/python experiments/deployment/demo.py

test: lint  ## lint, type-check and run the tests but the slow ones
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

test-all: lint  ## the same with the slow ones and those over Flower, a quarter of an hour more
	$(INSTALL) -e '.[dev,flower]'
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

calibration: $(DEV)  ## simulation-based calibration of all shipped models: half an hour
	$(BIN)/python experiments/calibration.py

lint: $(DEV)  ## ruff, formatting, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory typecheck layers

format: $(DEV)  ## let ruff sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# models/ and guides/ are installed as bayesfed.models and bayesfed.guides. mypy and import-linter do
# not follow the editable installation's import hook, so they read a tree of links in the installed shape.
SHAPE = build/shape
.PHONY: shape
shape:
	@rm -rf $(SHAPE) && mkdir -p $(SHAPE)/bayesfed
	@cd $(SHAPE)/bayesfed && ln -s ../../../bayesfed/* ../../../models ../../../guides .

typecheck: $(DEV) shape  ## mypy over bayesfed, bayesfed.models and bayesfed.guides
	cd $(SHAPE) && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p bayesfed

layers: $(DEV) shape  ## import-linter: no import upward, no circles
	cd $(SHAPE) && PYTHONPATH=. $(BIN)/lint-imports --config ../../pyproject.toml --no-cache

docs: $(DEV)  ## build the documentation into docs/_build/html; warnings are errors
	@rm -rf docs/generated
	$(BIN)/python -m sphinx -j 2 -E -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

# OLDEST=1 takes the oldest versions that pyproject.toml allows, PYTHON another interpreter.
fresh: $(DEV)  ## install the wheel into a new environment with the newest dependencies, and run the README's lines
	rm -rf build/fresh && $(PYTHON) -m venv build/fresh
	$(BIN)/python -m build --no-isolation --wheel --outdir build/fresh/wheel . > build/fresh/build.log
	build/fresh/bin/python -m pip install --quiet $(if $(OLDEST),-c constraints-oldest.txt) "$$(echo build/fresh/wheel/*.whl)[datasets]"
	$(BIN)/python docs/readme.py --lines > build/fresh/lines.py
	build/fresh/bin/python build/fresh/lines.py

clean:  ## remove what the other targets made; the virtual environment stays
	rm -rf build dist ./*.egg-info docs/_build docs/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bayesfed models guides tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(RUN) $(DEV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[datasets]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(RUN) $@
