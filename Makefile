# The two commands of the README, and what a developer runs. Each starts from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= cpu,demo,test
ARGS ?=

.PHONY: install demo test lint format chaos soak long-run clean
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; PYTHON=python3.11 make … chooses one"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time) …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -U 'pip>=25' 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' > $(VENV)/install.log 2>&1 || { tail -20 $(VENV)/install.log; exit 1; }
	@touch $(STAMP)

demo: install
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/ckn-scale demo $(ARGS)

test: install
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

# Random kills of actors, nodes and drivers; some minutes. ARGS="--kills 20 --seed 1" for less, or again.
chaos: install
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/chaos.py $(ARGS)

# A server asked for ten minutes while its run changes and its replicas are killed. ARGS="--minutes 2" for less.
soak: install
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests $(BIN)/python tests/serving/soak.py $(ARGS)

# A hundred thousand images from plan to publish, watched; half an hour. ARGS="--images 5000" for less.
long-run: install
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt matplotlib
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/long_run.py $(ARGS)

lint: install
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo-out dist build
