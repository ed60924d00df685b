"""What commands load: imports are most of the CPU of a short one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ebbench.fakeserver import FakeConfig, FakeServerProcess

LISTING = (
    "import atexit, sys; from pathlib import Path; "
    "atexit.register(lambda: Path('modules').write_text(' '.join(sys.modules))); "
    "from ebbench.__main__ import run; run()"
)
RUN = ("run", "balanced", "-n", "3", "--output-len", "2", "--input-len", "5", "--seed", "1", "--policy", "v1")


def loaded_by(folder: Path, *arguments: str) -> set[str]:
    """The modules that a command has loaded at its end."""
    command = [sys.executable, "-c", LISTING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return set((folder / "modules").read_text().split())


def test_a_run_on_a_server_loads_no_library_in_vain(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        where = ("--engine", server.url, "--connect-timeout", "9", "--lag-limit-ms", "5000", "--output-dir", "run")
        loaded = loaded_by(tmp_path, *RUN, *where)
    needless = {"pydantic", "httpx", "anyio", "importlib.metadata", "pandas", "rich.progress", "scipy"}
    assert loaded.isdisjoint(needless | {"ebbench.simulation", "ebbench.dispatch"})


def test_simulated_runs_load_no_client_and_lists_no_statistics(tmp_path: Path) -> None:
    needless = {"pydantic", "asyncio", "httpx", "importlib.metadata", "scipy", "ebbench.client.worker"}
    for arguments in ((*RUN, "--output-dir", "runs/a"), ("show", "runs/a"), ("runs", "list")):
        loaded = loaded_by(tmp_path, *arguments)
        assert loaded.isdisjoint(needless), (arguments, sorted(loaded & needless))
