# `make demo` and `make test` need nothing before them: both set the project up first, once.

SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
# Written last, so a set-up that broke off half way has none and is done again.
STAMP := .venv/.complete
MYPY_TARGETS := $(wildcard *.py ci/*.py vla_finetuning diagnostics benchmarks)
# Extra arguments for the target's command: make test ARGS="-k lock"
ARGS ?=

.PHONY: help setup metaworld peers openpi demo grpo recap test test-demo test-gate test-faults test-slow golden mutants lint docs format lock notebook smoke demo-clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Python 3.12 and the locked packages, in .venv

# Without this rule's file (no .venv, or its base Python was removed) the stamp does not count.
$(PYTHON): ;

$(STAMP): requirements.lock .python-version ci/setup.sh $(PYTHON)
	@sh ci/setup.sh $@

metaworld: $(STAMP) ## Meta-World's 50 tasks for --env.type metaworld, in .venv; as root also what Debian needs to draw
	@PYTHON=$(PYTHON) sh ci/metaworld.sh

demo: $(STAMP) ## fine-tune a tiny PI0.5 on this machine and show that it learned
	$(PYTHON) vla.py --preset demo $(ARGS)

grpo: $(STAMP) ## have the tiny PI0.5 learn from success alone what its demonstrators did wrong
	$(PYTHON) grpo.py --preset demo $(ARGS)

recap: $(STAMP) ## have the tiny PI0.5 learn from failures, without a simulator while it trains
	$(PYTHON) -m benchmarks.recap $(ARGS)

test: $(STAMP) ## the tests of ten minutes, in two processes
	$(PYTHON) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

test-demo: $(STAMP) ## README.ipynb with all the demo's steps, and what it learned
	$(PYTHON) -m pytest -m demo $(ARGS)

test-gate: $(STAMP) ## what the gate runs after make test: the demo's tests and the dearer ones
	$(PYTHON) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "demo or gate" $(ARGS)

test-faults: $(STAMP) ## every fault test, the slow ones too; what each cost is in outputs/faults.xml
	$(PYTHON) -m pytest -m faults --junitxml=outputs/faults.xml -o junit_family=xunit1 $(ARGS)

test-slow: $(STAMP) ## every slow test, for hours
	$(PYTHON) -m pytest -m slow $(ARGS)

golden: $(STAMP) ## small runs, bit for bit those of HEAD, or of HEAD~1 where nothing is changed
	$(PYTHON) -m tests.golden $(ARGS)

mutants: $(STAMP) ## how many small changes of the core modules their tests notice (ARGS="--sample 40 --seed 3 util")
	$(PYTHON) ci/mutants.py $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy, measures of the layout
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(if $(MYPY_TARGETS),$(PYTHON) -m mypy $(MYPY_TARGETS))
	$(PYTHON) ci/house.py

docs: $(STAMP) ## write docs/flags.md and docs/lerobot_train.md from their tables
	$(PYTHON) -m vla_finetuning.options.command_line > docs/flags.md
	$(PYTHON) -m vla_finetuning.options.lerobot_train > docs/lerobot_train.md

format: $(STAMP) ## what ruff can mend by itself
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lock: $(STAMP) ## compile requirements.lock (ARGS=--upgrade for newer indirect packages)
	$(PYTHON) -m uv pip compile --quiet --universal --python-version "$$(cat .python-version)" --generate-hashes \
		--custom-compile-command "make lock" $(ARGS) --output-file requirements.lock requirements.txt
	$(PYTHON) -m uv pip compile --quiet --universal --python-version "$$(cat .python-version)" --generate-hashes \
		--custom-compile-command "make lock" $(ARGS) --constraints requirements.lock \
		--output-file requirements-metaworld.lock requirements-metaworld.txt
	$(PYTHON) -m uv pip compile --quiet --universal --python-version "$$(cat .python-version)" --generate-hashes \
		--custom-compile-command "make lock" $(ARGS) --constraints requirements.lock \
		--output-file requirements-peers.lock requirements-peers.txt
	$(PYTHON) -m uv pip compile --quiet --no-deps --universal --python-version "$$(cat .python-version)" --generate-hashes \
		--custom-compile-command "make lock" $(ARGS) --output-file requirements-openpi.lock requirements-openpi.txt

peers: $(STAMP) ## what benchmarks.data compares with and nothing else needs
	$(PYTHON) -m pip install --no-deps --require-hashes -r requirements-peers.lock

openpi: $(STAMP) ## openpi's client, which the tests of serve.py connect
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-openpi.lock

notebook: $(STAMP) ## README.ipynb from top to bottom, a few steps, into outputs/smoke_notebook
	@PYTHON=$(PYTHON) bash ci/smoke_notebook.sh

smoke: $(STAMP) ## a few steps by `python vla.py` and by `ray job submit`, into outputs/smoke_job
	@PYTHON=$(PYTHON) bash ci/smoke_job.sh

demo-clean: ## remove what the demo wrote
	rm -rf outputs/demo outputs/grpo outputs/recap .cache/demo
