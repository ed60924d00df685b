"""Runs shared by the tests of pages, exports and queries, and a headless browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.records import files
from ebbench.records.run import MANIFEST, Run

BrowserPage = Callable[..., AbstractContextManager[Any]]
"""Opens an HTML file in a browser: :func:`open_page` without its first argument."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def invoke(*args: object) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})


def rewrite(run: Path, **changes: Any) -> None:
    """Change a run's manifest."""
    manifest = msgspec.structs.replace(Run.load(run).manifest, **changes)
    files.write_bytes(msgspec.json.encode(manifest), run / MANIFEST)


@contextmanager
def started_browser() -> Iterator[Any]:
    """Headless Chromium, driven by Playwright; the test is skipped where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install -y chromium")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Any, html: Path, *, width: int = 1100, scheme: str = "light", touch: bool = False
) -> Iterator[Any]:
    """The file in a context of its own, rendered. Console messages, errors and requests are on ``page.heard``."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch, offline=True
    )
    page = context.new_page()
    page.heard = []
    page.on("console", lambda message: page.heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.heard.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (page.heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: page.heard.append(f"request: {request.url[:80]}"))
    page.goto(html.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
    yield page
    context.close()


INK = """element => {
  // Share of the canvas that is not its background.
  const canvas = element.querySelector('canvas');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let ink = 0;
  for (let i = 3; i < pixels.length; i += 4) ink += pixels[i] > 0;
  return ink / (pixels.length / 4);
}"""
