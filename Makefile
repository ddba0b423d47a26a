# `make bench` and `make test` do everything from a clean clone.

# The environment that prepare.sh installs into: the active one, else .venv.
ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),.venv)
PYTHON := $(ENV)/bin/python

BENCH_DIR := runs/bench-$(shell date +%Y%m%d-%H%M%S)
TRAIN_DIR := runs/digits-$(shell date +%Y%m%d-%H%M%S)
# Small enough for two cores: a ResNet-18, 25 steps.
BENCH_FLAGS := --nproc_per_node=2 --model=resnet18 --image_size=96 --amp_level=O0 \
	--batch_size=8 --lr=1e-4 --max_steps=25 --warmup_steps=5 --log_interval=5 \
	--save_interval=0

.PHONY: help bench train test soak check dist prepare prepare-dev

help:
	@echo "make bench   train the baseline and both XLA engines on mock images, and compare"
	@echo "make train   train a small ResNet on scanned digits to its end, and show the curves"
	@echo "make test    run the tests"
	@echo "make soak    run the long ones, which make test leaves out"
	@echo "make check   ruff and mypy"
	@echo "make dist    a wheel and a source distribution in dist/"

prepare:
	@bash prepare.sh

prepare-dev:
	@bash prepare.sh --extras xla,dev --no-data

bench:
	@bash prepare.sh --extras xla,jax
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/ddp
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/xla --compiler-opt
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/jax --engine=jax
	@$(PYTHON) -m accbench report $(BENCH_DIR)/ddp $(BENCH_DIR)/xla $(BENCH_DIR)/jax

train:
	@bash prepare.sh --extras xla,digits --no-data
	$(PYTHON) -m accbench data digits
	$(PYTHON) launch_single_task.py --config=recipes/digits.yaml --output_dir=$(TRAIN_DIR)
	@$(PYTHON) -m accbench report $(TRAIN_DIR)
	@$(PYTHON) -m accbench report $(TRAIN_DIR) --format html >$(TRAIN_DIR)/report.html
	@echo "curves in $(TRAIN_DIR)/report.html"

# The tests start hundreds of Pythons, each of which would compile our modules anew.
COMPILED_ONCE := PYTHONDONTWRITEBYTECODE=

test: prepare-dev
	$(COMPILED_ONCE) $(PYTHON) -m pytest -m "not soak" -n 4 --dist loadfile --no-loadscope-reorder

soak: prepare-dev
	$(COMPILED_ONCE) $(PYTHON) -m pytest -m soak -n 2

check: prepare-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# Without isolation, so that no package index is asked.
dist: prepare-dev
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist .
	$(PYTHON) -m twine check --strict dist/*
