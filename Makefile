# Every target does its own set-up, in .venv: `make demo` and `make test` work in a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# What pip would do on one core; files that are no Python of this version stay as they are, and large packages of which
# a few modules are used at most are compiled where these are imported.
RARE := /(azure|dask/(array|bag|dataframe)|fontTools|google|matplotlib|moto|mypyc?|networkx|pip|pygments|sympy/(physics|stats)|tests?|torch/(_inductor|ao|onnx|testing)|transformers/models)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true

.PHONY: demo test test-all fuzz check docs bench compatibility fixtures clean

demo: $(VENV)/.runtime
	$(BIN)/python examples/demo.py

# Three workers for two cores: some wait for ranks, servers and clocks.
test: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

test-all: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not cuda" --hypothesis-profile nightly

# Every reader, each its part of TIME seconds; what is found, and what it goes on from the next time, is in build/fuzz.
TIME ?= 60
fuzz: $(VENV)/.development
	$(BIN)/python -m tests.fuzz.run --time $(TIME)

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The site, in build/docs. A dead link, or a page in no place, is an error.
docs: $(VENV)/.development
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Each says itself whether its targets hold; one that misses does not keep the others from running.
bench: $(VENV)/.development
	-$(BIN)/python bench/table.py
	-$(BIN)/python bench/copier.py
	-$(BIN)/python bench/consolidate.py
	-$(BIN)/python bench/reshard.py
	-$(BIN)/python bench/pipeline.py
	-$(BIN)/python bench/diff.py
	-$(BIN)/python bench/zero_redundancy.py
	-$(BIN)/python bench/zero_optimizer.py
	-$(BIN)/python bench/training.py
	-$(BIN)/python bench/any_world_size.py
	-$(BIN)/python bench/durable_saves.py
	-$(BIN)/python bench/spare.py
	-$(BIN)/python bench/rank_files.py
	-$(BIN)/python bench/plan_scale.py
	-$(BIN)/python bench/scale.py
	-$(BIN)/python bench/map.py
	-$(BIN)/python bench/average.py
	-$(BIN)/python bench/low_bit.py
	-$(BIN)/python bench/to_megatron.py
	-$(BIN)/python bench/remote.py
	-$(BIN)/python bench/cold_start.py
	-$(BIN)/python bench/limits.py

# Each version of each program is installed in bench/cache and removed after its cells; they run one after the other.
compatibility: $(VENV)/.development
	$(BIN)/python bench/compatibility.py

fixtures: $(VENV)/.development
	$(BIN)/python fixtures/generate.py --output fixtures/generated

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[train]'
	$(COMPILE)
	touch $@

# All at once: pip resolves, and what has come is compiled, a single time.
$(VENV)/.development: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[train,demo,test,interop,check]'
	$(COMPILE)
	touch $(VENV)/.runtime $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo bench/cache fixtures/generated
