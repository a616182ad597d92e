PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core
# Installation under a former distribution name, which would register every entry point twice.
FORMER := $(VENV)/lib/python3*/site-packages/rookery-*.dist-info $(VENV)/lib/python3*/site-packages/_editable_impl_rookery.pth
# This version has a CPU build; others install gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# Set JOBS=0 to run the tests in one process.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Long tests spend a third of their time waiting, so two workers for each processor keep it busy.
LONG_JOBS ?= $(shell echo $$(($(JOBS) * 2)))

.PHONY: demo test lint unit chromium viewer check-viewer test-viewer test-long test-agents test-engines test-trainers engines trainers agents downloads test-cgroup2 setup docs peers tokenizers docker-engine podman ssh-server prometheus kubectl wandb bench learn clean help

help:
	@echo "make demo    install the core dependencies and run a demonstration, offline (DEMO_ARGS='-n 5 -k 2')"
	@echo "make test    install, lint, type-check and run the tests, except the long ones"
	@echo "make lint    ruff, mypy and the import order of the packages"
	@echo "make unit    the tests alone (ARGS='-k name' chooses)"
	@echo "make test-long  the tests that take a second or more each, up to thousands of sandboxes, streams and kills"
	@echo "make viewer  build the page of rookery view with npm; make test-viewer checks the build and tests it in Chromium"
	@echo "make test-agents  Claude Code and Codex from npm, in real sandboxes (downloads 1 GB; RECORD=1 stores their requests)"
	@echo "make test-cgroup2  the sandboxes' limits on cgroup v2: here, or in a guest kernel (ARGS='--kernel 6.12')"
	@echo "make peers   install other systems under .peers/, for the benchmarks"
	@echo "make engines  vLLM, llama.cpp and a small model, for the CPU (1.5 GB); make test-engines tests against them"
	@echo "make test-trainers  other trainers (verl, ...) in virtual environments of their own, and the tests of their adapters"
	@echo "make downloads  what tests need besides Python packages: all of the following"
	@echo "make agents  real agents in the user's cache, for the tests of agents"
	@echo "make docker-engine  Docker's programs under .peers/, for the tests of containers (Debian, as root)"
	@echo "make podman  podman's programs under .peers/, for the tests of containers (Debian, as root)"
	@echo "make ssh-server  OpenSSH's programs under .peers/, for the tests of tunnels (Debian)"
	@echo "make prometheus  Prometheus under .peers/, for the tests of metrics (Debian)"
	@echo "make kubectl  kubectl under .peers/, for the tests of pods (Debian)"
	@echo "make tokenizers  real tokenizers under .peers/, for the tests of chat formats and for the benchmarks"
	@echo "make wandb   Weights & Biases under .peers/, for the test of its logger"
	@echo "make bench   run a benchmark (NAME=engine ARGS='--quick --json')"
	@echo "make learn   train the embedded policy for 15 minutes and draw its learning curve (ARGS='--seed 1')"
	@echo "make docs    build the documentation site into build/site"
	@echo "make clean   remove everything that make created"

demo: $(CORE)
	@$(BIN)/rookery demo $(DEMO_ARGS)

# Packages are compiled when they are imported: the 26,000 files of all of them take over a minute.
# Only the core dependencies. The installation of `make test` includes them.
$(CORE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rookery needs Python 3.11 or newer")'
	@if test $(STAMP) -nt pyproject.toml && test -x $(BIN)/rookery; then touch $(CORE); else \
		echo "setting up $(VENV), once" && \
		{ $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); } && \
		rm -rf $(FORMER) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e . && touch $(CORE); fi

test: lint unit

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rookery needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf $(FORMER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH) -e '.[dev]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not long and not engines and not viewer" $(ARGS)

# Tests with thousands of sandboxes, streams and SIGKILLs. Together with `make test` these are all tests.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(LONG_JOBS) --dist loadfile --no-loadscope-reorder -m long $(ARGS)

# Builds the page of `rookery view`, which is committed so that users need no Node.
viewer:
	cd viewer && npm ci --silent --no-audit --no-fund --ignore-scripts && npm run --silent build

# Fails if the committed page is not what its source builds, byte for byte.
check-viewer:
	cd viewer && npm ci --silent --no-audit --no-fund --ignore-scripts && npm run --silent check && \
		npx vite build --logLevel warn --outDir ../build/viewer
	diff -r build/viewer src/rookery/view/static

# The page in a real browser.
test-viewer: chromium check-viewer
	$(BIN)/python -m pytest -n 0 -m viewer --timeout 300 tests/view $(ARGS)

# Debian's Chromium, unpacked into the user's cache.
chromium: $(STAMP)
	$(BIN)/python tools/make_peers.py chromium

# Real vLLM and llama.cpp with a real model, on the CPU. Not part of `make test`: vLLM takes a minute to start.
test-engines: engines
	$(BIN)/python -m pytest -n 0 -m engines --timeout 900 tests/engines $(ARGS)

# Other trainers, each in its own virtual environment in the user's cache. Not part of `make test`: their packages are
# large, and their versions of torch, transformers and Ray conflict with the project's.
test-trainers: $(STAMP)
	$(BIN)/python tools/make_trainers.py --test $(ARGS)

# Installs the trainers without testing the adapters.
trainers: $(STAMP)
	$(BIN)/python tools/make_trainers.py $(ARGS)

# Downloads about 1.5 GB once, into the user's cache.
engines: $(STAMP)
	$(BIN)/python tools/make_engines.py

# Not part of `make test`: on a machine without cgroup v2 it downloads and boots a kernel.
test-cgroup2: $(STAMP)
	$(BIN)/python tools/run_cgroup2.py $(ARGS)

# What tests would otherwise miss. Everything is unpacked into the user's cache.
downloads: tokenizers agents docker-engine podman ssh-server prometheus kubectl wandb

# Not part of `make test`: it installs large packages from npm.
test-agents: $(STAMP)
	RECORD=$(RECORD) $(BIN)/python -m pytest tests/environments/agent/npm_agents.py $(ARGS)

# Fast and offline once the agents are installed.
agents: $(STAMP)
	$(BIN)/python -m rookery.environments.agent \
		openai-sdk anthropic-sdk openai-agents mini-swe-agent

# Fast and offline once the tokenizers are downloaded.
tokenizers: $(STAMP)
	$(BIN)/python tools/make_tokenizers.py

# Downloads once and installs nothing: the tests start their own engine from the unpacked programs.
docker-engine: $(STAMP)
	$(BIN)/python tools/make_peers.py engine

# The same for Podman.
podman: $(STAMP)
	$(BIN)/python tools/make_peers.py podman

# The same for OpenSSH, for the tests of tunnels.
ssh-server: $(STAMP)
	$(BIN)/python tools/make_peers.py ssh

# The same for Prometheus, for the tests of metrics.
prometheus: $(STAMP)
	$(BIN)/python tools/make_peers.py prometheus

# The same for kubectl, for the tests of pods.
kubectl: $(STAMP)
	$(BIN)/python tools/make_peers.py kubectl

# The same for Weights & Biases, for the test of its logger.
wandb: $(STAMP)
	$(BIN)/python tools/make_peers.py wandb

peers: $(STAMP)
	$(BIN)/python tools/make_peers.py

# Run a benchmark: make bench NAME=engine ARGS='--quick --json'.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

# Trains the embedded policy on arithmetic, with sandboxed tool calls, on the CPU.
learn: $(STAMP)
	$(BIN)/rookery train --config tools/learn.toml --plot $(ARGS)

# Builds the documentation site into build/site, offline. A broken link fails the build.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
