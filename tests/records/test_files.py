"""Every page, picture and export is written whole or not at all, and nothing but a file is replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ebbench.errors import RunError
from ebbench.records import files

PACKAGE = Path(files.__file__).parents[1]
# Not results: what grows (a server's log, the journal, the plans sent so far, the summary of a CI service), files in
# memory that worker processes share, a model's configuration in a temporary folder, a download that is renamed.
OTHER_WRITERS = {
    "client/prefix_cache.py", "client/release_schedule.py", "engines/emulated_core.py",
    "engines/vllm.py", "engines/vllm_server.py", "records/files.py", "records/run.py", "runs/key.py",
    "validation/borrowed.py", "validation/drive.py", "workloads/data_sets.py",
}  # fmt: skip


def test_no_other_code_writes_files() -> None:
    writing = re.compile(r"\.write_(?:text|bytes)\(|\.open\(\s*\"[wax]|\bopen\([^)]*\"[wax]b?\"|\.save\(str\(")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if writing.search(line) and "files.write_" not in line
    }
    assert found <= OTHER_WRITERS, "write results with ebbench.records.files"


def fails_half_way(temporary: Path) -> None:
    temporary.write_text("half")
    raise KeyboardInterrupt


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        files.write_with(path, fails_half_way)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page.html", "old")]


def test_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "page.html")
    for text in ("one", "two"):
        files.write_text(text, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "page.html").read_text() == "two"


def test_a_pipe_gets_the_content(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    files.write_text("whole", pipe)
    reader.join()
    assert got == ["whole"]
    assert pipe.is_fifo()


def test_standard_output_and_the_null_device_get_the_content(tmp_path: Path) -> None:
    code = "from pathlib import Path; from ebbench.records import files; " \
           "files.write_text('1', Path('/dev/null')); files.write_text('whole', Path('/dev/stdout'))"  # fmt: skip
    for target in (subprocess.PIPE, (tmp_path / "out").open("wb")):
        done = subprocess.run([sys.executable, "-c", code], stdout=target, check=True)
        assert (done.stdout or (tmp_path / "out").read_bytes()) == b"whole"
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["ü" * 127, "x" * 255])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    files.write_text("whole", tmp_path / name)
    assert (tmp_path / name).read_text() == "whole"


def test_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(RunError, match=r"could not write .*page\.html: Is a directory"):
        files.write_text("whole", tmp_path / "page.html")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"could not write .*: (Not a directory|File exists)"):
        files.write_text("whole", tmp_path / "file" / "page.html")
