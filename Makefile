# A fresh Linux machine needs Python 3.11, make and a network; `make demo` and `make test` do the rest.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
TORCH := torch==2.13.0+cpu
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
NO_NETWORK := "Could not install. pip needs PyPI (or the index of your pip.conf), and for torch PyTorch's CPU index."

export OMP_NUM_THREADS := 1

.PHONY: setup demo test test-all check docs
.DELETE_ON_ERROR:

setup: .venv/.with-cpu  ## make .venv with everything that a run needs

demo: setup  ## train the quickstart's policy: about a minute
	$(BIN)/pivot-pipeline submit configs/quickstart.yaml --cluster local --wait

test: .venv/.with-test  ## run the tests but those marked slow
	$(BIN)/python -m pytest

test-all: .venv/.with-test  ## run all tests
	$(BIN)/python -m pytest -m "slow or not slow"

check: .venv/.with-test .venv/.with-dev docs  ## style, types, spelling, architecture, and the site
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m pytest tests/architecture tests/docs/test_site.py

docs: .venv/.with-dev  ## the documentation's site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "Python 3.11 is needed, and '$(PYTHON)' is not it: install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; \
	  exit 1; }
	$(PYTHON) -m venv .venv

# An unmarked torch is a CUDA build of several GB: the CPU build comes first, from wherever pip finds it.
.venv/.with-cpu: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) "$(TORCH)" 2>/dev/null || $(PIP) --index-url $(PYTORCH_CPU_INDEX) "$(TORCH)" || { echo $(NO_NETWORK); exit 1; }
	$(PIP) -c constraints.txt -e ".[cpu]" || { echo $(NO_NETWORK); exit 1; }
	@touch $@

.venv/.with-test .venv/.with-dev: .venv/.with-%: .venv/.with-cpu
	$(PIP) -c constraints.txt -e ".[cpu,$*]" || { echo $(NO_NETWORK); exit 1; }
	@touch $@
