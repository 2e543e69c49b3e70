# Every target sets up .venv by itself the first time; after that set-up costs nothing.

PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# The libraries of the model tier; torch and the rest are seen in $(VENV).
MODELS_VENV := .venv-models
MODELS_PY := $(MODELS_VENV)/bin/python
MODELS_READY := $(MODELS_VENV)/.ready
MODELS_PIP := $(MODELS_PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --retries 2 --timeout 30

# One thread a process: the parallelism is in the processes.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(PY) -m pytest -q
UNCHECKED := $(if $(TYPES),,SHARDWISE_NO_BEARTYPE=1)
# Keep the output of parallel targets apart, where this make can.
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench conformance models docs clean lint types pure

help:
	@echo 'make demo    a transformer trained on eight virtual devices, in under a minute'
	@echo 'make check   lint, format, types and the pure tests: before each commit'
	@echo 'make test    all tests; those for a GPU are skipped where there is none'
	@echo 'make bench   measurements, as ratios to torch.distributed.tensor; BENCH=name for one'
	@echo 'make conformance  every operator against one device, all samples; writes docs/operators.md'
	@echo 'make models  models of other libraries against plain torch; writes docs/models.md; MODELS="--sample 8" for a few'
	@echo 'make docs    the documentation as a site, in site/index.html; needs no network'
	@echo 'make clean   remove caches and builds; the environment stays'

$(PY):
	$(PYTHON) -m venv $(VENV)

$(READY): requirements/dev.txt pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)
	$(PY) -m shardwise demo

check: $(READY)
	@$(MAKE) --no-print-directory -k -j2 $(SYNC) lint types pure

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m basedpyright

pure: $(READY)
	$(PYTEST) tests/pure

# Tests that stay in one process share the cores; those that start processes, or a process group here, run alone: some
# wait for limits of time. Folders rather than markers: nothing is collected twice. WITHOUT=pure leaves out what
# `make check` has just run. Annotations are checked at run time in the pure tier; in these that would double the time:
# TYPES=1 does it.
test: $(READY)
	$(UNCHECKED) $(PYTEST) -n 2 $(filter-out tests/$(WITHOUT),tests/pure tests/virtual src)
	$(UNCHECKED) $(PYTEST) tests/gloo tests/hosts tests/peer tests/gpu

bench: $(READY)
	$(PY) -m bench $(BENCH)

conformance: $(READY)
	$(TEST_ENV) $(PY) -m tests.virtual.conformance --write docs/operators.md $(CONFORMANCE)
	$(TEST_ENV) $(PY) -m tests.virtual.scaling --write docs/operators.md

# A package that cannot be installed is named, and its models are skipped.
$(MODELS_READY): requirements/models.txt $(READY)
	$(PY) -m venv $(MODELS_VENV)
	$(MODELS_PIP) -r requirements/models.txt || grep -v '^#' requirements/models.txt | while read package; do \
		$(MODELS_PIP) "$$package" || echo "not installed: $$package"; done
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(PY) -c "$$site" > "$$($(MODELS_PY) -c "$$site")/development.pth"
	@touch $@

models: $(MODELS_READY)
	PYTHONPATH=src $(TEST_ENV) $(MODELS_PY) -m tests.models $(or $(MODELS),--write docs/models.md)

# Offline and strict: a broken link, or a page that is not in the navigation, is an error. (--quiet would hide them.)
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'site/index.html; for the search: python3 -m http.server -d site'

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf
