"""Reads output lengths for a hazard analysis: from a workload, a trace, a list of numbers or a stored run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ebbench.errors import DataError, InputFileError, UsageError
from ebbench.foreign.opening import DOCUMENT_BYTES, read_text
from ebbench.records.run import MANIFEST, Run


@dataclass(frozen=True)
class OutputLengths:
    """Output tokens of complete responses, and their source."""

    output_tokens: npt.NDArray[np.int64]
    mean_input: float | None
    name: str
    source: str


def read_lengths(
    what: str, *, source: str = "auto", num_prompts: int | None = None, seed: int = 0, **plan: str | int | None
) -> OutputLengths:
    """Lengths of a workload name, ``log:FILE``, a TOML file, a run directory, or a file of numbers or of a trace.

    The other arguments are those of build_plan. Raises UsageError, InputFileError, DataError.
    """
    path = Path(what).expanduser()
    chosen = {"source": None if source == "auto" else source, "num_prompts": num_prompts, "seed": seed or None, **plan}
    if (path / MANIFEST).exists():
        _refuse(chosen, f"{path} is a run")
        return _of_run(path)
    if path.is_dir():
        raise DataError(f"{path}: holds no {MANIFEST}; give one run directory")
    if path.is_file() and path.suffix != ".toml":
        numbers = _numbers(path)
        if numbers is not None:
            _refuse(chosen, f"{path} is a list of lengths")
            return OutputLengths(numbers, None, path.name, f"file:{path}")
        what = f"trace:{path}"
    return _of_plan(what, source, num_prompts, seed, plan)


def _refuse(chosen: Mapping[str, str | int | None], owner: str) -> None:
    """Raise UsageError for options that do not apply to a stored run or a list."""
    given = ["--" + name.replace("_", "-") for name, value in chosen.items() if value is not None]
    if given:
        raise UsageError(f"{owner} and is used completely; leave out {', '.join(given)}")


def _of_run(path: Path) -> OutputLengths:
    run = Run.load(path)
    table = run.table("requests", ["status", "input_tokens", "output_tokens"])
    done = table.filter(pc.equal(table["status"], "ok"))
    if not done.num_rows:
        raise DataError(f"{path}: no request completed, so there are no output lengths")
    outputs = done["output_tokens"].to_numpy().astype(np.int64)
    return OutputLengths(outputs, float(pc.mean(done["input_tokens"]).as_py()), path.name, f"run:{path}")


def _of_plan(what: str, source: str, num_prompts: int | None, seed: int, plan: dict[str, Any]) -> OutputLengths:
    from ebbench.workloads import build_plan
    from ebbench.workloads.options import is_recorded

    # A closed loop, since only lengths are needed, not the times of a trace.
    scenario = "saturated" if is_recorded(what) else None
    built = build_plan(what, scenario, num_prompts=num_prompts, seed=seed, source=source, with_text=False, **plan)
    outputs = built.table["output_tokens"].to_numpy().astype(np.int64)
    mean_input = float(built.table["input_tokens"].to_numpy().mean())
    return OutputLengths(outputs, mean_input, what, str(built.facts.get("source", "")))


def _numbers(path: Path) -> npt.NDArray[np.int64] | None:
    """One length per line after an optional heading; None if the file has another format. Raises InputFileError."""
    lines = [line.strip() for line in read_text(path, DOCUMENT_BYTES).splitlines()]
    filled = [line for line in lines if line]
    if filled and not filled[0].isdigit() and len(filled) > 1 and filled[1].isdigit():
        filled = filled[1:]
    if not filled:
        raise UsageError(f"{path} is empty; give one output length per line, or a trace")
    if not filled[0].isdigit():
        return None
    for number, line in enumerate(lines, start=1):
        if line in filled and not (line.isdigit() and int(line) >= 1):
            raise InputFileError(path, f"expected an output length of at least one token, found {line[:40]!r}", number)
    return np.array([int(line) for line in filled], np.int64)
