# On a fresh machine: `make demo` and `make test`. Every target can be run repeatedly.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  ?= smollm2-135m
DEMO    = runs/demo-$(MODEL)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv demo test nightly lint unit shapes real chromium fuzz faults zoo bench docs tutorials gallery robustness architectures format wheel wheel-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name does; do \
		printf '  make %-12s %s\n' "$$name" "$$does"; done

venv: $(READY)  ## create the virtual environment, with posleak and its development tools

# The stamp is written last, so that a broken installation is tried again. Bytecode is compiled on all cores at once; some packages
# hold files for other versions of Python, which do not compile. torchao has a folder of its own, which one test adds to
# its path: where it is installed, transformers imports it into every process, and it prints warnings to stderr.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,docs,ray]'
	test -d $(VENV)/torchao || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--target $(VENV)/torchao 'torchao>=0.16,<0.19'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	touch $@

demo: $(READY)  ## download the default model, trace it, test every claim, and write a report
	$(BIN)/posleak trace $(MODEL) --out $(DEMO)
	$(BIN)/posleak claims $(MODEL) --out $(DEMO)
	$(BIN)/posleak doctor $(MODEL) --json > $(DEMO)/doctor.json || test $$? -eq 3
	$(BIN)/posleak report $(DEMO) --out $(DEMO)/report.html

test: lint unit shapes real  ## run everything that must pass

# Slow tests: long fuzzing, series of killed processes, all model families, the full tutorials.
nightly: test fuzz faults  ## run everything that must pass, then the slow tests; an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m nightly tests

lint: $(READY)  ## run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tests of the HTML page need a browser: chromium of Debian is installed if there is none and we are root.
chromium:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && test "$$(id -u)" = 0 \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
		|| echo "no chromium, and it cannot be installed here: tests of the page are skipped"

# The shapes in signatures are only checked in these folders: it makes them half as slow again.
SHAPED = tests/probe tests/edits tests/leakage tests/metrics $(wildcard tests/analyses/test_origin*.py) tests/analyses/test_doctor.py

# Unit tests use tiny random models and never the network. One thread each; a file's tests stay together, so that what they
# share is made once, and a third worker fills the time in which others wait for processes and a browser.
TINY = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -q \
	-m "not real and not nightly"

# The slowest files start first, so that none of them runs alone at the end.
LONGEST = $(patsubst %,tests/%.py,sweeps/test_sweep_faults reports/test_report_page runs/test_memory models/test_models_trust \
	cli/test_cli analyses/test_claims_folder repository/test_fuzz sweeps/test_sweep sweeps/test_collect)

unit: $(READY) chromium  ## run the tests on tiny models, offline, without those of `shapes`
	$(TINY) $(LONGEST) tests $(addprefix --ignore=,$(SHAPED))

shapes: $(READY)  ## run the tests of probe, edits, leakage, metrics and origin, with shapes checked at run time
	$(TINY) --jaxtyping-packages=posleak.probe,posleak.leakage,posleak.metrics,posleak.analyses.origin,beartype.beartype $(SHAPED)

# Two processes with a thread each: they use two cores better than two threads do, and hold some 4 GB. Tests of a group stay
# with one process, so that what they share is made once.
real: $(READY)  ## run the tests on real pretrained models, which are downloaded once
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -q -m "real and not nightly" \
		tests/real $(shell grep -l "mark.real" tests/*/test_*.py | grep -v tests/real/)

# Longer than in the tests; docs/reliability.md has the counts.
FUZZ ?= 5000
fuzz: $(READY)  ## read damaged and hostile files of every kind; FUZZ=N cases
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.fuzz --cases $(FUZZ) --seed $$(date +%s)

faults: $(READY)  ## kill processes at many points and resume them; ten minutes
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.kills measure=40 trace=20 claims=40 circuit=20

zoo: $(READY)  ## train and measure the whole zoo; one to two hours, resumable
	$(BIN)/python -m zoo train --all
	$(BIN)/python -m zoo measure

# The other tools have about forty dependencies, so that they are installed only here.
bench: $(READY)  ## measure the cost of posleak and of other tools; twenty minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs,ray,bench]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/repository/test_bench.py
	$(BIN)/python -m benchmarks $(MODEL)

# Warnings are errors, but not with --quiet, which drops them. The variable keeps the theme from printing its news.
docs: $(READY)  ## build the documentation in site/: open site/index.html, no server or network needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Outputs are stored, so that the site shows them without running models; tests run the tutorials in a lean form.
tutorials: $(READY)  ## run the tutorials and write the notebooks that the site shows; ten minutes
	$(BIN)/python -m tools.tutorials docs/tutorials

# Results are stored in runs/gallery and are not measured again.
gallery: $(READY) chromium  ## measure the built-in models and the zoo; generate gallery, pictures and claims; an hour
	$(BIN)/python -m tools.gallery docs/gallery --runs runs/gallery
	$(BIN)/python -m tools.question runs/gallery/smollm2-135m docs
	$(BIN)/python -m tools.claims_docs docs
	$(BIN)/python -m tools.pictures docs/gallery/smollm2-135m.html docs/gallery/zoo.html docs/images

# Finished traces are stored in runs/robustness and are not measured again.
robustness: $(READY)  ## trace models under many settings; generate docs/robustness.md and its figure; one to two hours
	$(BIN)/posleak sweep robustness --out runs/robustness
	$(BIN)/python -m tools.robustness runs/robustness docs

# Finished cells are stored in runs/ and are not measured again.
architectures: $(READY)  ## run the sweeps of docs/architectures.md and generate its tables; twenty minutes
	$(BIN)/python -m tools.architectures docs/architectures.md runs

format: $(READY)  ## format the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(READY)  ## build the source archive and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist

wheel-check: wheel  ## install the wheel into an empty environment and run it
	PYTHON=$(BIN)/python .ci/check-wheel dist/*.whl

clean:  ## remove generated files and the virtual environment; runs/ is kept
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
