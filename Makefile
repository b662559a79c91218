# Everything runs in a virtual environment of the project's own, .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo setup test test-slow test-all check format bench drill soak clean wheels-gpu test-gpu bench-gpu

help:
	@echo "make demo      set everything up and train real handwritten digits on 2 processes"
	@echo "make test      set everything up and run the tests (no network or GPU needed once set up)"
	@echo "make test-all  the slow ones too"
	@echo "make check     format, lint, types, import layers, sizes and words (scripts/ratchet.py)"
	@echo "make bench     measure beside other tools, DATA=FOLDER with mnist/ and imagenet-sample/ (see bench/__main__.py)"
	@echo "make drill     the tests of each fault in docs/experiments/faults.md, or of one: ROW=14"
	@echo "make soak      faults on three hosts of this machine, MINUTES=30 KILLS=50 LAUNCHES=100 (needs root), and in saving"
	@echo "make test-gpu  what must hold on an accelerator, with the torch of PYTHON (see docs/guides/gpu-results.md)"

demo: $(VENV)/.package
	$(BIN)/manyhands train -n 2

setup: $(READY)

# Tests start hundreds of processes, each of which would compile the package anew where the shell forbids to keep that.
test test-slow test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" --timeout 300 -n 2 --dist worksteal

# The slow ones wait more than they compute: three at once still leave a sixth of two cores idle.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 600 -n 3 --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest --timeout 600 -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check src tests scripts bench
	$(BIN)/ruff check src tests scripts bench
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python scripts/ratchet.py

format: $(READY)
	$(BIN)/ruff format src tests scripts bench
	$(BIN)/ruff check --fix src tests scripts bench

# The other tools have an environment of their own, which takes torch from ours: the same one, so that they compare.
PEERS := .venv-peers
DATA ?= ../shared/data
ROUNDS ?= 5

bench: $(READY) $(PEERS)/.ready
	$(BIN)/python -m bench --data $(DATA) --peers $(PEERS)/bin/python --rounds $(ROUNDS)

$(PEERS)/.ready: $(VENV)/.package
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch_of_ours.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check accelerate lightning
	-$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check mindspore
	@touch $@

# The tests that docs/experiments/faults.md names for each fault; ROW=14 runs those of one row.
ROW ?= [0-9]*

drill: $(READY)
	$(BIN)/python -m pytest --timeout 600 -v \
		$$(grep '^| $(ROW) |' docs/experiments/faults.md | grep -o 'tests/[^`]*\.py[^`]*' | sort -u)

# Faults for a long time on three hosts of this machine: needs root, iproute2, nftables and sshd. What was found lies in SOAKED.
MINUTES ?= 30
KILLS ?= 50
LAUNCHES ?= 100
SAVES ?= 200
SOAKED ?= build/soak

soak: $(READY)
	mkdir -p $(SOAKED)
	$(BIN)/python -m tests.faults.soak_saves kills --count $(SAVES) --json $(SOAKED)/saves.json
	$(BIN)/python -m tests.faults.soak faults --minutes $(MINUTES) --json $(SOAKED)/faults.json
	$(BIN)/python -m tests.faults.soak kills --count $(KILLS) --json $(SOAKED)/kills.json
	$(BIN)/python -m tests.faults.soak launches --count $(LAUNCHES) --json $(SOAKED)/launches.json

# For a machine with an accelerator, which may have no network: its torch stays as it is, and no environment is made.
DEVICE ?= auto
PYTHON_VERSION ?= $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
MACHINE ?= x86_64
WHEELS ?= build/wheels-gpu

wheels-gpu:
	$(PYTHON) scripts/gpu_wheels.py $(WHEELS) --python-version $(PYTHON_VERSION) --machine $(MACHINE)

test-gpu:
	$(PYTHON) -m tests.gpu --device $(DEVICE) --wheels $(WHEELS)

bench-gpu:
	$(PYTHON) -m tests.gpu --bench --device $(DEVICE) --wheels $(WHEELS)

clean:
	rm -rf $(VENV) $(PEERS)

# The package alone is enough for the demo; the tests' tools come on top. An edition of torch that is there already, such
# as the one for CPUs, stays.
$(VENV)/.package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null && grep -v "^torch" constraints.txt >$(VENV)/constraints.txt || cp constraints.txt $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e .
	@touch $@

$(READY): $(VENV)/.package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev'])")
	@touch $@
