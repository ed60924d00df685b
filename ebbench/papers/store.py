"""Where cells are kept: one run directory each, with a ``cell.json`` that holds its figures for a quick second look."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ebbench.analysis.summary import metrics_dict, summarise, summarise_phases
from ebbench.errors import DataError
from ebbench.papers.cells import Cell, code_fingerprint
from ebbench.records import files
from ebbench.records.manifest import plan_hash
from ebbench.records.run import MANIFEST, Run, find_runs

CELL = "cell.json"
DEFAULT_ROOT = Path("runs/papers")


@dataclass(frozen=True)
class Measured:
    """Figures of a finished cell under the keys of a summary, of each of its phases too, and where its run lies."""

    figures: Mapping[str, Any]
    phases: tuple[Mapping[str, Any], ...]
    path: Path

    def get(self, key: str, scale: float = 1.0) -> float | None:
        """One figure, times ``scale``; None where it is undefined."""
        value = self.figures.get(key)
        return None if value is None else float(value) * scale

    @property
    def run(self) -> Run:
        """The stored run. Raises DataError when only its figures were kept."""
        if not (self.path / MANIFEST).exists():
            raise DataError(f"{self.path}: only the figures of this run were kept; delete it and run it again")
        return Run.load(self.path)


class CellStore:
    """Cells under one directory. ``adopted`` are runs of the user's own that stand for the cells they answer."""

    def __init__(self, root: Path = DEFAULT_ROOT, adopted: Iterable[Path] = ()) -> None:
        self.root = root
        self._adopted = _adopt(list(adopted))
        self._known: dict[Cell, Measured] = {}

    def get(self, cell: Cell) -> Measured | None:
        """What is known of a cell; None when it has not been run with this version of the code."""
        if cell not in self._known:
            found = self._own_run(cell) or _read(self.root / cell.directory_name())
            if found is None:
                return None
            self._known[cell] = found
        return self._known[cell]

    def missing(self, cells: Iterable[Cell], *, whole: bool = False) -> list[Cell]:
        """Cells yet to be run, each once, longest first. ``whole``: also those of which only figures were kept."""
        absent = [cell for cell in dict.fromkeys(cells) if not self._has(cell, whole)]
        return sorted(absent, key=lambda cell: -cell.weight)

    def _has(self, cell: Cell, whole: bool) -> bool:
        found = self.get(cell)
        return found is not None and (not whole or (found.path / MANIFEST).exists())

    def _own_run(self, cell: Cell) -> Measured | None:
        if not self._adopted or type(cell) is not Cell:  # runs of several instances are not told apart here
            return None
        identity = (plan_hash(cell.plan()), cell.policy, cell.device, cell.model)
        sizes = (cell.max_num_seqs, cell.max_num_batched_tokens)
        path = self._adopted.get((*identity, *sizes, cell.warmup, cell.async_scheduling))
        return None if path is None else measured_from_run(path)


def measured_from_run(path: Path) -> Measured:
    """Figures of a stored run. Raises DataError."""
    run = Run.load(path)
    phases = summarise_phases(run)
    parts = [{"phase": part.phase, **metrics_dict(part.metrics)} for part in phases] if len(phases) > 1 else []
    return Measured(summarise(run).to_dict(), tuple(parts), path)


def keep(directory: Path, cell: Cell, measured: Measured, *, whole: bool) -> None:
    """Write ``cell.json``, last, so that a directory with one is complete. Not ``whole``: drop the run's tables."""
    if not whole:
        for path in directory.iterdir():
            path.unlink()
    content = {
        "cell": asdict(cell),
        "code": code_fingerprint(),
        "figures": dict(measured.figures),
        "phases": list(measured.phases),
    }
    files.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", directory / CELL)


def settle(temporary: Path, final: Path) -> None:
    """Give a finished cell its name. One that another process finished meanwhile stays, if it holds as much."""
    if (final / CELL).exists() and ((final / MANIFEST).exists() or not (temporary / MANIFEST).exists()):
        shutil.rmtree(temporary)
        return
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)


def _read(directory: Path) -> Measured | None:
    path = directory / CELL
    try:
        content = msgspec.json.decode(path.read_bytes())
        return Measured(content["figures"], tuple(content["phases"]), directory)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); delete the directory to run the cell again") from None


def _adopt(paths: list[Path]) -> dict[tuple[str, str, str, str, int, int, int, bool], Path]:
    found = {}
    for path in find_runs(paths):
        manifest = Run.load(path).manifest
        sizes = (int(manifest.options.get(name, 0)) for name in ("max_num_seqs", "max_num_batched_tokens"))
        how = int(manifest.options.get("warmup", 0)), bool(manifest.options.get("async_scheduling", True))
        found[manifest.plan_hash, manifest.policy, manifest.device, manifest.model, *sizes, *how] = path
    return found  # type: ignore[return-value]
