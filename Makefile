PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core
# An install under the distribution's former name: every entry point would be there twice.
FORMER := $(VENV)/lib/python3*/site-packages/rookery-*.dist-info $(VENV)/lib/python3*/site-packages/_editable_impl_rookery.pth
# This version is a CPU build where no GPU is; others bring gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Set JOBS=0 to run the tests in one process.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test lint unit test-long test-agents test-engines engines agents test-cgroup2 setup peers tokenizers docker-engine podman ssh-server bench clean help

help:
	@echo "make demo    set up the little that is needed and run real rollouts, offline (DEMO_ARGS='-n 5 -k 2')"
	@echo "make test    set up, lint, type-check and run the tests, but for the long ones"
	@echo "make lint    ruff, mypy and the order of the rooms"
	@echo "make unit    the tests alone (ARGS='-k name' chooses)"
	@echo "make test-long  the tests that take many seconds each: thousands of boxes, of streams, of kills"
	@echo "make test-agents  Claude Code and Codex, from npm, in real boxes (slow: a gigabyte; RECORD=1 keeps what they send)"
	@echo "make test-cgroup2  the sandboxes' limits on cgroup v2: here, or in a guest kernel (ARGS='--kernel 6.12')"
	@echo "make peers   other systems under .peers/, for the benchmarks"
	@echo "make tokenizers  real tokenizers under .peers/, for the tests of chat formats and for the benchmarks"
	@echo "make engines  vLLM, llama.cpp and a small model, for the CPU (1.5 GB); make test-engines tests against them"
	@echo "make agents  real agents in the user's cache, for the tests of agents"
	@echo "make docker-engine  Docker's programs under .peers/, for the tests of containers (Debian, as root)"
	@echo "make podman  podman's programs under .peers/, for the tests of containers (Debian, as root)"
	@echo "make ssh-server  OpenSSH's programs under .peers/, for the tests of tunnels (Debian)"
	@echo "make bench   measure one part beside other systems (NAME=engine ARGS='--quick --json')"
	@echo "make clean   remove what make made"

demo: $(CORE)
	@$(BIN)/rookery demo $(DEMO_ARGS)

# Only what rookery itself needs; what `make test` installs holds it too.
$(CORE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rookery needs Python 3.11 or newer")'
	@if test $(STAMP) -nt pyproject.toml && test -x $(BIN)/rookery; then touch $(CORE); else \
		echo "setting up $(VENV), once" && \
		{ $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); } && \
		rm -rf $(FORMER) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . && touch $(CORE); fi

test: lint unit

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rookery needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf $(FORMER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[dev]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not long and not engines" $(ARGS)

# What proves by numbers: thousands of boxes and streams, kill -9 again and again. With `make test`, all there is.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m long $(ARGS)

# Real vLLM and llama.cpp with a real model, on the CPU. Not a part of `make test`: vLLM takes a minute to start.
test-engines: engines
	$(BIN)/python -m pytest -n 0 -m engines --timeout 900 tests/engines $(ARGS)

# Downloads about 1.5 GB once, into the user's cache.
engines: $(STAMP)
	$(BIN)/python tools/make_engines.py

# Not a part of `make test`: where this machine has no v2 controllers, it fetches and boots a kernel.
test-cgroup2: $(STAMP)
	$(BIN)/python tools/run_cgroup2.py $(ARGS)

# Not a part of `make test`: what it installs is large, and outside of Python's packages.
test-agents: $(STAMP)
	RECORD=$(RECORD) $(BIN)/python -m pytest \
		tests/environments/agent/npm_agents.py tests/environments/agent/npm_mcp.py $(ARGS)

# Quick once they are there, and without a call to the network.
agents: $(STAMP)
	$(BIN)/python -m rookery.environments.agent \
		openai-sdk anthropic-sdk openai-agents mini-swe-agent

# Quick, and without a call to the network, once they are there.
tokenizers: $(STAMP)
	$(BIN)/python tools/make_tokenizers.py

# Downloads once, installs nothing: the tests start an engine of their own from what is unpacked here.
docker-engine: $(STAMP)
	$(BIN)/python tools/make_peers.py engine

# Likewise, for those tests of containers that run on podman's service too.
podman: $(STAMP)
	$(BIN)/python tools/make_peers.py podman

# Likewise, for the tests of tunnels.
ssh-server: $(STAMP)
	$(BIN)/python tools/make_peers.py ssh

peers: $(STAMP)
	$(BIN)/python tools/make_peers.py

# Measures one part beside other systems: make bench NAME=engine ARGS='--quick --json'.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

clean:
	rm -rf $(VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
