"""A real vLLM and its engine core end with the command that started them, however the command ends."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbench.records.run import Run
from tests.processes.process_tree import assert_gone, descendants, wait_until
from tests.vllm import whole_command
from tests.vllm.forked_command import ADDRESS, ForkedCommand
from tests.vllm.serving import client, healthy

pytestmark = pytest.mark.vllm

READY_S = 480.0
FORKED, EXECUTED, SPAWNED = "forked", "executed", "spawned"
"""How a server and what it starts begin: as forks of a process that has imported vLLM; or as new interpreters, but the
engine core and worker, which it forks; or all as new interpreters, which takes ten times as long as the first. The
processes and what they do are the same."""


@pytest.fixture
def variables(request: pytest.FixtureRequest, begun: str) -> dict[str, str]:
    """What the environment of the command has beside that of this process."""
    forking = {} if begun == SPAWNED else {"PYTHONPATH": request.getfixturevalue("forking_path")}
    return forking | ({ADDRESS: request.getfixturevalue("template_place")} if begun == FORKED else {})


def begin(folder: Path, variables: dict[str, str], *words: object) -> subprocess.Popen[bytes] | ForkedCommand:
    """A command as a user starts it: its engines in processes of their own."""
    with (folder / "said").open("wb") as said:
        return whole_command.begin(
            [str(word) for word in words], whole_command.command_environment() | variables, said, said, folder
        )


def end(process: subprocess.Popen[bytes] | ForkedCommand, number: signal.Signals, least: int) -> int:
    """Signal the command once it has started at least so many processes; its exit code, once they are gone."""
    below = descendants(process.pid)
    assert len(below) >= least, below
    process.send_signal(number)
    code = process.wait(90)
    assert_gone(below, 60.0)
    return code


def started(
    process: subprocess.Popen[bytes] | ForkedCommand, folder: Path, condition: Callable[[], object], problem: str
) -> None:
    """Wait until a command has reached the state that the test needs; fail if it has ended."""

    def far_enough() -> bool:
        assert process.poll() is None, (folder / "said").read_text()
        return bool(condition())

    wait_until(far_enough, problem, READY_S)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# A server costs ten to twenty CPU seconds: what SIGTERM does to a run is seen with several servers, below.
@pytest.mark.parametrize(
    ("number", "begun"),
    [
        (signal.SIGHUP, FORKED), (signal.SIGKILL, FORKED),
        pytest.param(signal.SIGKILL, SPAWNED, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_signalled_run_ends_its_server(
    small_model_folder: Path, tmp_path: Path, number: signal.Signals, variables: dict[str, str]
) -> None:
    process = begin(
        tmp_path, variables, "run", "balanced", "--input-len", 60, "--output-len", 40, "--engine", "vllm",
        "--model", small_model_folder, "--policy", "eb:k=2", "-n", 5000, "-c", 4, "--max-model-len", 1024, "-o", "out",
    )  # fmt: skip
    started(process, tmp_path, lambda: list(tmp_path.glob("out/requests.part-*")), "nothing was measured")
    code = end(process, number, least=4)  # supervisor, API server, engine core, client worker
    if number == signal.SIGKILL:
        return
    assert code == 130, (tmp_path / "said").read_text()
    statuses = Run.load(tmp_path / "out").requests.column("status").to_pylist()
    assert len(statuses) == 5000
    assert statuses.count("ok") > 0


@pytest.mark.parametrize(
    ("number", "begun"),
    [
        (signal.SIGTERM, EXECUTED), (signal.SIGHUP, FORKED), (signal.SIGKILL, FORKED),
        pytest.param(signal.SIGTERM, SPAWNED, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_signalled_serve_command_ends_its_server(
    small_model_folder: Path, tmp_path: Path, number: signal.Signals, variables: dict[str, str]
) -> None:
    port = free_port()
    process = begin(
        tmp_path, variables, "serve", small_model_folder, "--policy", "eb:k=2", "--port", port,
        "--", "--enforce-eager", "--max-model-len", 1024,
    )  # fmt: skip
    with client() as http:
        started(process, tmp_path, lambda: healthy(http, f"http://127.0.0.1:{port}"), "the server did not come up")
    code = end(process, number, least=3)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), (tmp_path / "said").read_text()


@pytest.mark.parametrize(("number", "begun"), [(signal.SIGTERM, FORKED), (signal.SIGKILL, FORKED)])
def test_a_signalled_run_with_replicas_ends_servers_and_gateway(
    small_model_folder: Path, tmp_path: Path, number: signal.Signals, variables: dict[str, str]
) -> None:
    process = begin(
        tmp_path, variables, "run", "balanced", "--input-len", 60, "--output-len", 40, "--engine", "vllm",
        "--replicas", 2, "--model", small_model_folder, "--policy", "eb:k=2", "-n", 5000, "-c", 4,
        "--max-model-len", 1024, "-o", "out",
    )  # fmt: skip
    started(process, tmp_path, lambda: list(tmp_path.glob("out/requests.part-*")), "nothing was measured")
    code = end(process, number, least=8)  # twice supervisor, API server and engine core; gateway, client worker
    if number == signal.SIGTERM:
        assert code == 130, (tmp_path / "said").read_text()
        assert Run.load(tmp_path / "out").requests.column("status").to_pylist().count("ok") > 0
