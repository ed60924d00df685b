"""A table: its cells, and the document with their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ebbench.analysis.documents import Column, Document
from ebbench.config.defaults import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.errors import UnknownNameError, UsageError
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec

Outputs = Literal["forced", "profile"]


@dataclass(frozen=True)
class PaperOptions:
    """Options that override those of a table's own protocol; empty means: as in the paper.

    ``policies`` are run in addition to the table's own. ``outputs``: output lengths fixed as in the published scripts,
    or drawn from the workload's profile. ``ttft_s`` and ``tpot_ms``: SLO targets.
    """

    devices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    num_prompts: int | None = None
    seeds: int | None = None
    grid: bool = False
    outputs: Outputs = "forced"
    source: str = "profile"
    ttft_s: tuple[float, ...] = ()
    tpot_ms: tuple[float, ...] = ()

    def device(self, default: str = DEFAULT_DEVICE) -> str:
        """The device of an experiment for one device. Raises UsageError if several were given."""
        return _one("--device", self.devices, default)

    def model(self, default: str = DEFAULT_MODEL) -> str:
        """The model of an experiment for one model. Raises UsageError if several were given."""
        return _one("--model", self.models, default)

    def seed_range(self, least: int = 1) -> range:
        """Seeds of an experiment that repeats its runs at least ``least`` times. Raises UsageError for fewer."""
        if self.seeds is not None and self.seeds < least:
            raise UsageError(f"--seeds must be at least {least} here, for an interval over the runs, not {self.seeds}")
        return range(self.seeds or least)

    def check_names(self, workloads: Collection[str] = ()) -> None:
        """Raise UsageError for an unknown device, model or workload, a workload that is not among ``workloads``, and a
        file of one data set that would stand for several."""
        from ebbench.devices.profiles import find_model, find_profile
        from ebbench.workloads import load_workload
        from ebbench.workloads.options import is_recorded

        if self.source.startswith("file:") and len(self.workloads) != 1:
            raise UsageError(f"--source {self.source} holds one data set; name it with one --workload")
        for device in self.devices:
            find_profile(device)
        for model in self.models:
            find_model(model)
        for workload in self.workloads:
            if workloads and workload not in workloads:
                raise UnknownNameError("workload of this experiment", workload, workloads)
            if not is_recorded(workload):  # a trace file is read when the runs are made
                load_workload(workload)


def _one(option: str, names: Sequence[str], default: str) -> str:
    if len(names) > 1:
        raise UsageError(f"this experiment takes one {option}, not {' and '.join(names)}")
    return names[0] if names else default


@dataclass(frozen=True)
class PaperTable:
    """One published table. ``whole``: keep the run directories of its cells, not only their figures.

    ``reads``: the options of ``ebbench tables`` that its cells or its document depend on, by parameter name.
    ``workloads``: the only supported ones; empty: any. ``published_on``: device and model of the published figures,
    where the table takes one of each and would show them beside another's.
    """

    name: str
    title: str
    cells: Callable[[PaperOptions], list[RunSpec]]
    document: Callable[[PaperOptions, RunStore], Document]
    reads: tuple[str, ...]
    whole: bool = True
    aliases: tuple[str, ...] = field(default=())
    workloads: tuple[str, ...] = ()
    published_on: tuple[str, str] | None = None

    def filled(self, options: PaperOptions, store: RunStore) -> Document:
        """The document, which says where the runs are not in the published setting and then leaves that out."""
        document = self.document(options, store)
        deviations = self._deviations(options)
        return _not_as_published(document, deviations) if deviations else document

    def _deviations(self, options: PaperOptions) -> tuple[str, ...]:
        said = []
        if options.num_prompts is not None and "num_prompts" in self.reads:
            said.append(f"{options.num_prompts:,} requests a run")
        if self.published_on is not None:
            device, model = self.published_on
            if options.device(device) != device:
                said.append(f"device {options.device(device)}")
            if options.model(model) != model:
                said.append(f"model {options.model(model)}")
        return tuple(said)


def _not_as_published(document: Document, deviations: tuple[str, ...]) -> Document:
    """Without the columns of published figures and of differences from them; titled and noted with what was run."""
    sections = []
    for section in document.sections:
        kept = [index for index, column in enumerate(section.columns) if not _of_print(column)]
        rows = tuple(tuple(row[index] for index in kept) for row in section.rows)
        sections.append(replace(section, columns=tuple(section.columns[index] for index in kept), rows=rows))
    run = ", ".join(deviations)
    note = (
        f"Run with {run}, not in the published setting: published figures are left out, and numbers named below are "
        "those of the table as it is by default."
    )
    notes = (note, *document.notes)
    return replace(document, title=f"{document.title} ({run})", sections=tuple(sections), notes=notes)


def _of_print(column: Column) -> bool:
    return column.name in ("published", "diff") or column.group.startswith("published")


def figure(store: RunStore, cell: RunSpec, key: str, scale: float = 1.0) -> float | None:
    """One figure of a cell; None if it has not been run."""
    found = store.get(cell)
    return None if found is None else found.get(key, scale)


def mean_figure(store: RunStore, cells: Sequence[RunSpec], key: str) -> float | None:
    """Mean over cells that differ in their seed; None unless all have been run."""
    values = [figure(store, cell, key) for cell in cells]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def measured(store: RunStore, cell: RunSpec) -> Measured | None:
    """The cell's result; None if it has not been run."""
    return store.get(cell)


def pending(store: RunStore, cells: Sequence[RunSpec]) -> tuple[str, ...]:
    """A note with the number of cells still to be run; empty if there are none."""
    absent = len(store.missing(cells))
    if not absent:
        return ()
    return (f"{absent} of {len(set(cells))} runs have not been made with this version of the code; --run makes them.",)
