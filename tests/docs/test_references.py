"""What docstrings and pages refer to exists: modules, classes and functions by name, source files by path."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"ebbench": ROOT / "ebbench", "vllm_eb": ROOT / "patches" / "vllm_eb"}
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ROLE = re.compile(r":(?:mod|func|class|meth|attr|data):`~?([\w.]+)`")
SOURCE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py)`")
FILE = re.compile(r"`([\w-]+\.py)`")


def sources() -> Iterator[tuple[str, Path]]:
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__"))), path


def names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Names that statements define or import, with those of classes below them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from names_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (prefix + (alias.asname or alias.name) for alias in node.names)


def test_names_and_files_in_docstrings_exist() -> None:
    texts = {module: path.read_text(encoding="utf-8") for module, path in sources()}
    names = {module: set(names_in(ast.parse(text).body)) for module, text in texts.items()}
    known = set(names) | {f"{module}.{name}" for module, found in names.items() for name in found}
    unknown = []
    for module, text in texts.items():
        own = names[module] | {name.rpartition(".")[2] for name in names[module]}  # a method of the class at hand
        for target in ROLE.findall(text):
            ours = "." not in target or target.split(".")[0] in PACKAGES
            if ours and target not in own and target not in known:
                unknown.append(f"{module}: {target}")
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    bases = (ROOT, ROOT / "ebbench", ROOT / "patches", ROOT / "patches" / "vllm_eb")
    named = set(SOURCE.findall(page.read_text(encoding="utf-8")))
    if page.name == "CONTRIBUTING.md":
        named -= {path for path in named if path in page.read_text(encoding="utf-8").split("+++ b/", 1)[-1]}
    assert not [path for path in sorted(named) if not any((base / path).exists() for base in bases)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_without_their_folder_exist(page: Path) -> None:
    folders = (*PACKAGES.values(), ROOT / "tests", ROOT / "docs")
    known = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert set(FILE.findall(page.read_text(encoding="utf-8"))) <= known


def test_the_walk_of_the_architecture_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walk = page.split("## Where to start reading")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in walk.splitlines() if line.startswith("| ") and ".py" in line]
    assert len(rows) > 8
    for functions, files in rows:
        trees = [ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in SOURCE.findall(files)]
        defined = {name for tree in trees for name in names_in(tree.body)}
        assert set(re.findall(r"`(\w+)`", functions)) <= defined, (functions, files)


def test_a_test_has_a_name_under_70_characters() -> None:
    names = re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")))
    assert [name for name in names if len(name) >= 70] == []
