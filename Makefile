# make demo   install, fetch the default model, generate with speculation, compare with plain decoding
# make test   install, lint, check types, run the whole suite (what CI runs)
#
# A machine without a GPU gets a CPU build of torch through PIP_EXTRA_INDEX_URL: see README.md, "Try it".

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_MODEL ?= smollm2-135m
BENCH_ARGS ?= --methods plain,ngram,transformers,transformers-static,prompt_lookup
LOWEST_TRANSFORMERS = 5.17.0

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DEMO_PROMPT ?= "Give me a short recipe for a tomato soup, with a list of ingredients."
# dspark where its drafter comes with specc; n-gram drafts need none.
DEMO_METHOD ?= $(if $(wildcard specc/shipped/$(BENCH_MODEL)/dspark/*),dspark,ngram)
SOURCES = $(wildcard specc passes backends tests examples)

.PHONY: venv demo test pytest lint format types test-lowest bench clean
.DEFAULT_GOAL := test

venv: $(STAMP)

# Reinstalled when what to install changes; code changes need nothing, the install is editable.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "specc needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The first run fetches the model (93 MB) and compiles: some minutes. The table takes about two more.
demo: venv
	$(BIN)/specc run $(BENCH_MODEL) --method $(DEMO_METHOD) --max-length 512 --max-new-tokens 96 --prompt $(DEMO_PROMPT)
	$(BIN)/specc bench $(BENCH_MODEL) --methods plain,$(DEMO_METHOD),transformers --repeats 3 --max-new-tokens 48

# Lint and types come first: they take seconds, and pytest's closing line stays last.
test: lint types pytest

# Most of the time is tracing, which is one Python thread: a process per core, whole files to each.
PYTEST_WORKERS ?= 2
pytest: venv
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: venv
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# mypy does not see through package-dir: it checks a copy laid out as it installs.
types: venv
	rm -rf build/typecheck
	mkdir -p build/typecheck
	cp -R specc build/typecheck/specc
	cp -R passes build/typecheck/specc/passes
	cp -R backends build/typecheck/specc/backends
	cd build/typecheck && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p specc

# The lowest transformers that pyproject.toml allows, in a venv of its own. Its hub client is an older one.
test-lowest:
	mkdir -p build
	sed -e 's/^transformers==.*/transformers==$(LOWEST_TRANSFORMERS)/' -e '/^huggingface_hub==/d' \
		constraints.txt > build/constraints-lowest.txt
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check \
		-c build/constraints-lowest.txt -e '.[dev]'
	$(VENV)-lowest/bin/python -m pytest -m 'not slow and not real_model' $(PYTEST_ARGS)

bench: venv
	$(BIN)/specc bench $(BENCH_MODEL) $(BENCH_ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
