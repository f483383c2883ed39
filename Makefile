# make reproduce [SEEDS=3] [ALL=1]   train the experiments and make the reports
# make test                          lessons and tests, under 10 minutes on two cores
# make check                         everything CI does
# make bench                         benchmarks; alone on an idle machine
# make gpu-check                     is this GPU fit? at most 8 minutes
# make pages                         the published pages anew from their results
# PYTHON=python3.12 chooses the interpreter, VENV=path the environment.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 1
ALL ?=
BIN = $(VENV)/bin

.PHONY: reproduce test check bench gpu-check pages
.DELETE_ON_ERROR:

reproduce: $(VENV)/.has-report
	$(BIN)/shohin reproduce --seeds $(SEEDS) $(if $(ALL),--all)

# pytest comes last, so that its closing line is the last line
test: $(VENV)/.has-dev
	OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nbdev_test --n_workers 2
	OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n 2

check:
	PYTHON=$(PYTHON) bash .ci/run

bench: $(VENV)/.has-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m benchmark -s tests/bench_*.py

gpu-check: $(VENV)/.has-report
	$(BIN)/python scripts/gpu_check.py

pages: $(VENV)/.has-report
	$(BIN)/python -c 'from shohin.report import build_site; from shohin.reproduce import EXPERIMENTS, GUIDES; build_site([], "reports/results", "reports", EXPERIMENTS, GUIDES)'

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit("shohin needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "python cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo '*' >$(VENV)/.gitignore
	@touch $@

# $(1): extras. pip's output goes to a log, which is shown if it fails.
define install
	@echo "Installing pinned packages into $(VENV): up to 3 minutes ($(VENV)/install.log)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]' >$(VENV)/install.log 2>&1 \
	  || { tail -n 30 $(VENV)/install.log; echo "The installation failed: see $(VENV)/install.log"; exit 1; }
	@touch $@
endef

$(VENV)/.has-report: constraints.txt pyproject.toml | $(VENV)/.python
	$(call install,train$(comma)report)

$(VENV)/.has-dev: constraints.txt pyproject.toml | $(VENV)/.python
	$(call install,dev)

comma := ,
