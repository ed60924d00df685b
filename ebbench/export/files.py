"""Writes runs in the formats of other tools, as files in a directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ebbench.analysis.summary import summarise
from ebbench.export.llm_d import llm_d_report
from ebbench.export.otava import otava_config, series_of
from ebbench.export.vllm_json import vllm_result
from ebbench.records import files
from ebbench.records.run import Run


def export(kind: str, runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write one file per run (``otava``: per series); returns the paths.

    Raises RunError, and DataError for damaged runs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return EXPORTS[kind](runs, directory)


def _llm_d(runs: Sequence[Run], directory: Path) -> list[Path]:
    return _documents(runs, directory, "llm-d.json", lambda run: llm_d_report(run, summarise(run)))


def _vllm(runs: Sequence[Run], directory: Path) -> list[Path]:
    return _documents(runs, directory, "vllm.json", lambda run: vllm_result(run, summarise(run)))


def _documents(
    runs: Sequence[Run], directory: Path, ending: str, convert: Callable[[Run], dict[str, Any]]
) -> list[Path]:
    written = []
    for name, run in zip(_names(runs), runs, strict=True):
        path = directory / f"{name}.{ending}"
        files.write_bytes(json.dumps(convert(run), indent=2, allow_nan=False).encode() + b"\n", path)
        written.append(path)
    return written


def _names(runs: Sequence[Run]) -> list[str]:
    """One unique name per run: the directory's, with its parent's or a number if several runs share it."""
    names: list[str] = []
    for run in runs:
        wanted = candidate = _unique(run, runs)
        number = 1
        while candidate in names:
            number += 1
            candidate = f"{wanted}-{number}"
        names.append(candidate)
    return names


def _unique(run: Run, runs: Sequence[Run]) -> str:
    """The run directory's name, preceded by its parent's if another run has the same name."""
    name = run.path.resolve().name
    same = [other for other in runs if other.path.resolve().name == name]
    return name if len(same) == 1 else f"{run.path.resolve().parent.name}-{name}"


def _otava(runs: Sequence[Run], directory: Path) -> list[Path]:
    series = series_of(runs)
    written = []
    for each in series:
        written.append(directory / f"{each.name}.csv")
        files.write_bytes(each.csv.encode(), written[-1])
    files.write_bytes(otava_config(series).encode(), directory / "otava.yaml")
    return [*written, directory / "otava.yaml"]


EXPORTS: dict[str, Callable[[Sequence[Run], Path], list[Path]]] = {"llm-d": _llm_d, "vllm": _vllm, "otava": _otava}
