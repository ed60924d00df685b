"""``report --watch``: the page of a measurement while it runs, on this machine only."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.run import PARTIAL, Run, is_being_written
from ebbench.report.watch import going_on
from tests.report.report_data import invoke


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@contextmanager
def measuring(folder: Path, requests: int) -> Iterator[subprocess.Popen[bytes]]:
    """A measurement over HTTP of some seconds, ended with the block."""
    words = ("-n", str(requests), "--scenario", "poisson", "--request-rate", "40", "--input-len", "16",
             "--output-len", "4", "--lag-limit-ms", "60000", "-q", "-o", str(folder))  # fmt: skip
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=1)) as server:
        command = [sys.executable, "-m", "ebbench", "run", "balanced", "--engine", server.url, *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(lambda: (folder / PARTIAL).exists() or process.poll() is not None)
            yield process
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def watching(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says."""
    command = [sys.executable, "-m", "ebbench", "report", "--watch", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert match, said
        yield process, match.group()
    finally:
        process.kill()
        process.wait()


def page_at(url: str, **headers: str) -> tuple[str, str | None]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.read().decode(), answer.headers["Refresh"]


def test_the_page_grows_with_the_measurement_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with measuring(folder, 300) as run, watching(folder) as (watch, url):
        page, refresh = page_at(url)
        while "Still running: run." not in page and run.poll() is None:
            time.sleep(0.2)
            page, refresh = page_at(url)
        assert re.search(r"[\d,]+ of 300 requests have ended", page)
        assert "INVALID v1" not in page
        assert refresh == "5"
        assert run.wait(120) == 0
        while refresh is not None:  # the watcher looks now and then whether the run has ended
            time.sleep(0.5)
            page, refresh = page_at(url)
        assert "Still running" not in page
        _, said = watch.communicate(timeout=60)
        assert "the measurement has ended" in said
        assert watch.returncode == 0
    assert Run.load(folder).requests.num_rows == 300


def test_ctrl_c_stops_watching_and_not_the_measurement(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with measuring(folder, 2000) as run, watching(folder) as (watch, _):
        watch.send_signal(signal.SIGINT)
        _, said = watch.communicate(timeout=60)
        assert "stopped watching" in said
        assert watch.returncode == 0
        assert run.poll() is None
        assert going_on([folder]) == [folder]
        assert "left alone" in invoke("recover", folder).output
    assert not is_being_written(folder)


def test_other_pages_and_other_hosts_get_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with measuring(folder, 2000), watching(folder) as (_, url):
        silent = socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])))
        for address, headers in ((f"{url}etc", {}), (url, {"Host": "elsewhere.example"})):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                page_at(address, **headers)
        silent.close()


def test_without_a_measurement_there_is_nothing_to_watch(tmp_path: Path) -> None:
    refused = invoke("report", "--watch", tmp_path)
    assert refused.exit_code == 2
    assert "nothing is being measured" in refused.output
    both = invoke("report", "--watch", "--html", tmp_path)
    assert "--watch writes nothing" in both.output
