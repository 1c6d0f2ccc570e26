PYTHON := .venv/bin/python
# what .venv is made with: make setup PYTHON3=python3.12
PYTHON3 ?= python3
# The tests that start no ranks. Those that do come after them: they wait for compiled ops.
FAST := $(PYTHON) -m pytest -n 3 --dist loadfile -m "not slow and not gpu and not multi_gpu and not processes"
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# make setup TORCH=cu126: another build of torch than the one that pip takes by itself (tools/make/torch_build.py)
export TORCH ?=

.PHONY: setup torch-build quickstart test test-slow test-gpu check

setup: torch-build .venv/ready

torch-build:
	@test -z "$$TORCH" || { $(PYTHON3) tools/make/make_venv.py --look && $(PYTHON3) tools/make/torch_build.py "$$TORCH"; }

.venv/ready: requirements.txt requirements-dev.txt pyproject.toml | torch-build
	@$(PYTHON3) tools/make/make_venv.py
	@echo "setting up .venv (one to three minutes, most of it downloads)"
	@date +%s > .venv/started
	DS_BUILD_OPS=0 $(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@echo "set up in $$(( $$(date +%s) - $$(cat .venv/started) )) s"
	@mv .venv/started $@

quickstart: setup
	$(PYTHON) tools/quickstart.py

test: setup
	$(FAST)
	$(PYTHON) -m pytest -m "not slow and not gpu and not multi_gpu and processes"

test-slow: setup
	$(PYTHON) -m pytest -m "slow and not gpu and not multi_gpu"

test-gpu: setup
	$(PYTHON) -m pytest -m "gpu or multi_gpu"

check: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright
	$(FAST)
