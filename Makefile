# make demo    set up and run the main job: MuJoCo on the CPU
# make test    set up and run the tests (without `slow` and `gpu`)
# make slow    the slow tests
# make soak    an hour of steps, restarts and kills (ARGS=--minutes=10 for less)
# make check   format, lint, types
# make test-pythons    a fast subset on the oldest and the newest supported Python, where they are
# make clean   remove what the above made
#
# PYTHON=...             the host's Python (3.10 or newer)
# OUTBOARD_PYTHON38=...  the Python 3.8 that workers are tested with
# ARGS=...               passed on to pytest

MAKEFLAGS += --no-print-directory
.PHONY: demo test slow soak check test-pythons clean
.DEFAULT_GOAL := demo

BIN := .venv/bin
PYTEST := -m pytest -q $(ARGS)
# Everything that needs no long set-up and no simulator but `fake`.
FAST := $(wildcard $(addprefix tests/test_,codec.py layout.py states.py messages.py channel.py \
	device_identity.py deadline.py golden.py doorbell.py shm.py backend.py visibility.py rank_plan.py \
	verdict.py imports.py cli.py))

demo:
	@.ci/setup demo
	@$(BIN)/outboard run --backend mujoco --scene humanoid29 --num-envs 64 --steps 300 --ranks 2 \
		--devices cpu,cpu

test:
	@.ci/setup test
	@$(BIN)/python $(PYTEST) -m "not slow and not gpu"

slow:
	@.ci/setup test
	@$(BIN)/python $(PYTEST) -m "slow and not gpu"

soak:
	@.ci/setup test
	@$(BIN)/python benchmarks/soak.py $(ARGS)

check:
	@.ci/setup test
	@.ci/setup check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/pyright

test-pythons:
	@.ci/setup pythons
	@for python in .venv-310/bin/python .venv-313/bin/python; do \
		if [ -x $$python ]; then \
			$$python $(PYTEST) -m "not slow and not gpu" -p no:cacheprovider $(FAST) || exit 1; \
		fi; \
	done

clean:
	@rm -rf .venv .venv-worker38 .venv-mjwarp .venv-310 .venv-313 build dist *.egg-info .pytest_cache .ruff_cache \
		.hypothesis .cache
	@find ipc workers backends tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
