"""Power and energy from ``ebbench run`` with the real nvidia-ml-py, on a driver library of ours with known GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess

pytest.importorskip("pynvml")
COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

# Two GPUs: 300 W, and 100 W with 500 W in every fifth reading. The counters grow by 300 and 100 J per second.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef struct { int index; } gpu;
static gpu gpus[2] = {{0}, {1}};
static int readings = 0;
static int limit(void) { char *text = getenv("READINGS"); return text ? atoi(text) : 1 << 30; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "unknown"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **handle) { *handle = &gpus[index]; return 0; }
int nvmlDeviceGetName(gpu *handle, char *name, unsigned size) {
    snprintf(name, size, "Test GPU %d", handle->index); return 0;
}
int nvmlDeviceGetUUID(gpu *handle, char *name, unsigned size) {
    snprintf(name, size, "GPU-%d", handle->index); return 0;
}
int nvmlDeviceGetPowerUsage(gpu *handle, unsigned *milliwatts) {
    if (handle->index == 0) { *milliwatts = 300000; return 0; }
    if (++readings > limit()) return 15;
    *milliwatts = readings % 5 ? 100000 : 500000;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(gpu *handle, unsigned long long *millijoules) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = now.tv_sec + now.tv_nsec / 1e9;
    *millijoules = (unsigned long long)(1e3 * (handle->index == 0 ? 300 : 100) * seconds);
    return 0;
}
"""
# The fake server names itself, and has no power; here it stands for a server that uses the GPUs.
COMMAND = (
    "import ebbench.client.server_queries as queries; queries.MADE_UP = 'nobody'; "
    "from ebbench.__main__ import run; run()"
)
ENERGY_J_PER_S = 400.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(DRIVER)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(folder / "nvml.c")], check=True)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServerProcess]:
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10)) as running:
        yield running


def run(driver: Path, server: FakeServerProcess, where: Path, *words: str, **more: str) -> dict[str, Any]:
    """The summary of a run of about two seconds, and ``text``: what the terminal shows besides."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {"LD_LIBRARY_PATH": str(driver), "COLUMNS": "250"} | more
    load = ["balanced", "-n", "40", "-c", "4", "--input-len", "16", "--output-len", "16", "--engine", server.url]
    load += ["--lag-limit-ms", "60000"]  # a busy machine must not decide
    command = [sys.executable, "-c", COMMAND, "run", *load, "-o", str(where), *words]
    done = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [summary] = json.loads(done.stdout)
    shown = subprocess.run(
        [sys.executable, "-m", "ebbench", "show", str(where)], env=environ, capture_output=True, text=True, check=True
    )
    return {**summary, "text": done.stderr + shown.stdout}


def test_two_gpus_are_summed(driver: Path, server: FakeServerProcess, tmp_path: Path) -> None:
    found = run(driver, server, tmp_path / "run")
    assert found["gpu_power_mean_w"] == pytest.approx(ENERGY_J_PER_S, rel=0.01)
    assert found["gpu_power_peak_w"] == 800.0
    assert found["gpu_energy_j"] == pytest.approx(ENERGY_J_PER_S * found["duration"], rel=0.05)
    assert found["joules_per_output_token"] == pytest.approx(found["gpu_energy_j"] / found["total_output_tokens"])
    assert "GPU power is measured: Test GPU 0, Test GPU 1; all of them are measured" in found["text"]
    words = " ".join(found["text"].split())
    assert "GPU power" in words
    assert "peak W" in words


def test_only_the_gpus_that_cuda_shows(driver: Path, server: FakeServerProcess, tmp_path: Path) -> None:
    found = run(driver, server, tmp_path / "run", CUDA_VISIBLE_DEVICES="0")
    assert (found["gpu_power_peak_w"], found["gpu_power_mean_w"]) == (300.0, pytest.approx(300.0, rel=0.01))


def test_a_gpu_that_is_lost_in_mid_run_is_said(driver: Path, server: FakeServerProcess, tmp_path: Path) -> None:
    found = run(driver, server, tmp_path / "run", READINGS="6")
    figures = ("gpu_power_mean_w", "gpu_power_peak_w", "gpu_energy_j", "joules_per_output_token")
    assert [found[name] for name in figures] == [None] * 4
    assert any("GPU is lost" in warning["text"] for warning in found["warnings"])
    assert "No GPU power and energy for this run: reading the power failed" in " ".join(found["text"].split())
