"""pyarrow imports pandas to look for a Series: not in processes of ebbench, as always in programs that import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess

pytest.importorskip("pandas")


def imports_pandas(folder: Path, *words: str) -> bool:
    """Whether an ``ebbench`` command or a worker of it imports pandas."""
    command, environ = [sys.executable, "-m", "ebbench", *words], {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pyarrow" in done.stderr
    return any(line.split("|")[-1].strip().startswith("pandas.") for line in done.stderr.splitlines())


def test_a_simulated_run_does_not_import_pandas(tmp_path: Path) -> None:
    assert not imports_pandas(tmp_path, "run", "balanced", "-n", "20", "-c", "4", "-p", "v1", "-o", "out")
    assert not imports_pandas(tmp_path, "show", "out")


def test_a_run_over_http_does_not_import_pandas(tmp_path: Path) -> None:
    load = ("-n", "8", "-c", "2", "--input-len", "16", "--output-len", "4", "--lag-limit-ms", "60000")
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1)) as server:
        assert not imports_pandas(tmp_path, "run", "balanced", "--engine", server.url, *load)


def test_a_program_that_imports_ebbench_keeps_pandas() -> None:
    program = (
        "import ebbench.records.files, pandas, pyarrow; print(pyarrow.array(pandas.Series([1.0, None])).null_count)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_process_of_ebbench_still_converts_to_pandas() -> None:
    program = (
        "from ebbench.process import interpreter as w; w.process_of_ebbench()\n"
        "import sys, ebbench.records.files, pyarrow\nassert 'pandas' not in sys.modules\n"
        "print(pyarrow.table({'a': [1, 2]}).to_pandas()['a'].sum())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
