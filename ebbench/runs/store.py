"""The store of results: one directory per cell, named by its key, so that a command can be killed at any moment.

::

    ROOT/<name>-<key>/cell.json     the cell, its figures; written last, so a directory with it is complete
    ROOT/<name>-<key>/...           the run's tables and manifest, where whole runs were asked for
    ROOT/unfinished/...             runs on real servers that were cut off; ``ebbench recover`` rebuilds them
"""

from __future__ import annotations

import errno
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ebbench.analysis.environment import unusual_options
from ebbench.analysis.summary import summarise
from ebbench.analysis.validity import of_device
from ebbench.errors import DataError, EbbenchError, InterruptedRunError, RunError
from ebbench.records import files
from ebbench.records.manifest import plan_hash
from ebbench.records.run import LONGEST_NAME, MANIFEST, PARTIAL, Run, find_runs, unused
from ebbench.records.warnings import RunWarning, stored_warning
from ebbench.runs.execute import Made, Task, make, phase_figures
from ebbench.runs.key import directory_name, result_key, with_absolute_paths
from ebbench.runs.pool import InProcess, Outcome, Pool, make_pool
from ebbench.runs.prepare import device_of, plan_of
from ebbench.spec.run import RunSpec, stored_form
from ebbench.spec.server import is_server
from ebbench.traffic.spec import load_scenario
from ebbench.workloads.mixture import check_workload

CELL, UNFINISHED = "cell.json", "unfinished"
_TEMPORARY, _LEFT_BEHIND_S = ".cell-", 3600.0
_LONGEST_CELL = 130
"""Letters in the longest path of a cell's directory within a store."""


@dataclass(frozen=True)
class Measured:
    """Figures of a finished cell under the keys of a summary, those of its phases, and the path of its run.

    ``seconds``: wall time of the run; ``worker``: host and process id; ``caveats``: those of the device.
    """

    figures: Mapping[str, Any]
    phases: tuple[Mapping[str, Any], ...]
    path: Path
    seconds: float = 0.0
    worker: str = ""
    caveats: tuple[RunWarning, ...] = ()

    def get(self, key: str, scale: float = 1.0) -> float | None:
        """One figure times ``scale``; None if it is undefined."""
        value = self.figures.get(key)
        return None if value is None else float(value) * scale

    @property
    def valid(self) -> bool:
        """Whether the run is valid."""
        return bool(self.figures.get("valid", True))

    @property
    def run(self) -> Run:
        """The stored run. Raises DataError if only its figures were kept."""
        if not (self.path / MANIFEST).exists():
            raise DataError(f"{self.path}: only the figures of this run were kept; delete it and run it again")
        return Run.load(self.path)


class RunStore:
    """Cells in one directory. ``adopted``: runs of the user that replace the cells they match."""

    def __init__(self, root: Path, adopted: Iterable[Path] = ()) -> None:
        self.root = root
        self._adopted = _adopt(list(adopted))
        self._known: dict[RunSpec, Measured] = {}

    def get(self, cell: RunSpec) -> Measured | None:
        """The result of a cell; None if it was not run with this version of the code."""
        if cell not in self._known:
            measured = self._own_run(cell) or _read(self.root / directory_name(cell))
            if measured is None:
                return None
            self._known[cell] = measured
        return self._known[cell]

    def missing(self, cells: Iterable[RunSpec], *, whole: bool = False) -> list[RunSpec]:
        """Cells without a result, each once, longest first. ``whole``: also those of which only figures were kept.

        A real-time run that was INVALID is measured again; a simulated one would give the same result.
        """
        absent = [cell for cell in dict.fromkeys(cells) if not self._has(cell, whole)]
        return sorted(absent, key=lambda cell: -cell.weight)

    def _has(self, cell: RunSpec, whole: bool) -> bool:
        measured = self.get(cell)
        if measured is None or (cell.real_time and not measured.valid):
            return False
        return not whole or (measured.path / MANIFEST).exists()

    def stored_since(self, cells: Iterable[RunSpec]) -> float | None:
        """When the oldest of these cells was stored, in seconds since 1970; None without any."""
        files = (self.root / directory_name(cell) / CELL for cell in cells)
        return min((path.stat().st_mtime for path in files if path.exists()), default=None)

    def open(self) -> None:
        """Create the directory, and remove what killed processes left in it. Raises RunError if that fails."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {error.filename or self.root}: {error.strerror or error}") from error
        try:
            with suppress(FileNotFoundError):
                (self.root.absolute() / ("x" * _LONGEST_CELL) / ("x" * LONGEST_NAME)).lstat()
        except OSError as error:
            raise RunError(f"cannot store runs in {self.root}: {error.strerror or error}") from error
        for path in self.root.glob(f"{_TEMPORARY}*"):
            if time.time() - _last_written_s(path) > _LEFT_BEHIND_S:
                self.abandon(path)

    def temporary(self, cell: RunSpec) -> Path:
        """A path for the directory of a running cell; hidden, not created yet, and used by no other command."""
        return self.root / f"{_TEMPORARY}{result_key(cell)}-{secrets.token_hex(4)}"

    def abandon(self, directory: Path) -> None:
        """Drop the directory of an unfinished run; measurements of real servers are kept."""
        if (directory / PARTIAL).exists() or (directory / MANIFEST).exists():
            kept = unused(self.root / UNFINISHED / directory.name.removeprefix(_TEMPORARY))
            kept.parent.mkdir(exist_ok=True)
            directory.rename(kept)
        else:
            shutil.rmtree(directory, ignore_errors=True)

    def keep(self, cell: RunSpec, outcome: Outcome[Made], directory: Path | None = None) -> Measured:
        """Store a result, with the run in ``directory`` if there is one. Raises RunError if the disk is full."""
        made = outcome.value
        assert made is not None
        final = self.root / directory_name(cell)
        figures = dict(made.figures) | ({"run_dir": str(final)} if directory is not None else {})
        measured = Measured(figures, made.phases, final, outcome.seconds, outcome.worker, made.caveats)
        try:
            working = directory or Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
            content = {
                "key": result_key(cell), "cell": stored_form(cell), "figures": figures, "phases": list(made.phases),
                "caveats": made.caveats, "seconds": outcome.seconds, "worker": outcome.worker,
            }  # fmt: skip
            try:
                files.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", working / CELL)
                _settle(working, final, replace_it=cell.real_time)
            except BaseException:  # also an interruption: incomplete figures are dropped, a measured run is kept
                if directory is None:
                    shutil.rmtree(working, ignore_errors=True)
                raise
        except OSError as error:
            raise RunError(f"cannot store {final}: {error.strerror or error}") from error
        self._known[cell] = measured
        return measured

    def _own_run(self, cell: RunSpec) -> Measured | None:
        if not self._adopted or cell.cluster.topology is not None:  # runs of several instances are not matched
            return None
        options = cell.server
        identity = (plan_hash(plan_of(cell)), cell.policy, cell.device, cell.model)
        conditions = (options.max_num_seqs, options.max_num_batched_tokens, options.warmup, options.async_scheduling)
        path = self._adopted.get((*identity, *conditions, unusual_options(asdict(options))))
        if path is None:
            return None
        run = Run.load(path)
        caveats = of_device(run.manifest.engine, run.manifest.warnings)
        return Measured(summarise(run).to_dict(), phase_figures(run), path, caveats=caveats)


def _settle(working: Path, final: Path, *, replace_it: bool) -> None:
    """Move a finished cell to its final path.

    A result stored by another process meanwhile is kept if it is as complete.
    """
    while True:
        holds_as_much = (final / MANIFEST).exists() or not (working / MANIFEST).exists()
        if (final / CELL).exists() and holds_as_much and not replace_it:
            shutil.rmtree(working)
            return
        replaced = final.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):
            final.rename(replaced)  # at once: another process may be reading it, or replacing it too
            shutil.rmtree(replaced, ignore_errors=True)
        try:
            working.rename(final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else one was stored meanwhile
                raise


def _last_written_s(directory: Path) -> float:
    """When a file of the directory was last written, in seconds since 1970; now, if it is being moved or removed."""
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return time.time()


def _read(directory: Path) -> Measured | None:
    path = directory / CELL
    if not path.exists():
        return None
    content = files.read_stored_json(path)
    try:
        parts, caveats = tuple(content["phases"]), tuple(map(stored_warning, content["caveats"]))
        return Measured(content["figures"], parts, directory, content["seconds"], content["worker"], caveats)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); delete the directory to run the cell again") from None


def _adopt(paths: list[Path]) -> dict[tuple[Any, ...], Path]:
    """Runs by the properties that identify a cell of one simulated instance."""
    by_conditions = {}
    for path in find_runs(paths):
        manifest = Run.load(path).manifest
        if {"model_shape", "device_profile"} & manifest.facts.keys():  # cells name bundled models and devices
            continue
        sizes = (int(manifest.options.get(name, 0)) for name in ("max_num_seqs", "max_num_batched_tokens"))
        conditions = int(manifest.options.get("warmup", 0)), bool(manifest.options.get("async_scheduling", True))
        by_conditions[
            manifest.plan_hash,
            manifest.policy,
            manifest.device,
            manifest.model,
            *sizes,
            *conditions,
            unusual_options(manifest.options),
        ] = path
    return by_conditions


# Executes the cells missing in a store; each result is stored as soon as it is finished.

Stored = Callable[[RunSpec, Measured | EbbenchError, Outcome[Made]], None]
"""Called after every cell with its result or its error."""
Job = Callable[[Task], Made]


def run_missing(
    cells: Sequence[RunSpec],
    store: RunStore,
    *,
    workers: int | None = None,
    whole: bool = True,
    done: Callable[[RunSpec], None] | None = None,
) -> int:
    """Run the cells missing in the store; returns their number. ``whole`` keeps run directories, not only figures.

    Raises UsageError for unknown names before the first run, and the error of the first failing cell; cells finished
    before a failure or an interruption are kept.
    """
    todo = store.missing(cells, whole=whole)
    pool = make_pool(workers, len(todo)) if not any(cell.real_time for cell in todo) else InProcess()
    if not todo:
        return 0
    check_names(todo)

    def stored(cell: RunSpec, result: Measured | EbbenchError, _outcome: Outcome[Made]) -> None:
        if isinstance(result, EbbenchError):
            raise result
        if done is not None:
            done(cell)

    run_cells(todo, store, pool, whole=whole, stored=stored)
    return len(todo)


def with_progress(
    label: str, cells: Sequence[RunSpec], store: RunStore, *, whole: bool, workers: int | None, quiet: bool
) -> None:
    """Execute the cells that the store lacks, with a progress line on stderr."""
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown

    missing = store.missing(cells, whole=whole)
    if not missing:
        return

    with shown(Console(stderr=True), Work(label, len(missing)), quiet=quiet) as work:

        def done(_cell: RunSpec) -> None:
            work.done += 1

        try:
            run_missing(missing, store, workers=workers, whole=whole, done=done)
        except KeyboardInterrupt:
            others = len(store.missing(missing, whole=whole))
            raise InterruptedRunError(
                f"interrupted; {len(missing) - others} runs are kept in {store.root}; the same command continues "
                f"with the other {others}"
            ) from None


def run_cells(
    cells: Sequence[RunSpec], store: RunStore, pool: Pool, *, whole: bool, stored: Stored, job: Job = make
) -> None:
    """Run cells and store each result at once. Stops on an exception of ``stored`` or an interruption.

    Raises RunError if a result cannot be stored.
    """
    store.open()
    tasks = {}
    for cell in cells:
        directory = store.temporary(cell).resolve() if whole else None
        tasks[Task(with_absolute_paths(cell), directory)] = cell
    under_way: dict[RunSpec, Path] = {
        cell: task.directory for task, cell in tasks.items() if task.directory is not None
    }
    try:
        outcomes: Any = pool.outcomes(job, list(tasks))
        with closing(outcomes):
            for task, outcome in outcomes:
                cell = tasks[task]
                result: Measured | EbbenchError
                if outcome.error is not None:
                    result = outcome.error
                else:
                    result = store.keep(cell, outcome, task.directory)
                    under_way.pop(cell, None)
                stored(cell, result, outcome)
    finally:
        for directory in under_way.values():
            if directory.exists():
                store.abandon(directory)


def check_names(cells: Sequence[RunSpec]) -> None:
    """Raise UsageError for unknown names before the first run."""
    for cell in {(is_server(cell.engine), cell.device, cell.model, cell.cost): cell for cell in cells}.values():
        device_of(replace(cell, host=None))
    for name in dict.fromkeys(cell.plan.workload for cell in cells):
        check_workload(name)
    for name in dict.fromkeys(cell.plan.scenario for cell in cells if cell.plan.scenario is not None):
        load_scenario(name)
