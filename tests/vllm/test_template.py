"""A forked command is what ``exec`` makes of it: tests/vllm/template.py against a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes.process_tree import wait_until
from tests.vllm import whole_command
from tests.vllm.forked_command import ADDRESS, ForkedCommand
from tests.vllm.whole_command import ebbench

pytestmark = pytest.mark.vllm

SHOWS = """
    import contextlib, json, os, pathlib, signal, sys
    links = {}
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            links[entry.name] = os.readlink(entry)
    watched = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
    shown = {
        "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(),
        "open": sorted(name for name, place in links.items() if int(name) > 2 and place != os.devnull),
        "signals": {number.name: str(signal.getsignal(number)) for number in watched},
    }
    print(json.dumps(shown))
    sys.exit(7)
"""
STARTS = """
    import os, signal, subprocess, sys, tempfile
    from tests.vllm import template
    folder = tempfile.TemporaryDirectory()
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kept, passed = os.pipe()
    os.set_inheritable(passed, True)
    words = [sys.executable, sys.argv[2], "one", template.SERVER]
    if sys.argv[1] == "forked":
        subprocess._fork_exec = template.fork_exec
    variables = {"PATH": os.environ["PATH"], "NAMED": "x=y"}
    done = subprocess.run(words, env=variables, cwd="/usr", pass_fds=[passed], stdout=subprocess.PIPE)
    assert done.returncode == 7, done
    assert os.path.isdir(folder.name), "removed by the child"
    print(done.stdout.decode(), flush=True)  # exec drops what is buffered
    template.execvp(words[0], words) if sys.argv[1] == "forked" else os.execvp(words[0], words)
"""


def shown_by(way: str, folder: Path) -> list[dict[str, object]]:
    """What a script finds around it when started by Popen, and by execvp."""
    for name, text in (("shows.py", SHOWS), ("starts.py", STARTS)):
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(folder / "starts.py"), way, str(folder / "shows.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def test_a_forked_command_has_what_a_new_interpreter_has(tmp_path: Path) -> None:
    real, forked = shown_by("real", tmp_path), shown_by("forked", tmp_path)
    assert len(real) == 2
    assert real[0]["environment"] != real[1]["environment"]
    assert len(real[0]["open"]) == 1  # type: ignore[arg-type]
    for one, other in zip(real, forked, strict=True):
        for shown in (one, other):
            shown["environment"].pop("LC_CTYPE", None)  # type: ignore[attr-defined]  # set by Python itself
        assert other == one


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("words", [["--version"], ["policies", "show", "eb"], ["policies", "show", "none"], ["--no"]])
def test_a_command_says_and_returns_the_same(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forked = ebbench(*words)
    monkeypatch.delenv(ADDRESS)
    anew = ebbench(*words)
    assert (forked.returncode, forked.stdout, forked.stderr) == (anew.returncode, anew.stdout, anew.stderr)


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_ends_a_forked_command(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        process = whole_command.begin(["fake-server", "--port", "0"], dict(os.environ), said, said, tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        # A server that is ready ends with 0 on SIGTERM, one that still starts with 130.
        wait_until(lambda: b"is ready" in (tmp_path / "said").read_bytes(), "it did not start", 60.0)
        process.send_signal(number)
        assert process.wait(60) == code
        process.send_signal(number)  # it has ended: nothing happens
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.usefixtures("forking")
def test_the_template_outlives_a_test_that_did_not_wait_for_its_command(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        process = whole_command.begin(["--version"], dict(os.environ), said, said, tmp_path)
        wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "it did not end", 60.0)
    assert isinstance(process, ForkedCommand)
    process.close()  # the exit code has been sent and not read
    assert ebbench("--version").returncode == 0
