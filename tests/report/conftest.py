"""Runs for the tests of pages, exports and queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.report.report_data import BrowserPage, invoke, open_page, started_browser


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three policies through a shift of traffic, with limits: directories ``v1``, ``eb`` and ``ebplus``."""
    root = tmp_path_factory.mktemp("runs")
    done = invoke(
        "run", "sharegpt", "-s", "distribution-shift", "--source", "profile", "-n", "450", "-p", "v1", "-p", "eb",
        "-p", "ebplus", "--engine", "sim", "--goodput", "ttft:20000", "tpot:60", "-q", "-o", root / "shift",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return root / "shift"


@pytest.fixture(scope="session")
def page_file(runs: Path) -> Path:
    """The page of these runs."""
    path = runs.parent / "report.html"
    done = invoke("report", runs, "--html", "--output", path)
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def browser_page() -> Iterator[BrowserPage]:
    """Opens files in one browser for all tests of a module, as starting it takes as long as most of them."""
    with started_browser() as browser:
        yield partial(open_page, browser)
