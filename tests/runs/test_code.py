"""The key of a cell changes with every file that determines its result, and with no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ebbench.runs import key
from ebbench.runs.key import (
    ENGINE_MODULES,
    MAKE,
    FileCache,
    Tree,
    cache_file,
    fingerprint,
    imported_modules,
    source_files,
)

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = (*MAKE, *ENGINE_MODULES["sim"])
USED = """
import json, sys
from pathlib import Path
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" and isinstance(args[0], str) else None)
from ebbench.runs.execute import Task, make
from ebbench.spec.run import simulated
for policy, more in (("marginal", {}), ("v1", {"topology": "1p1d"}), ("v1", {"topology": "dp=2", "dispatch": "sbs"})):
    make(Task(simulated("sharegpt", policy, "h200", "qwen3-8b", 64, 2048, num_prompts=40, max_concurrency=8, **more)))
modules = {str(Path(m.__file__).resolve()) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
print(json.dumps(sorted(modules | opened)))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy of the code and its data, all files with an old time stamp."""
    top = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("ebbench", "patches/vllm_eb", "workloads", "scenarios", "reports/reference"):
        shutil.copytree(ROOT / name, top / name, ignore=ignored)
    for path in top.rglob("*"):
        os.utime(path, (1e9, 1e9))
    data = (top / "ebbench/devices/data", top / "workloads", top / "scenarios", top / "reports/reference")
    return Tree({"ebbench": top / "ebbench", "vllm_eb": top / "patches/vllm_eb"}, data)


@pytest.fixture(scope="module")
def known(tree: Tree) -> FileCache:
    """What is known of the files of the copy, which are read once for all tests."""
    cache = FileCache()
    fingerprint(tree, ENTRIES, cache)
    return cache


def digests(tree: Tree, known: FileCache) -> dict[Path, str]:
    """Hashes of all files that determine a result."""
    data = {Path(path): known.facts(path, stat).digest for _, path, stat in tree.data_files()}
    return dict(source_files(tree, ENTRIES, known).values()) | data


def test_every_file_that_a_run_uses_is_part_of_the_fingerprint(tree: Tree, known: FileCache) -> None:
    """Oracle: what Python imported and opened in a process of its own."""
    done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, check=True, cwd=ROOT)
    installed = ("__pycache__", "site-packages", f"{Path(sys.prefix).name}/")  # an environment may lie in the checkout
    loaded = [path for path in json.loads(done.stdout) if path.startswith(f"{ROOT}/")]
    ours = [path for path in loaded if not any(part in path.removeprefix(f"{ROOT}/") for part in installed)]
    kinds = (".py", ".toml", ".csv", ".parquet")
    used = {str(Path(path).relative_to(ROOT)) for path in ours if Path(path).suffix in kinds}
    top = tree.packages["ebbench"].parent
    covered = {str(path.relative_to(top)) for path in digests(tree, known)}
    assert len(used) > 100
    assert used <= covered


def test_a_changed_byte_in_any_determining_file_changes_it(tree: Tree, known: FileCache) -> None:
    whole, before = fingerprint(tree, ENTRIES, known), digests(tree, known)
    assert whole == fingerprint(tree, ENTRIES, FileCache())
    contents = {path: path.read_bytes() for path in before}
    kinds = {path.suffix: path for path in before}
    assert kinds.keys() >= {".py", ".toml", ".csv", ".parquet"}
    for path in (*kinds.values(), tree.packages["ebbench"] / "engines" / "sim.py"):
        path.write_bytes(contents[path] + b"\n")
        assert fingerprint(tree, ENTRIES, known) != whole, path
        path.write_bytes(contents[path])
        os.utime(path, (1e9, 1e9))
    for path, content in contents.items():
        path.write_bytes(content + b"\n")
    after = digests(tree, known)
    for path, content in contents.items():
        path.write_bytes(content)
        os.utime(path, (1e9, 1e9))
    assert after.keys() == before.keys()
    assert [path for path in before if after[path] == before[path]] == []
    assert fingerprint(tree, ENTRIES, known) == whole


@pytest.mark.parametrize(
    "name", ["render/tables.py", "cli/run.py", "report/page.py", "papers/published.py", "client/stream_messages.py"]
)
def test_files_that_determine_no_simulated_result_leave_it(tree: Tree, known: FileCache, name: str) -> None:
    before = fingerprint(tree, ENTRIES, known)
    path = tree.packages["ebbench"] / name
    content = path.read_bytes()
    path.write_bytes(content + b"#")
    assert fingerprint(tree, ENTRIES, known) == before
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))


def test_the_fingerprint_of_a_server_run_covers_the_client(tree: Tree, known: FileCache) -> None:
    files = source_files(tree, (*MAKE, *ENGINE_MODULES["endpoint"]), known)
    assert {"ebbench.client.stream_messages", "ebbench.client.worker"} <= set(files)
    assert "vllm_eb.scheduler" in source_files(tree, (*MAKE, *ENGINE_MODULES["emulated"]), known)


def test_imports_in_functions_count_and_those_for_type_checkers_do_not() -> None:
    source = b"""
from typing import TYPE_CHECKING
import a.b
if TYPE_CHECKING:
    import never
else:
    import other
def f():
    from . import near
    from ..up import name
"""
    found = imported_modules(source, "top.package.module")
    assert {"a.b", "other", "top.package.near", "top.up.name", "top.up"} <= set(found)
    assert "never" not in found
    assert not {"top.up", "top.package.near"} & set(imported_modules(source, "top.package.module", in_functions=False))
    assert "top.package.sub.near" in imported_modules(b"from . import near", "top.package.sub", is_package=True)


def test_a_cache_on_disk_is_used_and_a_damaged_one_is_not(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, few = tmp_path / "cache" / "code.json", ("ebbench.records.schema",)
    cold = FileCache(path)
    before = fingerprint(tree, few, cold)
    cold.save()
    with monkeypatch.context() as patch:
        patch.setattr(key, "imported_modules", lambda *args, **kwargs: pytest.fail("read again"))
        assert fingerprint(tree, few, FileCache(path)) == before
    path.write_text("{")
    assert fingerprint(tree, few, FileCache(path)) == before


def test_each_installation_has_a_cache_of_its_own(tmp_path: Path) -> None:
    """Else one file would hold those of every checkout and virtual environment, and take longer to read each time."""
    ours, other = (Tree({"ebbench": tmp_path / name}, ()) for name in ("ours", "other"))
    assert cache_file(ours) == cache_file(Tree({"ebbench": tmp_path / "ours"}, ()))
    assert cache_file(ours) != cache_file(other)
