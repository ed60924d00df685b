"""A server process under a supervisor: starts it, waits until it is ready, stops it with all its child processes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from ebbench.errors import RunError
from ebbench.foreign.documents import read_toml
from ebbench.process.child import KILL_WAIT_S, Child, supervised

# What a vLLM server's output says: why it ended, with what to do where that is known, and its KV cache.

_CACHE_TOO_SMALL = re.compile(
    r"max seq len \((?P<tokens>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the "
    r"available KV cache memory \((?P<given>[\d.]+) GiB\)(?:.{0,60}estimated maximum model length is (?P<most>\d+))?"
)
_NO_CACHE = "No available memory for the cache blocks"
_NOT_FREE = re.compile(
    r"Available memory on node \d+ \((?P<free>[\d.]+)/[\d.]+ GiB\) on (?:startup|kv cache allocation) is less than"
)
_MORE = "VLLM_CPU_KVCACHE_SPACE={gib} (GiB, in the environment) on a CPU, --gpu-memory-utilization SHARE on a GPU"


def memory_remedy(output: str) -> str | None:
    """What lacks memory and what to do, in one line; None if ``output`` does not say that any is missing.

    ``output``: what vLLM (0.32) printed, or the end of it.
    """
    if lack := _CACHE_TOO_SMALL.search(output):
        most = f" of at most {lack['most']}" if lack["most"] else ""
        more = _MORE.format(gib=max(math.ceil(float(lack["needed"])), 1))
        return (
            f"the KV cache has {lack['given']} GiB, and one request of {lack['tokens']} tokens needs "
            f"{lack['needed']} GiB: pass --max-model-len TOKENS{most} to vLLM, or give the cache more: {more}"
        )
    if _NO_CACHE in output:
        return f"no memory is left for the KV cache: give it some: {_MORE.format(gib='4')}"
    if lack := _NOT_FREE.search(output):
        size = max(int(float(lack["free"]) / 2), 1)
        return (
            f"vLLM asks for more memory than the {lack['free']} GiB that are free: set the size of the KV cache with "
            f"VLLM_CPU_KVCACHE_SPACE={size} (GiB, in the environment), or end other processes"
        )
    return None


_SOURCE = re.compile(r"^\((?:APIServer|EngineCore|Worker|Router)\w*(?: pid=\d+|[ =]\w+)*\) ?")
_LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*)(?:: (?P<said>.*))?$")
_OPTIONS = re.compile(r"^\S[^:]*: error: (?P<said>.+)")
"""What argparse writes about a wrong option."""
_FOLLOWS = ("Engine core initialization failed", "WorkerProc initialization failed", "Failed core proc", "cancelled")
"""Errors that report another one, which another process wrote."""
_PYDANTIC = re.compile(r"^\d+ validation errors? for ")
_INPUT = re.compile(r" \[type=.*")
_LONGEST = 400  # characters of an error that are shown


def first_error(output: str) -> str:
    """The first error that a server wrote, in one line; empty if it wrote none.

    That is the first exception's last line (the cause of those that follow), else what vLLM's reading of its options
    says, else the first line logged as ERROR.
    """
    lines = [_level_and_text(line) for line in output.splitlines()]
    texts = [text for _, text in lines]
    raised = [reason for reason in _exceptions(texts) if not any(later in reason for later in _FOLLOWS)]
    refused = [matched["said"] for text in texts if (matched := _OPTIONS.match(text))]
    logged = [text for level, text in lines if level in ("ERROR", "CRITICAL") and text.strip()]
    reason = next(iter((*raised, *refused, *logged)), "")
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."


def explain(output: str) -> str:
    """The first error and the remedy, in one line; empty if ``output`` shows no error."""
    if remedy := memory_remedy(output):
        return remedy
    reason = first_error(output)
    remedies = read_toml(Path(__file__).with_name("vllm_errors.toml"))["remedies"]
    remedy = next((remedy for error, remedy in remedies if re.search(error, reason)), None)
    return f"{reason} ({remedy})" if remedy else reason


def error_reason(error: BaseException) -> str:
    """An exception of vLLM in this process, as :func:`explain` would say it of a server's output."""
    said = traceback.format_exception(error, chain=False)
    return explain("".join(said if error.__traceback__ else ["Traceback (most recent call last):\n", *said]))


def _level_and_text(line: str) -> tuple[str, str]:
    """A line's level, empty without one, and its text without process, level, time and place in the source."""
    text = _SOURCE.sub("", line)
    matched = _LEVEL.match(text)
    return (matched["level"], text[matched.end() :]) if matched else ("", text)


def _exceptions(lines: list[str]) -> Iterator[str]:
    """What each traceback ends with, as ``ValueError: reason``, in order."""
    inside = False
    for place, text in enumerate(lines):
        if text.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and text and not text[0].isspace() and (matched := _EXCEPTION.match(text)):
            inside = False
            yield _exception_reason(matched, lines[place + 1 : place + 3], lines[:place])


def _exception_reason(matched: re.Match[str], below: list[str], above: list[str]) -> str:
    """An exception's name and reason: of one without words the line of code that raised it. Pydantic writes the reason
    below the count of errors."""
    reason = (matched["said"] or "").strip()
    if not reason:  # Python marks the part of the line below it
        reason = next((line.strip() for line in reversed(above) if line.strip(" ^~")), "")
        reason = "" if reason.startswith(("File ", "Traceback")) else reason
    if _PYDANTIC.match(reason):
        reason = next((_INPUT.sub("", line.strip()) for line in below if line.startswith("  ")), reason)
        return reason.removeprefix("Value error, ")
    return f"{matched['name']}: {reason}" if reason else matched["name"]


POLL_S = 0.25
TERM_WAIT_S = 15.0  # time for the server to end its own children
TAIL_LINES = 15
READ_BYTES = 2**20  # of the log's end: the tracebacks of eight workers take 80 kB


class ServerProcess:
    """Runs ``command`` with its output in ``log``. Leaving the context stops it and all processes it started.

    ``kept_log``: where the log will be once the run is over, for messages; None: it stays where it is.
    """

    kept_log: Path | None = None

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.url, self.log = url, log
        self._command, self._env = list(command), dict(env)
        self._process: Child | None = None

    def __enter__(self) -> ServerProcess:
        """Start the server."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            output.write((" ".join(self._command) + "\n\n").encode())
            output.flush()
            self._process = Child(
                supervised(self._command, TERM_WAIT_S), stdout=output, stderr=subprocess.STDOUT,
                env=self._env, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()

    @property
    def group(self) -> int:
        """The process group of everything it starts."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout_s: float, waiting: Callable[[float], None]) -> None:
        """Return once /health responds with 200; ``waiting`` is called at intervals with the seconds waited so far.

        Raises RunError with the server's first error if that does not happen.
        """
        began = time.monotonic()
        # One client for all questions: making one takes 25 ms of CPU, which the server needs to start.
        with httpx.Client(timeout=2.0) as client:
            while (waited_s := time.monotonic() - began) < timeout_s:
                self.check_alive("did not come up")
                waiting(waited_s)
                if _answers(client, self.url):
                    return
                time.sleep(POLL_S)
        raise RunError(f"the server was not ready after {timeout_s:g} s{self.reason()}")

    def check_alive(self, what: str, patience_s: float = 0.0) -> None:
        """Raise RunError if the process has ended, or ends within ``patience_s``."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        status = self._process.poll()
        if status is not None:
            raise RunError(f"the server {what} ({_status(status)}){self.reason()}")

    def reason(self) -> str:
        """The first error in the log and the log's path, as the end of a sentence; without an error its last lines."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - READ_BYTES))
            output = file.read().decode(errors="replace")
        if explanation := explain(output):
            return f": {explanation}; its log: {self.kept_log or self.log}"
        return "\n".join([f"; its log: {self.kept_log or self.log}, which ends:", *output.splitlines()[-TAIL_LINES:]])

    def stop(self) -> None:
        """Stop the server: SIGTERM lets it end its own children; remaining processes are then killed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.end(TERM_WAIT_S + KILL_WAIT_S)
        with contextlib.suppress(ProcessLookupError):  # the group is empty, unless the supervisor itself was killed
            os.killpg(process.pid, signal.SIGKILL)


def _status(status: int) -> str:
    """An exit status in words. The kernel's answer to lack of memory is SIGKILL."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL:
        return "killed, as the kernel does when memory runs out"
    return f"exit status {status}"


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
