"""Make the pictures of the README: runs, their page, and two of its parts as a browser shows them.

    make picture

Needs Chromium and the package playwright (make dev). The runs take half a minute and no GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUN = (
    "run", "sharegpt", "--source", "profile", "--scenario", "concurrency-shift", "--policy", "v1", "--policy", "ebplus",
    "--device", "rtx-pro-6000", "--model", "qwen3-8b", "--num-prompts", "3000", "--repeats", "7", "--quiet",
)  # fmt: skip
WIDTH_PX = 1060
SHOWN = {"comparison.png": "Paired", "over-time.png": "One run over time"}
"""Picture and the heading of the part that it shows."""


def main() -> None:
    """Run, report, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ebbench(*RUN, "--output-dir", str(place / "runs"))
        ebbench("report", str(place / "runs"), "--output", str(place / "page.html"))
        take(place / "page.html")


def ebbench(*words: str) -> None:
    """One command, which must succeed."""
    subprocess.run([sys.executable, "-m", "ebbench", *words], check=True, stdout=subprocess.DEVNULL)


def take(page: Path) -> None:
    """Screenshots of the parts, in the light theme; the run over time is the adaptive policy's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH_PX, "height": 900}, color_scheme="light")
        view.goto(page.as_uri())
        view.wait_for_selector("svg, canvas")
        chosen = view.locator("section", has=view.get_by_role("heading", name="One run over time")).locator("select")
        chosen.first.select_option(label="ebplus seed 0")
        view.wait_for_timeout(1500)  # the charts are drawn anew
        for name, heading in SHOWN.items():
            part = view.locator("section").filter(has=view.locator("h2", has_text=heading)).first
            box = part.bounding_box()
            if box is None:
                raise SystemExit(f"the page shows no part {heading!r}")
            below = part.locator("h3")  # single steps: more than a README needs
            height = (below.first.bounding_box() or box)["y"] - box["y"] if below.count() else box["height"]
            view.screenshot(path=HERE / name, full_page=True, clip=box | {"height": height})
        browser.close()


if __name__ == "__main__":
    main()
