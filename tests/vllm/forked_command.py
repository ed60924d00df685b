"""Python commands forked from a process that has imported what they need: the client of :mod:`tests.vllm.template`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

ADDRESS = "VLLM_TEMPLATE"
"""Environment variable with a folder that all processes of pytest share. Without it every command is started anew."""
LISTENS_S = 120.0
_opened: dict[str, object] = {}
"""Connections that keep templates running until this process ends, and the processes started here, by name."""


class ForkedCommand:
    """``python -m MODULE ...`` in a session of its own: what tests use of ``subprocess.Popen``."""

    def __init__(
        self, words: list[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes], folder: Path
    ) -> None:
        self._connection = _connected(started(Path(environment[ADDRESS]), environment, "vllm"))
        message = {"words": words, "environment": dict(environment), "folder": str(folder)}
        with Path(os.devnull).open() as stdin:
            descriptors = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._connection, [json.dumps(message).encode()], descriptors)
        self.pid = int(json.loads(self._connection.recv(100)))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; minus the number of the signal that ended it. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(json.loads(self._connection.recv(100)))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("python", timeout or 0.0) from None
            self.close()
        return self.returncode

    def close(self) -> None:
        """Close the connection to the template, which ends the command if it still runs."""
        self._connection.close()

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the command, and nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _name(place: Path, kind: str) -> str:
    """The abstract socket of a folder: its length is limited, that of the folder is not."""
    return "ebbench-tests-" + hashlib.sha256(f"{place} {kind}".encode()).hexdigest()[:32]


def _connected(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + name)
    except OSError:
        connection.close()
        raise
    return connection


def started(place: Path, environment: Mapping[str, str], kind: str) -> str:
    """Start the template of a kind unless it runs; it runs until this process has ended. Returns its name."""
    name, said = _name(place, kind), place / f"template-{kind}.log"
    if name in _opened:
        return name
    with (place / f"template-{kind}.lock").open("w") as lock, said.open("ab") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _opened[name] = _connected(name)
            return name
        except ConnectionRefusedError:
            command = [sys.executable, "-m", "tests.vllm.template", name, kind]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment),
                cwd=Path(__file__).parents[2], start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + LISTENS_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                _opened[name] = _connected(name), process
                return name
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise RuntimeError(f"the template did not come up: {said.read_text(encoding='utf-8')}")
