"""What a worker process loads: it starts beside the measurement, and its CPU counts."""

from __future__ import annotations

import subprocess
import sys

NOT_NEEDED = ("httpx", "pyarrow.compute", "prometheus_client", "rich", "typer", "ebbench.client.load_generator")


def test_a_worker_loads_only_what_sends_requests() -> None:
    listing = f"import sys, ebbench.client.worker; print([m for m in {NOT_NEEDED!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_gives_what_callers_of_the_load_generator_need() -> None:
    from ebbench.client import ClientOptions, DriveResult, drive

    assert callable(drive)
    assert ClientOptions().endpoint == "completions"
    assert "requests" in DriveResult._fields
