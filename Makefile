# Two commands for a fresh machine: `make demo` and `make test`. Both do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-long test-gpu test-faults test-fuzz test-diloco lint unit browser triton bench clean

demo: $(INSTALLED)
	$(BIN)/headway demo

test: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(INSTALLED) browser
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slow' tests

# For the tests of the dashboard. Where it cannot be installed they are skipped and say why; with
# HEADWAY_NEEDS_BROWSER set, as in CI, they fail.
browser:
	@command -v chromium >/dev/null || ./.ci/install-chromium || \
		echo 'no chromium: the tests of the dashboard in a browser cannot run'

# For the tests of the GPU's kernels on a CPU (700 MB). Beside the packages, not among them: torch
# would load it in every process. CUDA builds of torch bring it.
triton: $(INSTALLED)
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ -d $(VENV)/triton/triton ] || \
		$(PIP) --no-deps --target $(VENV)/triton triton

# The tests that take longest, beside those of `make test`.
test-long: $(INSTALLED) browser
	$(BIN)/python -m pytest -m slow tests

# All tests that need a CUDA device, for a machine that has one; results are in benchmarks/results.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -n 4 --dist loadfile -m gpu tests

# The proofs in full size, about an hour; the results add to benchmarks/results/faults-<date>.md.
test-faults: $(INSTALLED)
	$(BIN)/python benchmarks/faults.py

# Fuzzed requests and a flood of them at a control server beside training, about ten minutes; the
# results add to benchmarks/results/control-fuzz-<date>.md.
test-fuzz: $(INSTALLED)
	$(BIN)/python benchmarks/control_fuzz.py

# Hostile requests to a DiLoCo server, kills of servers and of workers, about ten minutes; the results
# add to benchmarks/results/diloco-faults-<date>.md.
test-diloco: $(INSTALLED)
	$(BIN)/python benchmarks/diloco_faults.py

# The stamp is newer than what it was made from, so a second run installs nothing.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

bench: $(INSTALLED)
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache
