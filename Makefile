# Each target does all the set-up it needs: on a fresh machine with python3, pip and cargo, `make test` is
# enough. CI runs the same targets. `make help` lists them.

PYTHON := .venv/bin/python
LOCKED := $(if $(CI),--locked)
FUZZ_SECONDS ?= 20
TEST_LONG_SECONDS ?=
# So many processes of pytest share the tests: four more than there are cores, for many tests wait, for the disk,
# for others, for a death to be noticed. Each takes 1.2 GB, and half a minute of CPU to import and collect all tests.
# Each takes the next file of tests that nobody has begun, the longest first (tests/conftest.py).
TEST_PROCESSES ?= $(shell echo $$((4 + $$(nproc))))

# cargo and maturin must see the same interpreter, or each would compile PyO3 for its own.
export PYO3_PYTHON := $(CURDIR)/$(PYTHON)
# Extension modules leave Python's symbols to the interpreter, so no libpython is needed to link.
export PYO3_BUILD_EXTENSION_MODULE := 1
# Tests start programs by the hundred: what they import is compiled once and kept, also where the environment
# says otherwise, as images of containers do. Without it JAX and torch take seconds in every process.
unexport PYTHONDONTWRITEBYTECODE
# A fresh clone is compiled once, so nothing is kept for the next time.
ifdef CI
export CARGO_INCREMENTAL := 0
endif

# The compiler that lints as it compiles, so that tests and lints of Rust share one compilation of each crate.
CLIPPY_DRIVER := $(wildcard $(shell rustc --print sysroot 2>/dev/null)/bin/clippy-driver)
LINTING := $(if $(CLIPPY_DRIVER),RUSTC_WORKSPACE_WRAPPER=$(CLIPPY_DRIVER) CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__)

.DEFAULT_GOAL := help
.PHONY: help build versitygw azurite fake-gcs-server test test-rust test-python test-long lint lint-style lint-types lint-rust format bench bench-distributed bench-loading-experiments bench-startup-vllm orbax-users demo docs screenshots wheel check-packages wheels test-wheels fuzz torture size lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-26s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# CI builds what tests of Rust need as well, as these do.
build: ## make .venv ready and build the extension into it, if anything has changed
	@$(if $(CI),$(LINTING)) tools/bootstrap

versitygw: build ## build a server of S3's protocol for the tests, where Go is installed
	@tools/versitygw

azurite: ## install a server of Azure's protocol for the tests, where npm is installed
	@tools/azurite

fake-gcs-server: build ## build a server of Google's protocol for the tests, where Go is installed
	@tools/fake-gcs-server

# Two at a time: the compiler and the checks use the cores while tests of Python wait.
test: lint-style ## run every test and check (pytest's includes the check of the native stub)
	@$(MAKE) --no-print-directory --jobs=2 test-python test-rust lint-types docs

test-rust: build versitygw ## run the tests of Rust, and lint it
	@$(if $(LINTING),,echo "clippy is not installed: Rust is not linted")
	$(LINTING) cargo build --workspace --examples --quiet $(LOCKED)
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(LINTING) cargo test --workspace --tests --quiet $(LOCKED)

test-python: build versitygw
	$(PYTHON) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGUMENTS)

test-long: build azurite fake-gcs-server ## run the whole of what `make test` has a share of: hours, or about TEST_LONG_SECONDS
	$(PYTHON) tools/test_long.py --processes $(TEST_PROCESSES) $(TEST_LONG_SECONDS:%=--seconds %)

lint: lint-style lint-types lint-rust ## check style, types and licences (`make -k lint` goes on after a failure)

lint-style: build
	$(PYTHON) -m ruff check --quiet
	$(PYTHON) -m ruff format --check --quiet
	@if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; \
	else echo "rustfmt is not installed: the style of Rust is not checked"; fi

lint-types: build
	$(PYTHON) -m mypy

lint-rust: build
	@if cargo clippy --version >/dev/null 2>&1; then \
	cargo clippy --workspace --all-targets --quiet $(LOCKED) -- -D warnings; \
	else echo "clippy is not installed: Rust is not linted"; fi
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --log-level error check bans licenses sources; \
	else echo "cargo-deny is not installed: licences of crates not checked"; fi

format: build ## rewrite the sources in the project's style
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format
	cargo fmt --all

bench: build ## measure against other libraries and the disk (BENCH_ARGUMENTS are passed on)
	$(PYTHON) -m benchmarks $(BENCH_ARGUMENTS)
	$(PYTHON) -m benchmarks.loading $(BENCH_ARGUMENTS)
	$(PYTHON) -m benchmarks.startup $(filter --quick,$(BENCH_ARGUMENTS))
	$(PYTHON) -m benchmarks.runtime $(filter --quick,$(BENCH_ARGUMENTS))

bench-distributed: build ## measure programs of several processes (BENCH_ARGUMENTS are passed on)
	$(PYTHON) -m benchmarks.distributed $(BENCH_ARGUMENTS)

bench-loading-experiments: build ## measure loads of published models by several processes, beside jobs, in memory
	$(PYTHON) -m benchmarks.loading_experiments $(BENCH_ARGUMENTS)

bench-startup-vllm: build ## measure starts of a model in vLLM, which gets an environment of its own (6 GB)
	@tools/vllm-environment
	$(PYTHON) -m benchmarks.startup --server vllm $(BENCH_ARGUMENTS)

orbax-users: build ## run the checkpoint tests of Keras, tunix, MaxText, Grain and Flax with Orbax and with ours (needs a network)
	@tools/orbax-users $(ORBAX_USERS_ARGUMENTS)

demo: build ## train, kill, resume on other devices, and compare the losses
	.venv/bin/waystation demo $(DEMO_ARGUMENTS)

docs: build ## build the documentation into target/site; a broken link is an error
	$(PYTHON) -m mkdocs build --strict --quiet
	@echo "open target/site/index.html"

screenshots: build ## take the pictures of the window in docs/images anew (needs Chromium)
	PYTHONPATH=$(CURDIR) $(PYTHON) tools/window_screenshots.py

wheel: build ## build the wheel and the sdist into dist/
	rm -rf dist
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/uv build --python $(PYTHON) --quiet --sdist --wheel --no-build-isolation --offline --out-dir dist

check-packages: wheel ## install what `make wheel` builds into fresh environments, and use it (minutes, and a registry)
	$(PYTHON) tools/check_packages.py dist

wheels: build ## build the packages of a release into dist/: a wheel for each platform, and the sdist (needs registries)
	rm -rf dist
	@tools/wheels build_wheels.py $(WHEELS_ARGUMENTS)

test-wheels: build ## audit the wheels in dist/ and use them with every Python (needs registries, a quarter of an hour)
	@tools/wheels test_wheels.py $(TEST_WHEELS_ARGUMENTS)

torture: build ## torture every system with faults of every kind (TORTURE_ARGUMENTS are passed on)
	$(PYTHON) -W ignore -m torture run $(TORTURE_ARGUMENTS)

fuzz: build ## run every fuzzer for FUZZ_SECONDS (needs a nightly Rust and cargo-fuzz)
	@tools/fuzz $(FUZZ_SECONDS)

size: build ## print files, code lines and public names, and how many files a save, a load and other calls pass
	$(PYTHON) tools/size.py $(SIZE_ARGUMENTS)

lock: build ## resolve requirements.lock anew
	@tools/lock $(LOCK_ARGUMENTS)

clean: ## remove what the other targets have made
	rm -rf .venv .venv-vllm .venv-orbax-users target fuzz/target dist site python/waystation/_native.abi3.so THIRD-PARTY-LICENSES.txt
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
