# Everything runs from a .venv in this folder. `make help` lists the targets.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.10 python3.13 python3,$(shell command -v $(name))))
# The release to work with; each has an environment, a build folder and a module of its own.
TORCH_XLA ?= 2.9.0
DEFAULT   := 2.9.0
RELEASES  := 2.8.1 2.9.0
$(if $(filter $(TORCH_XLA),$(RELEASES)),,$(error TORCH_XLA=$(TORCH_XLA) is not one of $(RELEASES)))
ONLY      := $(addprefix -,$(filter-out $(DEFAULT),$(TORCH_XLA)))
VENV      := .venv$(ONLY)
BUILD     := build$(ONLY)
MODULE    := torch_xla_donate/_built/torch_$(subst .,_,$(basename $(TORCH_XLA)))
REQUIRED  := requirements$(ONLY).txt
BIN       := $(VENV)/bin
# Gigabytes that the environment takes: torch for Linux comes with its CUDA libraries.
NEEDED := 9

export PJRT_DEVICE ?= CPU
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# Tests and benchmarks start hundreds of processes; without bytecode, each would compile the package.
unexport PYTHONDONTWRITEBYTECODE

# Two processes, the tests in random order. `make test PYTEST_ARGS="-n 1 -p no:randomly"` changes either.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations=20

.PHONY: help demo llama test support wheel test-fast test-all test-nightly test-upstream test-cpp coverage faults sanitize lint types tidy format bench bits bits-of-release soak release-check fuzz docs build env clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: build  ## train on real data with and without donation, and show what it saves
	$(BIN)/python examples/train_digits.py

test: build test-cpp  ## what guards every promise: C++ (ctest), then Python (pytest) without the long tests
	$(PYTEST) -m "not nightly" $(addprefix --record=,$(RECORD)) $(PYTEST_ARGS)

support:  ## `make test` on each release, and the table of docs/safety.md that says what passed
	for release in $(RELEASES); do \
		$(MAKE) test TORCH_XLA=$$release RECORD=test/results/torch_xla-$$release.json && $(BIN)/python test/support.py || exit 1; \
	done

test-fast: build  ## what an edit needs: the tests that start no process
	$(PYTEST) -m "unit or step" $(PYTEST_ARGS)

test-all: build $(VENV)/docs $(VENV)/upstream test-cpp  ## `make test`, then builds, benchmarks, soak and fuzz: hours. UPSTREAM=checkout of pytorch/xla
	$(PYTEST) --hypothesis-profile=long $(PYTEST_ARGS)
	$(MAKE) soak fuzz
	$(if $(UPSTREAM),$(MAKE) test-upstream,@echo "not run: the files of pytorch/xla; give UPSTREAM=a checkout of it")

test-nightly: build $(VENV)/docs $(VENV)/upstream  ## only the long tests: hours
	$(PYTEST) --hypothesis-profile=long -m nightly $(PYTEST_ARGS)

test-upstream: build $(VENV)/upstream  ## the files of UPSTREAM=a checkout of pytorch/xla, with automatic donation and without this package
	$(BIN)/python test/upstream/run.py $(UPSTREAM)

test-cpp: build  ## the C++ tests, which need no torch
	$(BIN)/cmake -B $(BUILD) -DTORCH_XLA_DONATE_BUILD_TESTS=ON > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	$(BIN)/cmake --build $(BUILD) | tail -n 1
	$(BIN)/ctest --test-dir $(BUILD) -j $$(nproc) --output-on-failure --no-tests=error

COUNTED := COVERAGE_FILE=$(CURDIR)/build-coverage/lines
# A build of its own: the module in the package stays as it is. pyproject.toml and gcovr.cfg say what counts as a line.
coverage: build  ## which of our Python and C++ lines `make test` runs; fails below 96% of either
	$(BIN)/cmake -S . -B build-coverage -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DTORCH_XLA_DONATE_OUTPUT=$(CURDIR)/build-coverage/module \
	  -DTORCH_XLA_DONATE_ASSERTIONS=ON -DTORCH_XLA_DONATE_COVERAGE=ON -DTORCH_XLA_DONATE_BUILD_TESTS=ON
	$(BIN)/cmake --build build-coverage
	find build-coverage -name '*.gcda' -delete; rm -rf build-coverage/lines*
	$(BIN)/ctest --test-dir build-coverage --output-on-failure --no-tests=error --quiet
	COVERED_MODULE=$$(echo $(CURDIR)/build-coverage/module/_C*.so) COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
	  PYTHONPATH=$(CURDIR)/test/line_coverage/startup:$(CURDIR) $(COUNTED) $(PYTEST) -q -m "not nightly" $(PYTEST_ARGS)
	$(COUNTED) $(BIN)/coverage combine -q
	$(COUNTED) $(BIN)/coverage report --include="$(CURDIR)/torch_xla_donate/*"; python=$$?; \
	$(BIN)/gcovr build-coverage && exit $$python

# A build of its own, whose linker sends operator new to test/faults/faults.cpp.
faults: build  ## fail each allocation of the hooks in turn, throw and interrupt in each phase of a step
	$(BIN)/cmake -S . -B build-faults -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DTORCH_XLA_DONATE_OUTPUT=$(CURDIR)/build-faults/module \
	  -DTORCH_XLA_DONATE_ASSERTIONS=ON -DTORCH_XLA_DONATE_FAULTS=ON > build/faults.log
	$(BIN)/cmake --build build-faults > build/faults.log || { cat build/faults.log; exit 1; }
	cd test && ../$(BIN)/python -m faults.run

# Separate builds, too. SANITIZE="thread --only step" runs a part of it.
sanitize: build  ## tests under AddressSanitizer, UBSan and ThreadSanitizer: hours. Needs GCC, x86-64 or arm64, and setarch
	$(BIN)/python test/sanitize/run.py $(SANITIZE)

lint: env  ## ruff, mypy, clang-format and clang-tidy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*/*.h csrc/*/*.cpp test/cpp/*.h test/cpp/*.cpp
	@$(MAKE) --no-print-directory --output-sync -j $$(nproc) types tidy

# Without its cache it keeps one processor busy for two minutes, so `make lint` runs it beside clang-tidy.
types: env  ## mypy; a part of `make lint`
	@$(BIN)/mypy

# One file includes all sources of a folder, so clang-tidy parses torch's headers once for each. GCC's precompiled headers
# are of no use to it.
TIDIED := $(patsubst csrc/%/,build-tidy/%.ok,$(dir $(wildcard csrc/*/*.cpp)))

tidy: $(sort $(TIDIED))  ## clang-tidy on csrc/, which .clang-tidy configures; a part of `make lint`

# CMake writes these files, so it must know of a new or deleted source.
SOURCES := $(sort $(wildcard csrc/*/*.cpp))
ifneq ($(SOURCES),$(shell cat build-tidy/sources 2> /dev/null))
.PHONY: build-tidy/compile_commands.json
endif

.SECONDEXPANSION:
build-tidy/%.ok: $$(wildcard csrc/$$*/*.cpp) $(wildcard csrc/*/*.h) .clang-tidy build-tidy/compile_commands.json
	@$(BIN)/clang-tidy --quiet -p build-tidy build-tidy/CMakeFiles/*.dir/Unity/unity_$*_cxx.cxx 2> $(@:.ok=.log) \
	  || { cat $(@:.ok=.log); exit 1; }
	@touch $@

build-tidy/compile_commands.json: $(VENV)/installed CMakeLists.txt third_party/torch.cmake third_party/query_torch.py
	@$(BIN)/cmake -S . -B build-tidy -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON > build-tidy.log 2>&1 \
	  || { cat build-tidy.log; exit 1; }
	@mv build-tidy.log build-tidy/cmake.log
	@echo $(SOURCES) > build-tidy/sources
	@touch $@

format: env  ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.h csrc/*/*.cpp test/cpp/*.h test/cpp/*.cpp

llama: build  ## compile Llama's step for TPUs that are not there: bytes per device. LLAMA="--all" for all of the docs
	$(BIN)/python examples/llama.py $(LLAMA)

# Of a module without the checks, as in a wheel. The next `make build` has them again.
bench: build  ## measure; prints tables, writes benchmarks/results/*.json and their numbers in README and docs
	rm $(VENV)/configured
	$(BIN)/cmake -B $(BUILD) -DTORCH_XLA_DONATE_ASSERTIONS=OFF > $(BUILD)/cmake.log || { cat $(BUILD)/cmake.log; exit 1; }
	$(BIN)/cmake --build $(BUILD) | tail -n 1
	$(BIN)/python benchmarks/run.py

bits: build  ## whether the examples compute the same bits with donation and without it, on each release
	for release in $(RELEASES); do $(MAKE) bits-of-release TORCH_XLA=$$release || exit 1; done
	$(BIN)/python benchmarks/write_docs.py

bits-of-release: build
	$(BIN)/python benchmarks/example_bits.py

soak: build  ## 50,000 mixed steps on eight devices; memory, registry and compilations must stay flat. SOAK="--steps 200000"
	$(BIN)/python benchmarks/soak.py $(SOAK)
	$(BIN)/python benchmarks/write_docs.py

# The list of CONTRIBUTING.md. Each part ends the run if it fails.
release-check:  ## all checks of a release: a day. Needs UPSTREAM=a checkout of pytorch/xla, and everything committed
	@test -n "$(UPSTREAM)" || { echo "give UPSTREAM=a checkout of pytorch/xla" >&2; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "commit first: results name the commit that was measured" >&2; exit 1; }
	$(MAKE) lint
	$(MAKE) support
	for release in $(or $(RELEASES),$(error RELEASES is empty)); do \
	  $(MAKE) test-nightly fuzz soak TORCH_XLA=$$release SOAK="--steps 200000" || exit 1; done
	$(MAKE) test-upstream
	$(MAKE) wheel
	$(MAKE) bits bench
	$(BIN)/python examples/llama.py --all
	$(BIN)/python benchmarks/write_docs.py --fresh
	$(MAKE) docs

FUZZ := cd test && ../$(BIN)/python -m fuzz.run --last ../build/last_program.txt
FOUR := CPU_NUM_DEVICES=4 XLA_FLAGS=--xla_force_host_platform_device_count=4

fuzz: build  ## 24,000 random programs in each way of donating, and 5,000 of automatic donation
	$(FUZZ) --kind states --programs 20000 --seed $$RANDOM
	$(FUZZ) --programs 4000 --seed $$RANDOM
	export $(FOUR); $(FUZZ) --kind states --programs 4000 --seed $$RANDOM --sharded
	export $(FOUR); $(FUZZ) --programs 1000 --seed $$RANDOM --sharded

wheel:  ## build and try the wheel, with a module for each release: dist/. WHEEL="--host 2.9.0=PYTHON" reuses an environment
	"$(PYTHON)" third_party/wheel.py $(WHEEL)

# Pictures, messages and docstrings come from the sources. The tool that formats signatures, ruff, is found in PATH.
docs: build $(VENV)/docs  ## build the site in out/site from docs/ and the code, and check its links
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m mkdocs build -f docs/site/mkdocs.yml
	@echo "out/site/index.html; for the search: $(BIN)/python -m http.server -b 127.0.0.1 -d out/site"

# Configured once, or when the CMake files change; ninja knows what else is out of date.
build: env $(VENV)/configured  ## compile what has changed
	@$(BIN)/cmake --build $(BUILD) > $(BUILD)/build.log 2>&1 || { cat $(BUILD)/build.log; exit 1; }

$(VENV)/configured: $(VENV)/installed CMakeLists.txt third_party/torch.cmake third_party/query_torch.py
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DTORCH_XLA_DONATE_OUTPUT=$(CURDIR)/$(MODULE) \
	  -DTORCH_XLA_DONATE_ASSERTIONS=ON
	@touch $@

# Without the bytecode of all packages, which takes two minutes. Python writes that of the modules that are imported.
env: $(VENV)/installed  ## install torch, torch_xla and the tools

$(VENV)/installed: $(REQUIRED) pyproject.toml
	@$(SHELL) third_party/preflight.sh "$(PYTHON)" $(NEEDED) "$(VENV)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing torch, torch_xla and the tools into $(VENV) (about $(NEEDED) GB, a few minutes) ..."
	$(BIN)/pip install -q --no-compile -r $(REQUIRED)
	$(BIN)/python third_party/dev_requirements.py | xargs -d '\n' $(BIN)/pip install -q --no-compile
	@printf '%s\n' "$(CURDIR)" "$(CURDIR)/torch_xla_donate/_pytest" > $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/torch_xla_donate_source.pth
	@touch $@

$(VENV)/docs $(VENV)/upstream: $(VENV)/%: $(VENV)/installed third_party/dev_requirements.py
	$(BIN)/python third_party/dev_requirements.py $* | xargs -d '\n' $(BIN)/pip install -q -c $(REQUIRED)
	@touch $@

clean:  ## remove what was built; keeps .venv
	rm -rf build build-* torch_xla_donate/_built .venv*/configured
