# Each target does its own set-up: it makes .venv and installs what the project's files name.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export UNIMETRIC_CACHE ?= $(CURDIR)/$(VENV)/cache

.PHONY: demo test check bench docs results browser clean

demo: $(VENV)/ready           ## train on letters, test on letters never seen
	$(BIN)/unimetric demo

test: $(VENV)/ready           ## every test; real pictures too where UNIMETRIC_DATA names them
	$(BIN)/python -m pytest -n 2

check: $(VENV)/ready          ## style, types, imports, every config and the papers' protocols
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/unimetric check src/unimetric/configs/*.toml src/unimetric/configs/studies/*.toml
	$(BIN)/python -m unimetric.studies.protocols

bench: $(VENV)/ready          ## side by side with the peers; prints ratios
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: $(VENV)/ready           ## write the pages that are generated
	$(BIN)/python -m unimetric.cli.catalogue > docs/papers.md
	$(BIN)/python -m tests.parity.table > docs/parity.md

results: $(VENV)/ready        ## write docs/results.md and its figures from results/*.json
	$(BIN)/python results/page.py

browser: $(VENV)/ready        ## a Chromium for the test of the report's page, where the machine has none
	command -v chromium-headless-shell chromium google-chrome \
	|| $(BIN)/playwright install --only-shell chromium \
	|| { apt-get update -qq && apt-get install -qqy --no-install-recommends chromium-headless-shell; }

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) runs
