"""A server that does not start: its first error and the path of its log, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbench.engines.vllm_command import hub_name
from ebbench.engines.vllm_server import ServerProcess, error_reason, explain, first_error
from ebbench.errors import RunError, UsageError

WARNING = (
    "(APIServer pid=7) WARNING 11-27 07:10:07 [system_utils.py:255] Found ulimit of 20000. This can cause fd limit "
    "errors like `OSError: [Errno 24] Too many open files`\n"
)
CHAIN = """(APIServer pid=7) INFO 11-27 07:10:09 [model.py:610] Resolved architecture: Qwen3ForCausalLM
(Worker pid=9) ERROR 11-27 07:08:45 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=9) ERROR 11-27 07:08:45 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=9) ERROR 11-27 07:08:45 [multiproc_executor.py:953]   File "/x/multiproc_executor.py", line 920, in main
(Worker pid=9) ERROR 11-27 07:08:45 [multiproc_executor.py:953]     worker = WorkerProc(*args, **kwargs)
(Worker pid=9) ERROR 11-27 07:08:45 [multiproc_executor.py:953] safetensors.SafetensorError: header is incomplete
(EngineCore pid=8) ERROR 11-27 07:08:46 [core.py:1100] EngineCore failed to start.
(EngineCore pid=8) ERROR 11-27 07:08:46 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-27 07:08:46 [core.py:1100] Exception: WorkerProc initialization failed due to an exception
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "/x/api_server.py", line 83, in build
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
PYDANTIC = """Traceback (most recent call last):
  File "/x/arg_utils.py", line 2838, in create_engine_config
    config = VllmConfig(
             ^^^^^^^^^^^
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Cannot find the config file for gptq [type=value_error, input_value=ArgsKwargs((), {'model_co...})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
OPTIONS = "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --dtype: invalid choice: 'int3'\n"
LATER = """Traceback (most recent call last):
  File "/x/hub.py", line 1, in get
huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/hub.py", line 2, in get
OSError: no/such is not a local folder
"""
PORT = """Traceback (most recent call last):
  File "/x/server.py", line 5, in create_server_socket
OSError: [Errno 98] Address already in use
"""
LOGGED = "ERROR 11-27 07:10:07 [registry.py:1] No module named 'flash'\nERROR 11-27 07:10:08 [registry.py:1] again\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (WARNING + CHAIN, "SafetensorError: header is incomplete"),
        (WARNING + PYDANTIC, "Cannot find the config file for gptq"),
        (WARNING + OPTIONS, "argument --dtype: invalid choice: 'int3'"),
        (WARNING + LATER, "RepositoryNotFoundError: 404 Client Error."),
        (LOGGED, "No module named 'flash'"),
        (WARNING, ""),
        ("Traceback (most recent call last):\n  File 'x'\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n  File 'x'\nAssertionError\n", "AssertionError"),
        (
            'Traceback (most recent call last):\n  File "x.py", line 2, in y\n    assert self.tokens == 1\n'
            "           ^^^^^^^^^^^^^^^^\nAssertionError\n",
            "AssertionError: assert self.tokens == 1",
        ),
    ],
)
def test_the_first_error_is_told(output: str, said: str) -> None:
    assert first_error(output) == said


def test_a_taken_port_comes_with_the_remedy() -> None:
    assert (
        explain(PORT) == "OSError: [Errno 98] Address already in use (choose another --port, or end what listens there)"
    )


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("NotImplementedError: Unsupported speculative method: 'mtp'", "no layers for multi-token prediction"),
        ("ValueError: num_speculative_tokens was provided but without speculative model.", 'head as "model"'),
        ("NotImplementedError: Unsupported speculative method: 'mlp_speculator'", "holds no head for this method"),
        ("ValueError: Model architectures ['EagleQwen3ForCausalLM'] are not supported for now.", "holds no head"),
        ("ValueError: Duplicate layer name: model.layers.0.self_attn.attn", "holds no head for this method"),
        ("RuntimeError: pin_memory=True requires a CUDA or other accelerator backend", "use the method ngram"),
        ("ValueError: num_speculative_tokens must be provided with speculative model", '"num_speculative_tokens"'),
    ],
)
def test_drafts_that_a_server_cannot_make_come_with_the_remedy(error: str, remedy: str) -> None:
    said = explain(f"Traceback (most recent call last):\n  File 'x'\n{error}\n")
    assert said.startswith(error)
    assert remedy in said


def assert_drafts(tokens: int, expected: int = 1) -> None:
    if tokens != expected:
        raise AssertionError  # without words


def test_an_exception_of_this_process_is_told_alike() -> None:
    assert error_reason(ValueError("no such type\nand more")) == "ValueError: no such type"
    with pytest.raises(AssertionError) as raised:
        assert_drafts(3)
    assert error_reason(raised.value) == "AssertionError: raise AssertionError  # without words"


def failed(folder: Path, program: str) -> str:
    """The error of a server that is this Python program."""
    with ServerProcess([sys.executable, "-c", program], "http://127.0.0.1:9", folder / "server.log", {}) as server:
        with pytest.raises(RunError) as error:
            server.wait_ready(60.0, lambda _: None)
        return str(error.value)


def test_the_error_and_the_log_come_in_one_line(tmp_path: Path) -> None:
    said = failed(tmp_path, "def f(): raise ValueError('bad head')\nf()")
    assert said == f"the server did not come up (exit status 1): ValueError: bad head; its log: {tmp_path}/server.log"


def test_without_an_error_the_last_lines_are_shown(tmp_path: Path) -> None:
    said = failed(tmp_path, "print('goodbye'); raise SystemExit(3)")
    assert said.startswith(f"the server did not come up (exit status 3); its log: {tmp_path}/server.log, which ends:\n")
    assert said.endswith("goodbye")


def test_a_killed_server_is_said_to_be_killed(tmp_path: Path) -> None:
    assert "(killed, as the kernel does when memory runs out)" in failed(tmp_path, "import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("model", ["./nope", "/no/such/model", "~/models/x", "../x"])
def test_a_path_without_a_folder_is_refused_before_the_start(model: str) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        hub_name(model)


def test_a_log_that_is_copied_is_named_by_its_copy(tmp_path: Path) -> None:
    with ServerProcess([sys.executable, "-c", "1/0"], "http://127.0.0.1:9", tmp_path / "server.log", {}) as server:
        server.kept_log = tmp_path / "run" / "server.log"
        with pytest.raises(RunError, match=f"ZeroDivisionError: division by zero; its log: {tmp_path}/run/server.log$"):
            server.wait_ready(60.0, lambda _: None)
