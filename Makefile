# Each target makes .venv if it is not there, installs what it needs, and runs. A stamp per extra keeps the second time quick.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
OLDEST_VENV ?= .venv-oldest
OLDEST ?= $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]/\1.0/p' pyproject.toml)
ASAN_FLAGS ?= $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mfma)
export OMP_NUM_THREADS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py src/khot/kernels/native/*)

.PHONY: demo explore dist test test-browser test-oldest slow fuzz asan neon bench docs tables lint format clean

demo: $(VENV)/.demo  ## learn which pixels to look at; draws khot-demo.png
	$(BIN)/khot demo $(ARGS)

explore: $(VENV)/.explore  ## a local page to drag scores, k and tau; make explore ARGS="--open"
	$(BIN)/khot explore $(ARGS)

test: $(VENV)/.dev  ## laws, oracles, layers, doctests, the README's code
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-browser: $(VENV)/.browser  ## the explorer and the site in Debian's Chromium, which is installed if it is not there; ten minutes at most
	@command -v chromedriver >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	OMP_NUM_THREADS=1 timeout 600 $(BIN)/python -m pytest -p no:cacheprovider $(wildcard tests/browser/check_*.py) $(ARGS)

test-oldest:  ## the same on the oldest torch that pyproject.toml asks for: an OLDEST_VENV that has it, or a new one (about 3 GB)
	@$(OLDEST_VENV)/bin/python -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '$(OLDEST)')" 2>/dev/null \
	  || { $(PYTHON) -m venv $(OLDEST_VENV) && $(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	       "torch==$(OLDEST)" "numpy<2.3" -e ".[dev]"; } \
	  || { echo "skipped: torch $(OLDEST) cannot be installed here"; exit 0; } \
	  && PYTHONPATH=src OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

slow: $(VENV)/.dev  ## the long tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow $(ARGS)

fuzz: $(VENV)/.dev  ## hostile rows through every method, for minutes: make fuzz ARGS="--seconds 600 --seed 3"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

asan:  ## the native kernel under AddressSanitizer and UndefinedBehaviorSanitizer
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -Wno-psabi -DKHOT_ISA=base $(ASAN_FLAGS) \
	  $(wildcard src/khot/kernels/native/*.cpp) tests/kernels/check.cpp -o build/check -ldl -lpthread
	./build/check

neon:  ## the same program for aarch64, in emulation: needs aarch64-linux-gnu-g++ and qemu-aarch64
	mkdir -p build
	aarch64-linux-gnu-g++ -std=c++17 -O2 -static -Wno-psabi -DKHOT_ISA=base \
	  $(wildcard src/khot/kernels/native/*.cpp) tests/kernels/check.cpp -o build/check-aarch64 -ldl -lpthread
	qemu-aarch64 build/check-aarch64

bench: $(VENV)/.bench  ## make bench ARGS="speed --quick"
	$(BIN)/python -m bench $(ARGS)

dist: $(VENV)/.dist  ## sdist and wheels in dist/, checked; aarch64 where its compiler is (g++-aarch64-linux-gnu, qemu-user)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.dist $(ARGS)

docs: $(VENV)/.docs  ## the site, in site/
	$(BIN)/python -m khot.tables --check README.md docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m tools.links site

tables: $(VENV)/.torch-and-khot  ## write the registry's tables into README.md and docs/
	$(BIN)/python -m khot.tables README.md docs

lint: $(VENV)/.dev  ## what continuous integration checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site *.egg-info src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that the pinned build is there before anything asks for "some torch".
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch (once)"
	$(PIP) torch
	@touch $@

$(VENV)/.torch-and-khot: $(SOURCES) $(VENV)/.torch
	$(PIP) -e .
	@touch $@

# khot is built once; an extra of a khot that is there installs only what it adds.
$(VENV)/.demo $(VENV)/.explore $(VENV)/.browser $(VENV)/.dist $(VENV)/.bench $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch-and-khot
	@echo "installing khot[$*] (once)"
	$(PIP) "khot[$*]"
	@touch $@ $(if $(filter dev,$*),$(VENV)/.demo $(VENV)/.bench $(VENV)/.explore)  # dev holds those three
