"""The page of a measurement while it runs, served on this machine only.

The page is made when it is asked for, at most every few seconds: the watcher shares the machine with the measurement.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from ebbench.analysis.rebuild import so_far, unfinished_runs
from ebbench.errors import DataError, EbbenchError, UsageError
from ebbench.records.run import Run, find_runs, is_being_written

HOST = "127.0.0.1"
REFRESH_S = 5.0
"""A page is at least so old before another is made; browsers ask again after as long."""
LINGER_S = 3 * REFRESH_S
"""How long the last page can still be had after the end."""
_LOOK_S, _CLIENT_S = 1.0, 5.0
_IDLE_PRIORITY = 10


@dataclass(frozen=True)
class Watched:
    """Runs at one moment. ``ended`` and ``planned``: requests of those that go on."""

    runs: tuple[Run, ...]
    going_on: tuple[Path, ...]
    ended: int = 0
    planned: int = 0

    @property
    def note(self) -> str:
        """What a reader must know of runs that go on; empty if none does."""
        if not self.going_on:
            return ""
        where = ", ".join(path.name for path in self.going_on)
        return (
            f"Still running: {where}. {self.ended:,} of {self.planned:,} requests have ended; those that are open are "
            "not in the figures yet."
        )


def going_on(paths: Sequence[Path]) -> list[Path]:
    """Runs that a process measures now, among ``paths`` and in directories among them."""
    return list(filter(is_being_written, unfinished_runs(paths)))


def watched(paths: Sequence[Path]) -> Watched:
    """The finished runs and what is known of those that go on. Raises DataError if no request has ended."""
    running = going_on(paths)
    partial = []
    for path in running:
        with suppress(EbbenchError, OSError):  # it ends, or writes, at this moment
            partial.append(so_far(path))
    done = []
    for path in paths:
        with suppress(DataError):  # none has ended
            done += [Run.load(ended_run) for ended_run in find_runs([path]) if ended_run not in running]
    known = [run for run in partial if run.requests.num_rows]
    if not (known or done):
        raise DataError("no request has ended yet")
    ended, planned = (sum(getattr(run, name).num_rows for run in known) for name in ("requests", "plan"))
    return Watched((*done, *known), tuple(running), ended, planned)


class Watcher:
    """Serves the page of runs at http://127.0.0.1:PORT/ until they have ended. Use as a context manager.

    ``render``: makes the page of a moment. ``port``: 0 takes a free one. Raises UsageError if nothing is measured,
    or for a port in use.
    """

    def __init__(self, paths: Sequence[Path], render: Callable[[Watched], str], port: int = 0) -> None:
        if not _active(paths):
            where = ", ".join(map(str, paths))
            raise UsageError(f"nothing is being measured in {where}; `ebbench report` without --watch shows what ended")
        self._paths, self._render = paths, render
        self._page, self._made_s = "", -REFRESH_S
        self._asked = self._ended = self._last_seen = False
        try:
            self._server = _Server((HOST, port), self._answer)
        except OSError as error:
            raise UsageError(f"cannot listen on {HOST}:{port}: {error.strerror}; give another --port") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_port}/"

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    def until_the_end(self) -> None:
        """Serve until no run goes on and every open page has received the last state."""
        os.nice(_IDLE_PRIORITY)
        while _active(self._paths):
            self._server.handle_request()
        self._ended, self._made_s = True, -REFRESH_S
        deadline_s = time.monotonic() + LINGER_S
        while self._asked and not self._last_seen and time.monotonic() < deadline_s:
            self._server.handle_request()

    def _answer(self) -> tuple[str, bool]:
        """The page, and whether the browser shall reload it."""
        self._asked = True
        if time.monotonic() - self._made_s >= REFRESH_S:
            try:
                self._page = self._render(watched(self._paths))
            except EbbenchError as error:
                self._page = (
                    f"<!doctype html><meta charset=utf-8><title>ebbench</title><p>{html.escape(str(error))}</p>"
                )
            self._made_s = time.monotonic()
        self._last_seen = self._ended
        return self._page, not self._ended


def _active(paths: Sequence[Path]) -> bool:
    """Whether a run goes on, or the next one of a series is being prepared."""
    return any(path.is_dir() and is_being_written(path) for path in paths) or bool(going_on(paths))


class _Server(HTTPServer):
    """Answers one request after the other; a client that is silent for some seconds is left."""

    timeout = _LOOK_S

    def __init__(self, address: tuple[str, int], answer: Callable[[], tuple[str, bool]]) -> None:
        self.answer = answer
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server: _Server

    def do_GET(self) -> None:
        """The page at /, nothing else."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        if self.path != "/" or host not in (HOST, "localhost"):  # a page elsewhere asks through another name
            self.send_error(404)
            return
        text, again = self.server.answer()
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if again:
            self.send_header("Refresh", f"{REFRESH_S:g}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of single requests."""
