# `make bench` and `make test` do everything from a clean clone.

# The environment that prepare.sh installs into: the active one, else .venv.
ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),.venv)
PYTHON := $(ENV)/bin/python
# That of torch_xla, which needs torch 2.8 and has wheels for one kind of machine.
XLA_PYTHON := $(if $(filter Linux x86_64,$(shell uname -sm)),.venv-xla/bin/python)
XLA_EXTRAS := xla-cuda12,dev

BENCH_DIR := runs/bench-$(shell date +%Y%m%d-%H%M%S)
TRAIN_DIR := runs/digits-$(shell date +%Y%m%d-%H%M%S)
# Small enough for two cores: a ResNet-18, 25 steps.
BENCH_FLAGS := --device=cpu --nproc_per_node=2 --model=resnet18 --image_size=96 --amp_level=O0 \
	--batch_size=8 --lr=1e-4 --max_steps=25 --warmup_steps=5 --log_interval=5 \
	--save_interval=0

.PHONY: help bench bench-xla train test test-oldest soak check dist prepare prepare-dev prepare-xla prepare-test

help:
	@echo "make bench   train the baseline and the compiled engines on mock images on the CPU, and compare"
	@echo "make bench-xla   the baseline and engine xla, in torch_xla's own environment"
	@echo "make train   train a small ResNet on scanned digits to its end, and show the curves"
	@echo "make test    run the tests, with today's torch and JAX, and engine xla's in its environment"
	@echo "make test-oldest   all of them with torch_xla's torch, the oldest that is taken"
	@echo "make soak    run the long ones, which make test leaves out"
	@echo "make check   ruff and mypy"
	@echo "make dist    a wheel and a source distribution in dist/"

prepare:
	@bash prepare.sh

prepare-dev:
	@$(COMPILED_ONCE) bash prepare.sh --extras dev --no-data

# torch_xla's environment, for its own tests.
prepare-xla:
	@$(if $(XLA_PYTHON),$(COMPILED_ONCE) bash prepare.sh --extras $(XLA_EXTRAS) --no-data)

bench: prepare
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/ddp
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/inductor --engine=inductor
	$(PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/jax --engine=jax
	@$(PYTHON) -m accbench report $(BENCH_DIR)/ddp $(BENCH_DIR)/inductor $(BENCH_DIR)/jax

# The same through torch_xla, in its own environment, beside a baseline of the same torch.
bench-xla:
	@bash prepare.sh --extras xla
	$(XLA_PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/ddp
	$(XLA_PYTHON) launch_single_task.py $(BENCH_FLAGS) --output_dir=$(BENCH_DIR)/xla --compiler-opt
	@$(XLA_PYTHON) -m accbench report $(BENCH_DIR)/ddp $(BENCH_DIR)/xla

train:
	@bash prepare.sh --extras jax,digits --no-data
	$(PYTHON) -m accbench data digits
	$(PYTHON) launch_single_task.py --config=recipes/digits.yaml --output_dir=$(TRAIN_DIR)
	@$(PYTHON) -m accbench report $(TRAIN_DIR)
	@$(PYTHON) -m accbench report $(TRAIN_DIR) --format html >$(TRAIN_DIR)/report.html
	@echo "curves in $(TRAIN_DIR)/report.html"

# The tests start hundreds of Pythons, each of which would compile our modules anew. Of what is
# installed they import a third, and the rest need not be compiled.
COMPILED_ONCE := PYTHONDONTWRITEBYTECODE= UV_COMPILE_BYTECODE=0

# More processes where tests wait for others, fewer where they compute.
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder

prepare-test: prepare-dev prepare-xla

# Compiles what tests import, which else each of pytest's processes does for itself.
COMPILE := -m pytest --collect-only -q >/dev/null

# Those of today's torch and JAX, then engine xla's in its own environment where that can be.
test: prepare-test
	@[ -d tests/__pycache__ ] || { $(if $(XLA_PYTHON),$(COMPILED_ONCE) $(XLA_PYTHON) $(COMPILE) &) $(COMPILED_ONCE) $(PYTHON) $(COMPILE); wait; } || true
	$(COMPILED_ONCE) $(PYTHON) $(PYTEST) -n 4 -m "not soak and not xla"
	$(if $(XLA_PYTHON),$(COMPILED_ONCE) $(XLA_PYTHON) $(PYTEST) -n 3 -m "not soak and xla")

# All with the oldest torch that is taken, which is torch_xla's.
test-oldest: prepare-xla
	$(COMPILED_ONCE) $(XLA_PYTHON) $(PYTEST) -n 4 -m "not soak"

soak: prepare-test
	$(COMPILED_ONCE) $(PYTHON) -m pytest -m "soak and not xla" -n 2
	$(if $(XLA_PYTHON),$(COMPILED_ONCE) $(XLA_PYTHON) -m pytest -m "soak and xla" -n 2)

check: prepare-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# Without isolation, so that no package index is asked.
dist: prepare-dev
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist .
	$(PYTHON) -m twine check --strict dist/*
