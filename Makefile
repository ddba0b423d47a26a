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
BENCH_FLAGS := --nproc_per_node=2 --model=resnet18 --image_size=96 --amp_level=O0 \
	--batch_size=8 --lr=1e-4 --max_steps=25 --warmup_steps=5 --log_interval=5 \
	--save_interval=0

.PHONY: help bench bench-xla train test test-today soak check dist prepare prepare-dev prepare-xla prepare-test

help:
	@echo "make bench   train the baseline and the compiled engines on mock images, and compare"
	@echo "make bench-xla   the baseline and engine xla, in torch_xla's own environment"
	@echo "make train   train a small ResNet on scanned digits to its end, and show the curves"
	@echo "make test    run the tests, in torch_xla's environment, which has every engine"
	@echo "make test-today   those of today's torch and JAX"
	@echo "make soak    run the long ones, which make test leaves out"
	@echo "make check   ruff and mypy"
	@echo "make dist    a wheel and a source distribution in dist/"

prepare:
	@bash prepare.sh

prepare-dev:
	@bash prepare.sh --extras dev --no-data

# torch_xla's environment, for its own tests.
prepare-xla:
	@$(if $(XLA_PYTHON),bash prepare.sh --extras $(XLA_EXTRAS) --no-data)

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

# The tests start hundreds of Pythons, each of which would compile our modules anew.
COMPILED_ONCE := PYTHONDONTWRITEBYTECODE=

PYTEST := -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# torch_xla's environment has every engine; where it cannot be, today's has all but one.
TEST_PYTHON := $(or $(XLA_PYTHON),$(PYTHON))
prepare-test: $(if $(XLA_PYTHON),prepare-xla,prepare-dev)

test: prepare-test
	$(COMPILED_ONCE) $(TEST_PYTHON) $(PYTEST) -m "not soak"

# All but engine xla's, with today's torch and JAX.
test-today: prepare-dev
	$(COMPILED_ONCE) $(PYTHON) $(PYTEST) -m "not soak and not xla"

soak: prepare-test
	$(COMPILED_ONCE) $(TEST_PYTHON) -m pytest -m soak -n 2

check: prepare-test
	$(TEST_PYTHON) -m ruff format --check .
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m mypy

# Without isolation, so that no package index is asked.
dist: prepare-test
	rm -rf dist
	$(TEST_PYTHON) -m build --no-isolation --outdir dist .
	$(TEST_PYTHON) -m twine check --strict dist/*
