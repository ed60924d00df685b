"""What a whole `ebbench run` loads: imports are most of the CPU of a short one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ebbench.fakeserver import FakeConfig, FakeServerProcess

NOT_NEEDED = (
    "pydantic", "httpx", "anyio", "importlib.metadata", "pandas", "rich.progress", "ebbench.simulation",
    "ebbench.dispatch", "scipy",
)  # fmt: skip
LISTING = (
    "import atexit, sys; from pathlib import Path; "
    "atexit.register(lambda: Path(LOADED).write_text(' '.join(sys.modules))); "
    "from ebbench.__main__ import run; run()"
)


def loaded_by(folder: Path, *arguments: str) -> set[str]:
    """The modules that `ebbench run` has loaded at its end."""
    listing = folder / "modules"
    code = LISTING.replace("LOADED", repr(str(listing)))
    command = [sys.executable, "-c", code, "run", "balanced", "-n", "3", "--output-len", "2", "--input-len", "5"]
    command += ["--seed", "1", "--policy", "v1", "--output-dir", str(folder / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(listing.read_text().split())


def test_a_run_on_a_server_loads_little(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        loaded = loaded_by(tmp_path, "--engine", server.url, "--lag-limit-ms", "5000", "--connect-timeout", "9")
    assert loaded.isdisjoint(NOT_NEEDED), sorted(loaded & set(NOT_NEEDED))


def test_a_simulated_run_loads_no_client(tmp_path: Path) -> None:
    loaded = loaded_by(tmp_path, "--engine", "sim")
    assert loaded.isdisjoint({"pydantic", "asyncio", "httpx", "importlib.metadata", "ebbench.client.worker"})
