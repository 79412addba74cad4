# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

# One thread a worker: tests run one worker a core, and sums keep their order. Nothing is fetched from a hub.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.PHONY: help venv demo finetune-demo test test-slow check format bench docs api hooks clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(READY)  ## .venv with the package (editable), its extras and the dev group

# pip 25.1 is the first that knows dependency groups. opencv-python needs libGL, which a server may lack; its headless
# build is the same cv2 without windows, so it is laid over a cv2 that cannot load, in the same version.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[hf,viz,demo]' --group dev
	$(BIN)/python -c 'import cv2' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps --force-reinstall \
	  "opencv-python-headless==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("opencv-python"))')"
	$(BIN)/python -c 'import cv2, torch, visionpos'
	touch $@

demo: $(READY)  ## the tour: retrofit, resize, a VLM stream, two pictures in demo_out/
	$(BIN)/python examples/demo.py --output demo_out

finetune-demo: $(READY)  ## a fine-tune at a new resolution on real photos, some minutes on two cores, into demo_out/finetune
	$(BIN)/python examples/finetune_demo.py --output demo_out/finetune

test: $(READY)  ## tests and doctests, without the slow ones
	$(PYTEST) -n $(WORKERS) --dist worksteal

test-slow: $(READY)  ## the slow tests alone
	$(PYTEST) -n $(WORKERS) --dist worksteal -m slow

check: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict visionpos/
	$(BIN)/lint-imports --no-logo

format: $(READY)  ## rewrite files as `make check` wants them
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

bench: $(READY)  ## paired ratios against named peers
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.rotation
	$(BIN)/python -m benchmarks.bias
	$(BIN)/python -m benchmarks.attention_bias
	$(BIN)/python -m benchmarks.sequence
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.ids
	$(BIN)/python -m benchmarks.position_log
	$(BIN)/python -m benchmarks.audit
	$(BIN)/python -m benchmarks.import_cost

docs: $(READY)  ## rewrite docs/dialects.md from configs/dialects/
	$(BIN)/python -c 'import sys; from visionpos.dialects import markdown; sys.stdout.write(markdown())' > docs/dialects.md

api: $(READY)  ## rewrite tests/api.json from the package; say why in CHANGELOG.md
	$(BIN)/python -m tests.test_api --write

hooks: $(READY)  ## run the checks of .pre-commit-config.yaml before every commit
	$(BIN)/pre-commit install

clean:  ## remove caches and outputs, keep .venv
	rm -rf demo_out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find visionpos tests examples benchmarks -name __pycache__ -prune -exec rm -r {} +
