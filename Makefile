# The two commands: `make serve` and `make test`. Everything else is for those who work on the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := locks/cpu.txt
STAMP := $(VENV)/.installed
CONFIG ?= deployments/conflux.yaml

.PHONY: serve test test-fast test-chaos lint setup model chart dashboards prometheus lock clean

serve: setup model
	@exec $(BIN)/conflux serve $(CONFIG)

setup: $(STAMP)

# torch comes first and with its own dependencies, whichever build the index offers; the rest is the exact lock.
# vLLM's own requirements are left out on purpose: on a CPU it imports none of the GPU packages it declares.
$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --progress-bar on "$$(grep '^torch==' $(LOCK))"
	$(BIN)/python -m pip install --quiet --progress-bar on --no-deps --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

model: setup
	$(BIN)/python -c 'from conflux_ray.models import store; print(store.model_dir(store.SMOLLM2))'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint prometheus
	$(BIN)/python -m pytest -m "not gpu"

# The tests of dashboards and alerts ask a real Prometheus (Debian's package); where there is none they skip and say so.
prometheus:
	@command -v promtool >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends prometheus || true; \
	else echo "no prometheus here, and no root to install it: tests of dashboards and alerts will skip"; fi

# Two instances under random faults for some ten to fifteen minutes; SEED chooses which.
SEED ?= 0
test-chaos: setup
	$(BIN)/python -m tests.e2e.chaos --streams 200 --faults 16 --seed $(SEED)

# Planning, KV and configuration: neither torch nor vLLM is imported.
test-fast: setup
	$(BIN)/python -m pytest -m "not gpu and not heavy" tests/planning tests/kv tests/config

# Writes dashboards/*.json and docs/metrics.md anew; `make chart` takes copies of them.
dashboards: setup
	$(BIN)/python -m dashboards
	$(BIN)/python -m conflux_ray.metrics.document

# Writes the chart's schema, tables of values and copies of dashboards and alerts anew.
chart: setup
	$(BIN)/python helm/generate.py

# Writes both locks anew from their .in files. Needs uv.
lock:
	sh locks/make.sh

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
