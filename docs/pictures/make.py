"""Make the pictures of the README and of the guide: runs, their pages, and parts of these as a browser shows them.

    make picture

Needs Chromium and the package playwright (make dev). The runs take two minutes and no GPU.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.run import PARTIAL

HERE = Path(__file__).parent
RUN = (
    "run", "sharegpt", "--source", "profile", "--scenario", "concurrency-shift", "--policy", "v1", "--policy", "ebplus",
    "--device", "rtx-pro-6000", "--model", "qwen3-8b", "--num-prompts", "3000", "--repeats", "7", "--quiet",
)  # fmt: skip
OVER_HTTP = (
    "run", "balanced", "--scenario", "poisson", "--request-rate", "30", "--num-prompts", "900", "--input-len", "200",
    "--output-len", "80", "--lag-limit-ms", "1000", "--quiet",
)  # fmt: skip
WIDTH_PX = 1060


def main() -> None:
    """Run, report, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder, browser() as view:
        place = Path(folder)
        ebbench(*RUN, "--output-dir", str(place / "runs"))
        shown = {"comparison.png": "Paired", "over-time.png": "One run over time"}
        take(view, page_of(place / "runs"), shown, run="ebplus seed 0")
        ebbench("run", f"log:{log_of_jobs(place)}", "--policy", "v1", "--quiet", "--output-dir", str(place / "jobs"))
        take(view, page_of(place / "jobs"), {"classes.png": "Classes of requests", "sessions.png": "Sessions"})
        over_http(view, place / "http")
        live_view(view, place)


def ebbench(*words: str) -> None:
    """One command, which must succeed."""
    subprocess.run([sys.executable, "-m", "ebbench", *words], check=True, stdout=subprocess.DEVNULL)


def page_of(runs: Path) -> str:
    """The address of the page of runs."""
    page = runs.with_suffix(".html")
    ebbench("report", str(runs), "--output", str(page))
    return page.as_uri()


def log_of_jobs(place: Path) -> Path:
    """A log of agents' jobs of several turns beside single questions."""
    rows = [
        {"session_id": f"job-{n}", "turn": turn, "input_length": 300 + 400 * turn, "output_length": 60 + 37 * n % 90,
         "class": "agent" if n % 3 else "chat",
         **({"delay": 400.0 * (n % 9)} if turn else {"timestamp": 250.0 * n})}
        for n in range(240) for turn in range(1 + n % 3 * 2)
    ]  # fmt: skip
    log = place / "jobs.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def over_http(view: Any, run: Path) -> None:
    """Pictures of a measurement's page while it runs, and of its run over time."""
    with FakeServerProcess(FakeConfig(ttft_ms=60, itl_ms=15, max_running=40)) as server:
        words = [sys.executable, "-m", "ebbench", *OVER_HTTP, "--engine", server.url, "--output-dir", str(run)]
        measuring = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while not (run / PARTIAL).exists():
            time.sleep(0.1)
        time.sleep(8)  # some hundred answers
        command = [sys.executable, "-m", "ebbench", "report", "--watch", str(run)]
        watch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert watch.stderr is not None
        said = watch.stderr.readline()
        address = re.search(r"http://\S+", said)
        if address is None:
            raise SystemExit(said)
        view.goto(address.group())
        view.wait_for_selector("svg, canvas")
        view.screenshot(path=HERE / "watching.png")
        view.goto("about:blank")
        measuring.wait()
        watch.kill()
    take(view, page_of(run), {"over-http.png": "One run over time"})


def live_view(view: Any, place: Path) -> None:
    """A picture of the terminal while a capacity search and a sweep of published servers run."""
    search = ("capacity", "sharegpt", "--source", "profile", "--policy", "v1", "--device", "h200",
              "--goodput", "ttft:500", "tpot:50", "--output-dir", str(place / "search"))  # fmt: skip
    shown = [line for words in (search, ("fidelity", "--only", "servers")) for line in last_frame(place, words)]
    console = Console(record=True, file=io.StringIO(), width=116)
    for line in shown:
        console.print(Text.from_ansi(line))
    view.set_content(console.export_svg(title="ebbench"))
    view.locator("svg").screenshot(path=HERE / "live.png")


def last_frame(place: Path, words: Sequence[str]) -> list[str]:
    """What a terminal shows of a command after 25 s, on a slow machine later: the command, and its line of progress."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 116))
    command = [sys.executable, "-m", "ebbench", *words]
    running = subprocess.Popen(command, cwd=place, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    written, began_s = b"", time.monotonic()
    frames: list[str] = []
    while time.monotonic() < began_s + 25 or not frames:
        if select.select([ours], [], [], 0.2)[0]:
            written += os.read(ours, 65536)
        lines = re.split(r"\x1b\[2K|[\r\n]+", written.decode("utf-8", "replace"))
        frames = [line for line in lines if "tok/s" in line or "to go" in line]
        if time.monotonic() > began_s + 300:
            raise SystemExit(f"ebbench {' '.join(words)} shows no progress")
    running.kill()
    running.wait()
    return [f"$ ebbench {' '.join(words[:2])} ...", frames[-1]]


@contextmanager
def browser() -> Iterator[Any]:
    """A page of a browser in the light theme."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened.new_page(viewport={"width": WIDTH_PX, "height": 900}, color_scheme="light")
        opened.close()


def take(view: Any, address: str, pictures: dict[str, str], run: str | None = None) -> None:
    """Screenshots of the parts with these headings; ``run``: the one that is shown over time."""
    view.goto(address)
    view.wait_for_selector("svg, canvas")
    if run is not None:
        chosen = view.locator("section", has=view.get_by_role("heading", name="One run over time")).locator("select")
        chosen.first.select_option(label=run)
    view.wait_for_timeout(1500)  # the charts are drawn anew
    for name, heading in pictures.items():
        part = view.locator("section").filter(has=view.locator("h2", has_text=heading)).first
        box = part.bounding_box()
        if box is None:
            raise SystemExit(f"the page shows no part {heading!r}")
        below = part.locator("h3:visible")  # single steps: more than a picture needs
        height = (below.first.bounding_box() or box)["y"] - box["y"] if below.count() else box["height"]
        view.screenshot(path=HERE / name, full_page=True, clip=box | {"height": height})


if __name__ == "__main__":
    main()
