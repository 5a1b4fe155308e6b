# Needs Python >= 3.11, git and the network to the package index; everything else goes into .venv.

PYTHON ?= python3
ARGS ?=
# As many workers as cores, each at least of 0.6 GB; a worker that has no tests left takes over some of another's.
WORKERS ?= -n logical --maxprocesses 8 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_PACKAGE := $(VENV)/.installed-package
INSTALLED_DOCS := $(VENV)/.installed-docs
BENCHMARKS := $(filter-out benchmarks/_% benchmarks/clients.py benchmarks/cuda.py benchmarks/beside_llama.py,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test check lint types docs package bench clean

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "core needs Python 3.11 or newer, and $(PYTHON) is not: run make PYTHON=/path/to/a/newer/python" >&2; exit 1; }
	@echo "Installing into $(VENV), which takes minutes the first time: torch is large"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '$(1)'
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,.)
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(INSTALLED) $@

$(INSTALLED_PACKAGE): pyproject.toml constraints.txt
	$(call install,.[package])
	@touch $(INSTALLED) $@

$(INSTALLED_DOCS): pyproject.toml constraints.txt
	$(call install,.[docs])
	@touch $(INSTALLED) $@

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## a cluster on this machine that answers a prompt; make demo ARGS="--help" shows its options
	@$(BIN)/core demo $(ARGS)

test: lint types ## all that CI runs: lint, types, tests; make test ARGS="-k plan" picks tests
	@$(BIN)/python -m pytest $(or $(ARGS),$(WORKERS))

check: lint types ## lint, types, and the tests that are not slow: about a minute
	@$(BIN)/python -m pytest $(WORKERS) -m "not slow"

lint: $(INSTALLED_DEV) ## ruff: lint and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED_DEV) ## mypy, strict, as on each of the platforms
	@$(MAKE) --no-print-directory -j 2 $(addprefix types-on-,linux win32 darwin)

types-on-%:
	@$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$*

docs: $(INSTALLED_DOCS) ## the pages as a site that needs no network, in build/site; every link is checked
	@$(BIN)/python docs/_commands.py
	@rm -rf build/pages
	@mkdir -p build/pages/plugins
	@cp -R docs README.md CONTRIBUTING.md CHANGELOG.md build/pages
	@cp plugins/README.md build/pages/plugins
	@$(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml
	@echo "build/site/index.html"

package: $(INSTALLED_PACKAGE) ## the tray app as a folder that needs no Python, in dist/, and proof that it serves
	@$(BIN)/pyinstaller --noconfirm --log-level WARN packaging/core-node.spec
	@$(BIN)/python packaging/smoke.py dist/core-node/core-node

bench: $(INSTALLED_DEV) ## the scripts in benchmarks/ that need no GPU and no other engine: each prints the figures that it measured
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
