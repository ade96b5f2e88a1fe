# The commands of this project. Each does all of its own set-up: a virtual environment in .venv, Debian packages where a
# test needs a real server.
# Programs run as users run them: with what a developer may have set, one that ended badly on a full disk ended well.
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLUGIN_STAMP := $(VENV)/.installed-plugins
TEST_STAMP := $(VENV)/.installed-tests
SITE_STAMP := $(VENV)/.installed-site
DISTS := -e protos -e policies -e agents -e coordinator -e 'cli[local,top]' -e simulator
FORMER_DISTS := shoal shoal-agent shoal-coordinator shoal-policies shoal-protos shoal-simulator
PYPROJECTS := pyproject.toml constraints.txt $(wildcard */pyproject.toml)
WORKERS ?= 2
LINK ?= grpc
SIMULATED := .simulation.log
IMAGES := etcd mosquitto prometheus agent coordinator operator
# Of all platforms, as docker-library/repo-info records it (repos/debian/remote/bookworm-20260918-slim.md).
BASE ?= debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
WHEELS := dist/wheels/.made
ARCH ?= $(shell uname -m)
PYTHON_OF_ARCH ?= 3.11
COMPILED ?=
COMPILED_DISTS := dist/compiled/.made
COMPILED_LIST := dist/compiled/.files
COMPILING := dist/compiling/.made
AS_COMPILED = SHOAL_COMPILED=yes $(call ATTEMPT,$(1),$(abspath dist/compiled/protos):$(abspath dist/compiled/agents):tests)
# Where the distributions are that may be compiled.
THEIRS = $(if $(COMPILED),dist/compiled,.)
FOREIGN = $(if $(filter-out $(shell uname -m),$(ARCH)),--python-version $(PYTHON_OF_ARCH) $(foreach each,2_17 2_27 2_28,--platform manylinux_$(each)_$(ARCH)) --platform manylinux2014_$(ARCH))
ONCE = -q --durations=15 --durations-min=1
PYTEST = $(BIN)/python -m pytest $(ONCE)
# In phase $(1), with modules of $(2); the few that fail are played once more by themselves, and named in flaky.txt when
# they pass.
ATTEMPT = PYTHONPATH=$(or $(2),tests) $(BIN)/python -m harness.flaky $(1) $(ONCE)

.DEFAULT_GOAL := help
.PHONY: always help packages dev demo test test-simulation test-integration test-together test-alone test-long test-compose test-containers test-compiled compiled own-kind wheels lock images push bundle lint words types protos docs site dashboards assets bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python $(PYPROJECTS)
	@# An environment from before they were renamed would have every part, and its entry points, twice.
	$(BIN)/pip uninstall -qq --disable-pip-version-check --yes $(FORMER_DISTS)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(DISTS)
	@# Models and a page that come inside wheels; only their files are needed, so their dependencies are left out.
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt rapidocr-onnxruntime scikit-image
	touch $@

# Plugin providers, for the processors that they are made for. What QNN's depends on is for tools that are not used.
$(PLUGIN_STAMP): $(STAMP) requirements-plugins.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt -r requirements-plugins.txt
	touch $@

$(TEST_STAMP): $(PLUGIN_STAMP) requirements-test.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -r requirements-test.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt magika silero-vad
	touch $@

$(SITE_STAMP): $(STAMP) requirements-docs.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -r requirements-docs.txt
	touch $@

packages:
	@tests/packages.sh

dev: $(TEST_STAMP) ## an environment to work in: .venv with every part installed in place

demo: $(PLUGIN_STAMP) ## the whole story on this machine, on real models, in about two minutes (LINK=mqtt: over Mosquitto)
	$(BIN)/shoal demo --link $(LINK)

test: $(TEST_STAMP) packages ## unit, contract, simulation and integration tests; what the rows of faults and attacks showed
	rm -f report.json flaky.txt
	$(call ATTEMPT,unit) tests/unit tests/contract tests/fuzz -n $(WORKERS) --dist loadscope
	$(MAKE) --no-print-directory -j 2 test-simulation test-integration
	PYTHONPATH=tests $(BIN)/python -m harness.report

# Simulated time waits for nobody, and real processes mostly wait: the simulation takes what they leave of the cores, and
# no more, beside the tests that run alone, too. It may get nothing until these have begun. Its output comes when it has
# ended.
test-simulation: $(TEST_STAMP)
	@tests/idle.sh $(PYTEST) tests/simulation -n $(WORKERS) --dist worksteal --timeout 3600 >$(SIMULATED) 2>&1; \
	status=$$?; cat $(SIMULATED); exit $$status

test-integration: ## real processes: what judges no times two at a time, then the others one by one
	$(MAKE) --no-print-directory test-together
	$(MAKE) --no-print-directory test-alone

test-together: $(TEST_STAMP) packages
	$(call ATTEMPT,together) tests/integration -m "not long and not alone" -n $(WORKERS) --dist loadscope --no-loadscope-reorder

test-alone: $(TEST_STAMP) packages
	$(call ATTEMPT,alone) tests/integration -m "not long and alone"

test-long: $(TEST_STAMP) packages ## the unscaled runs: minutes of real time each; and what is played in part, wholly
	$(PYTEST) tests -m long
	SHOAL_PLANS_EVERY=1 $(PYTEST) tests/unit/coordinator/core -n $(WORKERS) --dist loadscope

# For the Python of the images' Debian; with another one here, pip asks its registry while they are built.
$(WHEELS): $(STAMP) $(wildcard deploy/images/wheels-*.sha256)
	rm -rf dist/wheels && mkdir -p dist/wheels
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	    $(BIN)/pip wheel -q --disable-pip-version-check -w dist/wheels -c constraints.txt \
	        ./protos ./policies './agents[cpu]' ./coordinator ./cli hatchling && rm -f dist/wheels/shoal*.whl && \
	    deploy/images/verify.sh dist/wheels; \
	fi
	touch $@

wheels: $(WHEELS) $(if $(COMPILED),$(COMPILED_DISTS)) ## Shoal's own wheels in dist/shoal (COMPILED=yes: the transport compiled for this machine's kind); in dist/wheels what images install with them, so that they ask no registry
	rm -rf dist/shoal
	cd $(THEIRS) && $(abspath $(BIN))/pip wheel -q --disable-pip-version-check --no-deps -w $(CURDIR)/dist/shoal ./protos ./agents
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist/shoal ./policies ./coordinator ./cli ./simulator

compiled: $(COMPILED_DISTS) ## in dist/compiled: the transport, the data plane and what a worker runs for a request, compiled for this machine's kind

# Copies of the distributions whose modules can be compiled, compiled in place, one C compiler at a time.
$(COMPILED_DISTS): $(TEST_STAMP) $(COMPILED_LIST)
	$(BIN)/python deploy/compiled/build.py dist/compiled
	touch $@

# All that the copies hold, and what makes them, by name and content: what is compiled holds constants of what is not, too.
$(COMPILED_LIST): always
	@mkdir -p $(@D) && find protos agents deploy/compiled -type d \( -name __pycache__ -o -name build -o -name '*.egg-info' \) -prune \
	    -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum >$@.now && { cmp -s $@.now $@ && rm $@.now || mv $@.now $@; }

always:

# The suites of what is compiled, against it; `test_compiled.py` fails where Python would be tested instead.
test-compiled: $(COMPILED_DISTS) ## the suites of the transport, the data plane and workers with their modules compiled
	rm -f flaky.txt
	$(call AS_COMPILED,compiled) -n $(WORKERS) --dist loadscope \
	    tests/unit/host tests/unit/http2 tests/unit/types tests/unit/wire tests/unit/agent/core tests/unit/agent/dataplane tests/unit/agent/worker tests/contract/transport tests/contract/dataplane \
	    $(foreach each,worker_runs worker_serves worker_lifecycle,tests/integration/worker/test_$(each).py) \
	    $(foreach each,frames http2,'tests/fuzz/test_a13_fuzz.py::test_a13_five_thousand_inputs[$(each)]')
	$(call AS_COMPILED,compiled-alone) tests/integration/worker/test_batching.py
	@test ! -e flaky.txt || sed 's/^/only at a second attempt: /' flaky.txt

# What compiles inside an image, for its Python as above.
$(COMPILING): $(STAMP) deploy/compiled/requirements.txt $(wildcard deploy/images/wheels-*.sha256)
	rm -rf dist/compiling && mkdir -p dist/compiling
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	    $(BIN)/pip wheel -q --disable-pip-version-check -w dist/compiling -c constraints.txt -r deploy/compiled/requirements.txt && \
	    deploy/images/verify.sh dist/compiling; \
	fi
	touch $@

lock: ## after a change of constraints.txt: the hashes of what the images install, as its registry gives it today
	$(MAKE) --no-print-directory $(WHEELS) || test -n "$$(ls dist/wheels)"
	$(MAKE) --no-print-directory $(COMPILING) || test -n "$$(ls dist/compiling)"
	cd dist && sha256sum wheels/*.whl compiling/*.whl | sed 's:  .*/:  :' | LC_ALL=C sort -u -k 2 >../deploy/images/wheels-$$(uname -m).sha256

images: $(WHEELS) $(if $(COMPILED),$(COMPILING)) ## all images, shoal/NAME, for docker-compose.yml; by digest in dist/images.yml (COMPILED=yes: as of wheels)
	@base=$$(deploy/images/base.sh $(BASE)) || exit 1; for image in $(IMAGES); do \
	    docker build -q --network host --build-arg BASE=$$base --build-arg PIP_INDEX_URL --build-arg PIP_EXTRA_INDEX_URL --build-arg COMPILED=$(COMPILED) \
	        -f deploy/images/Dockerfile --target $$image -t shoal/$$image . && \
	    deploy/images/bill.sh shoal/$$image >dist/$$image.bill || exit 1; \
	done
	@docker image ls --filter 'reference=shoal/*'
	@$(BIN)/python deploy/images/pin.py

push: $(STAMP) ## the images to a registry (REGISTRY=registry.example); by digest in dist/images.yml and dist/images for kustomize
	@test -n "$(REGISTRY)" || { echo "found: no REGISTRY; wanted: where to push; try: make push REGISTRY=registry.example (USAGE)" >&2; exit 2; }
	@for image in $(IMAGES); do \
	    docker tag shoal/$$image $(REGISTRY)/shoal/$$image && docker push -q $(REGISTRY)/shoal/$$image || exit 1; \
	done
	@$(BIN)/python deploy/images/pin.py $(REGISTRY)

# Third-party wheels are those of constraints.txt; ours are made here. For a machine of another kind: its processor, and
# the minor version of its Python.
bundle: $(if $(COMPILED),own-kind) $(STAMP) $(if $(COMPILED),$(COMPILED_DISTS)) ## dist/shoal-device-ARCH.tar: install.sh, units and all wheels, for machines without a package index (ARCH=aarch64; or COMPILED=yes, as of wheels)
	rm -rf dist/bundle && mkdir -p dist/bundle/shoal-device/wheels
	cd $(THEIRS) && $(abspath $(BIN))/pip wheel -q --disable-pip-version-check --no-deps -w $(CURDIR)/dist/bundle/shoal-device/wheels ./protos ./agents
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist/bundle/shoal-device/wheels ./policies ./coordinator
	cd dist/bundle/shoal-device/wheels && $(abspath $(BIN))/pip download -q --disable-pip-version-check \
	    --only-binary=:all: -c $(abspath constraints.txt) $(FOREIGN) --no-cache-dir -d . \
	    ./shoal_orchestrator_protos-*.whl ./shoal_orchestrator_policies-*.whl ./shoal_orchestrator_coordinator-*.whl \
	    "$$(ls ./shoal_orchestrator_agent-*.whl)[cpu]"
	cp -r deploy/install.sh deploy/systemd dist/bundle/shoal-device
	tar -C dist/bundle --owner=0 --group=0 -cf dist/shoal-device-$(ARCH).tar shoal-device
	@ls -sh dist/shoal-device-$(ARCH).tar

# Nothing here compiles for another kind of machine.
own-kind:
	@test -z "$(FOREIGN)" || { echo "found: COMPILED for $(ARCH); wanted: this machine's kind, $$(uname -m); try: make bundle COMPILED=yes on such a machine, or ARCH=$(ARCH) without COMPILED (USAGE)" >&2; exit 2; }

test-compose: $(TEST_STAMP) packages ## real containers and networks: docker-compose.yml, hurt; installs and starts the engine where there is none
	tests/compose/engine.sh $(MAKE) --no-print-directory test-containers

test-containers: $(TEST_STAMP) images # with the engine that answers
	rm -f flaky.txt
	$(call ATTEMPT,compose) tests/compose -m compose
	PYTHONPATH=tests $(BIN)/python -m harness.report C

lint: $(TEST_STAMP) ## ruff, the import contracts, names, documented fields, prose, log events, imports of tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/style/words.py
	PYTHONPATH=tests $(BIN)/python -m style.log_events
	PYTHONPATH=tests $(BIN)/python -m style.imports

words: $(TEST_STAMP) ## what a stranger can read: names, documented fields, prose of the docs
	$(BIN)/python tests/style/words.py

types: $(TEST_STAMP) $(SITE_STAMP) ## mypy strict and pyright
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

protos: $(TEST_STAMP) ## regenerate the committed stubs; fails when they differ
	PYTHON="$(abspath $(BIN)/python)" protos/generate.sh
	git diff --exit-code -- protos

docs: $(TEST_STAMP) ## regenerate the reference from the code
	PYTHONPATH=docs:tests $(BIN)/python -m generators

site: $(SITE_STAMP) ## the documentation site in dist/site; fails on a broken link, or if a page loads from elsewhere
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=docs:tests $(BIN)/mkdocs build --strict

dashboards: $(STAMP) ## write Grafana's dashboards from deploy/grafana/dashboards.yml
	$(BIN)/python deploy/grafana/generate.py

# What the wheel holds of the dashboard's page is committed, so that only who changes the page needs node and npm.
assets: ## build the page of the coordinator's dashboard from coordinator/dashboard; fails when the built files differ
	cd coordinator/dashboard && npm ci --ignore-scripts --no-audit --no-fund && node build.mjs
	git diff --exit-code -- coordinator/shoal/coordinator/api/dashboard/static

bench: $(TEST_STAMP) ## the benchmarks, as ratios in one run
	$(BIN)/shoal bench

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis $(SIMULATED) .types.log
