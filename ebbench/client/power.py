"""Power of the GPUs of this machine while a server on it is measured, read from NVIDIA's driver (NVML).

A thread reads every GPU ten times per second. Energy is the difference of the driver's energy counters, interpolated
to the start and end of the run; for GPUs without a counter (before Volta) it is the integral of the power. Only GPUs
in CUDA_VISIBLE_DEVICES are measured; without that variable, all.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ebbench.config.server_url import is_loopback
from ebbench.errors import UsageError

INTERVAL_S = 0.1
REMOTE = "the server is on another machine (--power measures this machine's GPUs nevertheless)"
NOT_INSTALLED = "nvidia-ml-py is not installed (pip install 'ebbench[power]')"
NO_GPU = "no NVIDIA GPU is visible here"
DRIVER = Path("/proc/driver/nvidia")
"""Exists if NVIDIA's driver is loaded."""
EXTRA_GPUS = "all of them are measured, used by the server or not; CUDA_VISIBLE_DEVICES selects"


class UnavailableError(Exception):
    """GPU power cannot be read on this machine; the message says why."""


@dataclass(frozen=True)
class PowerReading:
    """Sum over the GPUs at one time: power, and energy since the driver was loaded (None: no counter)."""

    time_ns: int
    power_w: float
    energy_j: float | None


class NvmlGpus:
    """GPUs listed by NVML; ``names``: one per GPU.

    Raises UnavailableError if NVML, the driver or a GPU with readable power is missing.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            import pynvml
        except ImportError:
            raise UnavailableError(NOT_INSTALLED if DRIVER.exists() else NO_GPU) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise UnavailableError(f"no NVIDIA driver responds on this machine ({error})") from None
        try:
            self._handles = self._chosen(environ.get("CUDA_VISIBLE_DEVICES"))
            self.names = tuple(_text(pynvml.nvmlDeviceGetName(handle)) for handle in self._handles)
            self._counted = all(self._energy_mj(handle) is not None for handle in self._handles)
            self.read()
        except pynvml.NVMLError as error:
            self.close()
            raise UnavailableError(f"the driver does not report the power of this GPU ({error})") from None
        except UnavailableError:
            self.close()
            raise

    def _chosen(self, visible: str | None) -> list[Any]:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        if visible is not None:
            words = [word.strip() for word in visible.split(",") if word.strip()]
            known = {str(index): handle for index, handle in enumerate(handles)}
            known |= {_text(self._nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
            unknown = [word for word in words if word not in known]
            if unknown:
                raise UnavailableError(f"CUDA_VISIBLE_DEVICES names {unknown[0]}, which NVML does not list")
            handles = [known[word] for word in words]
        if not handles:
            raise UnavailableError(NO_GPU)
        return handles

    def _energy_mj(self, handle: Any) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except self._nvml.NVMLError:
            return None

    def read(self) -> PowerReading:
        """Current power and energy, summed over the GPUs."""
        power_w = sum(self._nvml.nvmlDeviceGetPowerUsage(handle) for handle in self._handles) / 1e3
        energy_j = sum(self._energy_mj(handle) or 0 for handle in self._handles) / 1e3 if self._counted else None
        return PowerReading(time.monotonic_ns(), power_w, energy_j)

    def close(self) -> None:
        """Release the driver."""
        self._nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass
class PowerSampler:
    """Context manager that reads the GPUs in a thread; see the module."""

    gpus: NvmlGpus
    interval_s: float = INTERVAL_S
    readings: list[PowerReading] = field(default_factory=list)
    failure: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PowerSampler:
        """Take the first reading and start the thread."""
        self._read()
        self._thread = threading.Thread(target=self._run, name="gpu-power", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and take the last reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._read()
        self.gpus.close()

    def _run(self) -> None:
        while not self.failure and not self._stop.wait(self.interval_s):
            self._read()

    def _read(self) -> None:
        if self.failure:
            return
        try:
            self.readings.append(self.gpus.read())
        except Exception as error:  # losing a GPU must not end the run
            self.failure = str(error) or type(error).__name__

    def facts(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Power and energy between two monotonic times, for the manifest."""
        facts: dict[str, Any] = {"gpus": list(self.gpus.names)}
        if self.failure:
            return facts | {"absent": f"reading the power failed during the run: {self.failure}"}
        return facts | between(self.readings, start_ns, end_ns)


def between(readings: Sequence[PowerReading], start_ns: int, end_ns: int) -> dict[str, Any]:
    """``mean_w``, ``peak_w``, ``energy_j`` between two monotonic times; ``readings`` in order of time."""
    times = np.array([reading.time_ns for reading in readings], float)
    watts = np.array([reading.power_w for reading in readings])
    inside = (times >= start_ns) & (times <= end_ns)
    seconds = (end_ns - start_ns) / 1e9
    if seconds <= 0 or not inside.any():
        return {"absent": "the run was too short for a reading"}
    counted = all(reading.energy_j is not None for reading in readings)
    if counted:
        energy = np.array([reading.energy_j for reading in readings], float)
        first, last = np.interp([start_ns, end_ns], times, energy)
        energy_j = float(last - first)
    else:
        edges = np.array([start_ns, end_ns], float)
        grid = np.concatenate([edges[:1], times[inside], edges[1:]])
        energy_j = float(np.trapezoid(np.interp(grid, times, watts), grid) / 1e9)
    return {
        "mean_w": energy_j / seconds,
        "peak_w": float(watts[inside].max()),
        "energy_j": energy_j,
        "samples": int(inside.sum()),
        "energy_from": "counter" if counted else "power samples",
    }


def on_this_machine(url: str) -> bool:
    """Whether a URL names this machine."""
    return is_loopback(url) or urlsplit(url).hostname == socket.gethostname()


def open_power(
    url: str, wanted: bool | None, environ: Mapping[str, str], *, made_up: bool = False
) -> PowerSampler | None:
    """The sampler for a run against ``url``; None if power is not wanted or not available.

    ``wanted`` None: measure if the server is on this machine and NVML is available. ``made_up``: it is ebbench's fake
    server, which uses no GPU. Raises UsageError if power was requested and is not available.
    """
    if made_up and wanted:
        raise UsageError("--power: ebbench's fake server uses no GPU; leave --power out")
    if made_up or wanted is False or (wanted is None and not on_this_machine(url)):
        return None
    try:
        return PowerSampler(NvmlGpus(environ))
    except UnavailableError as error:
        if wanted:
            raise UsageError(f"--power: {error}") from None
        return None


def announcement(url: str, wanted: bool | None, environ: Mapping[str, str]) -> str:
    """One sentence before a run: which GPUs are measured, or why none; empty if switched off."""
    if wanted is False:
        return ""
    if wanted is None and not on_this_machine(url):
        return f"GPU power is not measured: {REMOTE}"
    try:
        gpus = NvmlGpus(environ)
    except UnavailableError as error:
        return f"GPU power is not measured: {error}"
    gpus.close()
    several = f"; {EXTRA_GPUS}" if len(gpus.names) > 1 else ""
    where = "" if on_this_machine(url) else ", of this machine, whether or not the server uses them"
    return f"GPU power is measured: {', '.join(gpus.names)}{where}{several}"
