"""The documentation site: it builds with strict links, can be searched, and shows every block of code as one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_built_and_found_by_search(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].split("#")[0] for entry in found}
    for page in (ROOT / "docs").glob("*.md"):
        assert (f"{page.stem}/" if page.stem != "README" else "") in pages, page.name
    assert any("sign-flip" in entry["text"] or "max-pairs" in entry["text"] for entry in found)


def test_no_fence_is_left_as_text(site: Path) -> None:
    for page in site.rglob("*.html"):
        shown = re.sub(r"<script.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "```" not in shown, page
    blocks = (site / "adding-a-workload" / "index.html").read_text(encoding="utf-8")
    assert '<span class="filename">support.toml</span>' in blocks


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?https?://(?!ebbench\.example)[^\"'> ]+", text
        ), page
