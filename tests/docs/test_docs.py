"""Every command of the guide pages is run, page by page, in the order shown, in an empty directory.

Blocks marked ``gpu`` run where there is a GPU; elsewhere their command lines are parsed, so that an option that does
not exist is found. So are those marked ``long``, which `make nightly` runs. ``vllm`` and ``cluster`` blocks run in
tests of their own. ``file=NAME`` blocks become files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli import main
from ebbench.engines.setup import _gpu_visible

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    "README", "quick-start", "choosing-a-scheduler", "ci-gate", "sweeps", "adding-a-workload", "own-traffic",
    "sessions", "reading-a-run", "gpus", "cluster", "emulator", "deployment", "capacity", "python",
)  # fmt: skip
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"[|&;<>$()]")
_BACKGROUND = re.compile(r" &$|<<", re.MULTILINE)
_PROMPTS = re.compile(r"(--num-prompts|-n) (\d+)")
MOST_PROMPTS = 120
"""Requests of a run in `make test`: how the commands of a page work together does not depend on it."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word behind it, its text."""

    language: str
    word: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Its lines, without empty ones and what a here-document holds."""
        text = re.sub(r"<<'(\w+)'\n.*?\n\1$", "", self.text, flags=re.DOTALL | re.MULTILINE)
        return [line for line in text.splitlines() if line.strip()]


def blocks(page: str) -> list[Block]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [Block(language, word.strip(), content) for language, word, content in _BLOCK.findall(text)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Path:
    """An empty directory, with `ebbench` and `python` being this installation's.

    The client of `ebbench run` over HTTP may fall far behind its schedule: the machine may be busy.
    """
    shims = tmp_path / "shims"
    shims.mkdir()
    patient = 'case "$*" in *--lag-limit-ms*) ;; run*http://*) set -- "$@" --lag-limit-ms 60000 ;; esac'
    for name, first, words in (("ebbench", patient, "-m ebbench"), ("python", "", "")):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\n{first}\nexec {warm_python} {words} "$@"\n')
        shim.chmod(0o755)
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f"{shims}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return place


def run(block: Block, most_prompts: int | None = None) -> None:
    """Run a block, its runs with at most so many requests, and assert that it succeeds.

    Plain `ebbench` lines run in this process, which is quicker; others in a shell, all of them in one where a line
    starts something in the background.
    """
    for part in [block.text] if _BACKGROUND.search(block.text) else block.commands:
        text = _PROMPTS.sub(lambda given: f"{given[1]} {min(int(given[2]), most_prompts or int(given[2]))}", part)
        if text.startswith("ebbench ") and not _SHELL.search(re.sub(r"\"[^\"]*\"", '""', text)):
            done = CliRunner().invoke(main.app, shlex.split(text)[1:])
            status, said = done.exit_code, done.output
        else:
            status, said = _in_a_shell(text)
        assert status == 0, f"{text}\n{said}"


def _in_a_shell(text: str) -> tuple[int, str]:
    """Exit status and all output; what the block left running is ended."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    return process.returncode, said


def prepare(block: Block) -> bool:
    """Write a ``file=`` block; whether it was one."""
    if not block.word.startswith("file="):
        return False
    Path(block.word.removeprefix("file=")).write_text(block.text, encoding="utf-8")
    return True


@pytest.mark.parametrize("most_prompts", [MOST_PROMPTS, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("page", PAGES)
def test_commands_of(page: str, most_prompts: int | None, workplace: Path) -> None:
    """As written in `make nightly`."""
    done = 0
    for block in blocks(page):
        if prepare(block) or block.language in ("text", "toml", "jsonl"):
            continue
        done += 1
        if block.language == "python":
            subprocess.run([sys.executable, "-c", block.text], check=True, capture_output=True, timeout=120)
        elif block.language == "bash" and block.word in ("gpu", "long"):
            run(block) if block.word == "gpu" and _gpu_visible() else parse(block)
        elif block.language == "bash" and not block.word:
            run(block, most_prompts)
        else:
            assert block.word in ("vllm", "cluster"), f"{page}: what is a block `{block.language} {block.word}`?"
    assert done or page == "README", f"{page} shows no command: is a fence written in another way?"


def parse(block: Block) -> None:
    """Assert that every line would be understood."""
    for line in block.commands:
        name, *arguments = shlex.split(line)[1:]
        with main.load_command(name).make_context(name, arguments) as context:  # UsageError for an unknown option
            given = {value for value in context.params.values() if isinstance(value, (str, int, float))}
            assert not arguments or given & {*arguments, *map(_number, arguments)}, line


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def test_an_option_that_does_not_exist_is_found() -> None:
    parse(Block("bash", "gpu", "ebbench serve Qwen/Qwen3-0.6B --policy v1"))
    with pytest.raises(Exception, match="No such option: --polcy"):
        parse(Block("bash", "gpu", "ebbench serve Qwen/Qwen3-0.6B --polcy v1"))


@pytest.mark.vllm
def test_commands_that_need_vllm(workplace: Path) -> None:
    pytest.importorskip("vllm")
    assert run_marked("vllm", PAGES) >= 2


@pytest.mark.slow
def test_commands_that_need_a_cluster(workplace: Path) -> None:
    pytest.importorskip("ray")
    assert run_marked("cluster", ["sweeps"]) >= 1


@pytest.mark.nightly
def test_commands_that_take_long(workplace: Path) -> None:
    assert run_marked("long", PAGES) >= 4


def run_marked(word: str, pages: Sequence[str]) -> int:
    """Run the blocks with this word behind their language; the number of command lines that ran.

    The files that these pages show are written before.
    """
    ran = 0
    for block in (block for page in pages for block in blocks(page)):
        if not prepare(block) and block.word == word:
            run(block)
            ran += len(block.commands)
    return ran


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (DOCS / target).exists(), target
    for path in re.findall(r"`((?:reports|\.github|workloads|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_page_is_listed() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_setting_of_a_sweep_is_named() -> None:
    from ebbench.spec.run import known_settings

    text = (DOCS / "sweeps.md").read_text(encoding="utf-8")
    assert [name for name in known_settings() if f"`{name}`" not in text] == []


def test_exit_codes_are_the_programs() -> None:
    text = (DOCS / "quick-start.md").read_text(encoding="utf-8")
    for code in ("0 fine", "1 regression", "2 bad usage", "3 data", "4 the run", "5 inconclusive", "130 interrupted"):
        assert code in " ".join(text.split())


def test_no_page_needs_a_program_that_is_not_named() -> None:
    """Blocks of the shell use nothing but ebbench, python and the shell's own."""
    known = {"ebbench", "ls", "python", "echo", "kill", "sleep", "SERVER=$!", "cat", "trap"}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                words = {shlex.split(line, comments=True)[0] for line in block.commands}
                assert words <= known, (page, words - known)
    assert shutil.which("bash")


def test_architecture_lists_every_package() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rows = text.partition("## Packages")[2].partition("\n## ")[0].splitlines()
    cells = [row.split("|")[1].replace("ebbench/", "") for row in rows if row.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    packages = {path.parent.name for path in (ROOT / "ebbench").glob("*/__init__.py")}
    assert packages <= listed
