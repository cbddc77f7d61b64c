# Each target does its own set-up: .venv/base has what the library needs, .venv/ready also the tools of developers.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export UNIMETRIC_CACHE ?= $(CURDIR)/$(VENV)/cache

# Tests of what most edits touch: components, formulas, configuration, layers. They train nothing.
QUICK := tests/geometry tests/losses tests/miners tests/metrics tests/splits tests/test_spec.py tests/test_config.py \
         tests/test_files.py tests/test_architecture.py --deselect tests/geometry/test_rerank.py \
         --deselect tests/geometry/test_space.py::test_hits_that_do_not_fit_are_searched_again_and_agree

# Benchmarks that need no index, run or images.
BENCHMARKS := losses growth objectives samplers evaluation start step crt shift universal stores indexing export embedding stages

.PHONY: demo quick test newest check style types configs studies wheel bench docs results browser clean

demo: $(VENV)/base            ## train on characters, test on characters that were not trained on
	$(BIN)/unimetric demo

quick: $(VENV)/ready          ## the tests to run between edits
	$(BIN)/python -m pytest -n 2 $(QUICK)

test: $(VENV)/ready           ## every test; real images too if UNIMETRIC_DATA is set
	$(BIN)/python -m pytest -n 2 --dist worksteal

newest:                       ## the tests with the newest version of every package, in another environment
	rm -f .newest/ready
	$(MAKE) VENV=.newest PIP='.newest/bin/pip install --quiet --disable-pip-version-check --upgrade' .newest/ready
	.newest/bin/python -m pytest -n 2 --dist worksteal --ignore tests/compat  # its values depend on the version of torch

check: style types configs studies ## style, types, imports, every config and the papers' protocols; `make -j2 check` is faster

style: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m unimetric.cli.stubs --check

types: $(VENV)/ready
	$(BIN)/mypy

configs: $(VENV)/ready
	$(BIN)/unimetric check --build src/unimetric/configs/*.toml

studies: $(VENV)/ready
	$(BIN)/unimetric check --build src/unimetric/configs/studies/*.toml
	$(BIN)/python -m unimetric.studies.protocols
	$(BIN)/python -m unimetric.studies.coverage --check

wheel: $(VENV)/ready          ## build a wheel, install it into another environment, and run the tour there
	.ci/wheel

bench: $(VENV)/ready          ## compare speed with other libraries; prints ratios
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

docs: $(VENV)/ready           ## write the generated pages, and build the site into site/
	$(BIN)/python -m unimetric.cli.stubs
	$(BIN)/python -m tests.parity.table > docs/parity.md
	$(BIN)/python -m unimetric.studies.coverage
	$(BIN)/python docs/site.py
	$(BIN)/zensical build --strict --clean

results: $(VENV)/ready        ## write docs/results.md, docs/speed.md and their figures from results/*.json
	$(BIN)/python results/page.py

browser: $(VENV)/ready        ## install Chromium for the test of the report, if the machine has none
	command -v chromium-headless-shell chromium google-chrome \
	|| $(BIN)/playwright install --only-shell chromium \
	|| { apt-get update -qq && apt-get install -qqy --no-install-recommends chromium-headless-shell; }

# Python compiles the modules that it imports; pip would compile all of them, which takes a third of its time.
$(VENV)/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile -e .
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $(VENV)/base $@

clean:
	rm -rf $(VENV) .newest runs build site
