"""Power and energy of GPUs, sampled from a substitute of NVML whose readings are known."""

# ruff: noqa: N802  names are the library's

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.client import drive, power, server_queries
from ebbench.client.power import (
    NvmlGpus,
    PowerReading,
    PowerSampler,
    UnavailableError,
    announcement,
    between,
    on_this_machine,
    open_power,
)
from ebbench.errors import UsageError
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan

NS = 1_000_000_000
LOCAL, REMOTE = "http://127.0.0.1:8000", "http://gpu-server.example:8000"


@dataclass
class Nvml(types.ModuleType):
    """The functions of NVML that are used. GPU i draws ``watts[i]``; its energy counter starts at 1,000 J."""

    watts: tuple[float, ...] = (300.0,)
    counted: bool = True
    driver: bool = True
    fails_after: int = 10**9
    reads: int = 0
    users: int = 0
    began_s: float = field(default_factory=time.monotonic)

    class NVMLError(Exception):
        """As the library's."""

    def __post_init__(self) -> None:
        super().__init__("pynvml")

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.watts)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return f"NVIDIA Stand-in {handle}".encode()

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.reads += 1
        if self.reads > self.fails_after:
            raise self.NVMLError("GPU is lost")
        return round(1e3 * self.watts[handle])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.counted:
            raise self.NVMLError("Not Supported")
        return round(1e3 * (1000.0 + self.watts[handle] * (time.monotonic() - self.began_s)))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    yield made
    assert made.users == 0  # every nvmlInit has its nvmlShutdown
    assert not any(thread.name == "gpu-power" for thread in threading.enumerate())


def sampled(nvml: Nvml, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Facts of at least 0.3 s, read every 10 ms, and ``span_s``: how long it was."""
    sampler = PowerSampler(NvmlGpus(environ or {}), interval_s=0.01)
    with sampler:
        start_ns = time.monotonic_ns()
        time.sleep(0.3)
        end_ns = time.monotonic_ns()
    return sampler.facts(start_ns, end_ns) | {"span_s": (end_ns - start_ns) / 1e9}


@pytest.mark.parametrize("counted", [True, False])
def test_a_constant_draw_is_read_exactly(nvml: Nvml, counted: bool) -> None:
    nvml.watts, nvml.counted = (300.0, 50.5), counted
    facts = sampled(nvml)
    assert facts["mean_w"] == pytest.approx(350.5, rel=0.02)
    assert facts["peak_w"] == 350.5
    assert facts["energy_j"] == pytest.approx(350.5 * facts["span_s"], rel=0.1)
    assert facts["gpus"] == ["NVIDIA Stand-in 0", "NVIDIA Stand-in 1"]
    assert facts["energy_from"] == ("counter" if counted else "power samples")


@pytest.mark.parametrize("visible", ["1", "GPU-1", " 1 ,"])
def test_gpus_are_those_that_cuda_shows(nvml: Nvml, visible: str) -> None:
    nvml.watts = (300.0, 50.0)
    assert sampled(nvml, {"CUDA_VISIBLE_DEVICES": visible})["peak_w"] == 50.0


def test_a_gpu_lost_during_the_run_costs_only_its_power(nvml: Nvml) -> None:
    nvml.fails_after = 5
    facts = sampled(nvml)
    assert "GPU is lost" in str(facts["absent"])
    assert "mean_w" not in facts


@pytest.mark.parametrize(
    ("change", "environ", "reason"),
    [
        ({"driver": False}, {}, "no NVIDIA driver"),
        ({"watts": ()}, {}, "no NVIDIA GPU"),
        ({"fails_after": 0}, {}, "does not report the power"),
        ({}, {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "no NVIDIA GPU"),
    ],
)
def test_missing_power_readings_are_explained(
    nvml: Nvml, change: dict[str, object], environ: dict[str, str], reason: str
) -> None:
    vars(nvml).update(change)
    with pytest.raises(UnavailableError, match=reason):
        NvmlGpus(environ)
    assert reason in announcement(LOCAL, None, environ)
    assert open_power(LOCAL, None, environ) is None
    with pytest.raises(UsageError, match=reason):
        open_power(LOCAL, True, environ)


def test_the_extra_is_named_where_it_would_help(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(power, "DRIVER", tmp_path)  # a driver is loaded
    assert "ebbench[power]" in announcement(LOCAL, None, {})
    monkeypatch.setattr(power, "DRIVER", tmp_path / "absent")
    assert "no NVIDIA GPU" in announcement(LOCAL, None, {})


def test_the_gpus_of_this_machine_are_not_a_remote_servers(nvml: Nvml) -> None:
    assert open_power(REMOTE, None, {}) is None
    assert "another machine" in announcement(REMOTE, None, {})
    asked = open_power(REMOTE, True, {})
    assert asked is not None
    asked.gpus.close()
    assert "of this machine" in announcement(REMOTE, True, {})
    assert open_power(LOCAL, False, {}) is None
    assert announcement(LOCAL, False, {}) == ""


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost", True),
        ("http://[::1]:8000", True),
        ("http://127.8.8.8:1/v1", True),
        ("http://10.0.0.1:8000", False),
        ("https://localhost.example.com", False),
    ],
)
def test_addresses_of_this_machine_are_recognised(url: str, local: bool) -> None:
    assert on_this_machine(url) is local


def plan_of(requests: int) -> Plan:
    return build_plan("balanced", num_prompts=requests, max_concurrency=4, source="profile", input_len=8, output_len=8)


def test_a_run_over_http_has_the_power_of_its_seconds(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_queries, "MADE_UP", "somebody else")  # the fake server is taken for one that computes
    nvml.watts = (300.0, 100.0)
    with FakeServerProcess(FakeConfig(ttft_ms=20.0, itl_ms=5.0)) as server:
        done = drive(server.url, plan_of(40), ClientOptions(workers=0, metrics_interval_s=None))
    found = done.facts["gpu_power"]
    seconds = pc.max(done.requests["end_ns"]).as_py() / 1e9
    assert found["mean_w"] == pytest.approx(400.0, rel=0.05)
    assert found["energy_j"] == pytest.approx(400.0 * seconds, rel=0.05)
    assert found["samples"] >= 2


def test_a_run_on_the_fake_server_has_no_power(nvml: Nvml) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1.0, itl_ms=1.0)) as server:
        done = drive(server.url, plan_of(4), ClientOptions(workers=0, metrics_interval_s=None))
        assert "gpu_power" not in done.facts
        with pytest.raises(UsageError, match="fake server"):
            drive(server.url, plan_of(4), ClientOptions(workers=0, metrics_interval_s=None, power=True))
    assert nvml.reads == 0


@given(
    st.lists(st.floats(1.0, 1000.0), min_size=2, max_size=30),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_energy_is_power_times_time(watts: list[float], first: float, second: float) -> None:
    """Counter and integral agree where the counter is the integral; the mean lies between the least and the most."""
    energy, readings = 0.0, []
    for index, value in enumerate(watts):
        if index:
            energy += (watts[index - 1] + value) / 2 * 0.1
        readings.append(PowerReading(index * NS // 10, value, energy))
    length_ns = readings[-1].time_ns
    start_ns, end_ns = sorted((int(first * length_ns), int(second * length_ns)))
    counted, integrated = (
        between([replace(one, energy_j=one.energy_j if with_counter else None) for one in readings], start_ns, end_ns)
        for with_counter in (True, False)
    )
    if "absent" in counted:
        assert "absent" in integrated
        return
    assert min(watts) * 0.999 <= counted["mean_w"] <= max(watts) * 1.001
    # A line through the counter and one through the power differ inside an interval, by an eighth of its area at most.
    assert abs(counted["energy_j"] - integrated["energy_j"]) <= 2 * 0.1 / 8 * (max(watts) - min(watts)) + 1e-6
