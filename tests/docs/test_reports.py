"""Commands and snippets of reports, pages and the benchmarks' heads: what they name is there and takes their options.

They reproduce figures and run for minutes or hours, so that nobody notices for long when one no longer can.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from ebbench.cli import main
from ebbench.cli.fidelity import GROUPS
from ebbench.errors import check_known
from ebbench.papers.registry import find_figure, find_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "reports").rglob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SCRIPTS = sorted((ROOT / "tests/benchmarks").glob("*.py"))
_CODE = re.compile(r"^```(?:bash|text)\n(.*?)^```$|^ {4}(.*?)(?<!\\)$|(?<!`)``?([^`]+)`", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:time |env/bin/)?((?:ebbench [a-z]|python3? |make [a-z]).*)$", re.MULTILINE)
_SHELL = re.compile(r"[<>|&;$]|\.\.\.")
_NEED_VLLM = ("tests.vllm.", "tests.benchmarks.bench_scheduler")


def _commands() -> Iterator[tuple[str, str]]:
    """File and command; of a script's head what stands in brackets, too, but for names in capitals."""
    for path in (*PAGES, *SCRIPTS):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = re.sub(r"\[[A-Z]+( \.\.\.)?\]| \.\.\.|[\[\]]", "", ast.get_docstring(ast.parse(text)) or "")
        for block, line, inline in _CODE.findall(text):
            shown = re.sub(r"\s*\\\n\s*", " ", block or line) or " ".join(inline.split())
            for command in _COMMAND.findall(shown):
                yield str(path.relative_to(ROOT)), re.sub(r" +# .*", "", command)


COMMANDS = sorted(set(_commands()))


def _of(program: str) -> list[tuple[str, list[str]]]:
    """Files and words of the commands of a program."""
    return [
        (file, shlex.split(text)) for file, text in COMMANDS if text.startswith(program) and not _SHELL.search(text)
    ]


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for _, words in _of("make ") for word in words[1:] if "=" not in word}
    assert len(asked) > 10
    assert asked <= targets


def test_every_command_of_ebbench_is_understood() -> None:
    found = [(file, words) for file, words in _of("ebbench ") if not file.startswith("docs/")]  # run in test_docs.py
    assert len(found) > 100
    assert [(file, said) for file, (_, name, *words) in found if (said := _misunderstood(name, words))] == []


def _misunderstood(name: str, words: list[str]) -> str:
    """What a command does not know; names in capitals may stand for anything, and text may name an option alone."""
    command = main.load_command(name)
    try:
        given = command.make_context(name, list(words)).params if words else {}
        if name == "fidelity":
            for group in given.get("only") or ():
                check_known("group", group, GROUPS)
        elif name in ("tables", "figures") and words and words[0] not in ("slots", "NAME"):
            (find_table if name == "tables" else find_figure)(words[0])
    except Exception as error:
        kind, unnamed = type(error).__name__, any(word.isupper() for word in words)
        broken_off = kind in ("BadOptionUsage", "MissingParameter", "Exit")
        return "" if broken_off or (unnamed and kind != "NoSuchOption") else f"{name} {words}: {error}"
    return ""


_PARSE = argparse.ArgumentParser.parse_args


class UnderstoodError(Exception):
    """Raised in place of what a script does with its arguments."""


def _understand(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Start a script and stop it when it has read its arguments; one that reads none is imported. Returns its name."""
    name = _script(words)

    def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> None:
        _PARSE(parser, arguments)
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [name, *words[3 if words[1] == "-m" else 2 :]])
    module = import_module(name)
    if "argparse" in vars(module):
        with pytest.raises((UnderstoodError, SystemExit)) as ended:
            runpy.run_path(str(module.__file__), run_name="__main__")
        assert getattr(ended.value, "code", 0) == 0, words  # 0: --help
    return name


def _script(words: list[str]) -> str:
    """The module that a command line starts; empty where it is none of ours."""
    name = words[2] if words[1] == "-m" else words[1].removesuffix(".py").replace("/", ".")
    if name.endswith("borrowed"):
        return "ebbench.validation.borrowed"
    whole = f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name
    return whole if name.startswith("tests.") else ""


def _scripts(*, vllm: bool) -> list[list[str]]:
    """Command lines of our scripts, of those that import vLLM or of the others."""
    found = [words for _, words in _of("python") if _script(words)]
    return [words for words in found if _script(words).startswith(_NEED_VLLM) is vllm]


def test_every_script_takes_the_arguments_it_is_shown_with(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {_understand(words, monkeypatch) for words in _scripts(vllm=False)}
    benches = {f"tests.benchmarks.{path.stem}" for path in SCRIPTS if path.stem.startswith("bench_")}
    assert benches - names == {"tests.benchmarks.bench_scheduler"}


def test_scripts_that_import_vllm_have_the_options_they_are_shown_with() -> None:
    shown = _scripts(vllm=True)
    assert len(shown) > 5
    for words in shown:
        source = (ROOT / f"{_script(words).replace('.', '/')}.py").read_text(encoding="utf-8")
        assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == [], words


def test_snippets_name_what_is_there() -> None:
    """What they import of ebbench; they run for minutes."""
    block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    pages = (ROOT / "reports").rglob("*.md")
    snippets = [(page, text) for page in pages for text in block.findall(page.read_text(encoding="utf-8"))]
    assert len(snippets) > 5
    for path, text in snippets:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ebbench"):
                module = import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or import_module(f"{node.module}.{name.name}"), path
