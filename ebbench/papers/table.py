"""A table or figure of a paper: its cells, the words about it, and the document or chart with the cells' results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import msgspec

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, relative
from ebbench.errors import DataError, UsageError
from ebbench.foreign.documents import load_toml
from ebbench.papers.options import PaperOptions
from ebbench.runs.store import Measured, RunStore, with_progress
from ebbench.spec.run import RunSpec

# What is said about each paper's tables, figures and claims: ``eb.toml``, ``deferred.toml``, ``staggered.toml``.

PAPERS = ("eb", "deferred", "staggered")
T = TypeVar("T")
Agreement = Literal["same", "same direction", "in part", "differs", "no numbers in print"]


class PaperItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One numbered table, figure or claim of a paper. ``command``: arguments of ``ebbench``, empty if there is none.

    ``remark``: what we saw; ``checked``: the day on which ours was last made or compared.
    """

    name: str
    shows: str
    command: str = ""
    agreement: Agreement
    checked: date
    remark: str


class TableText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is said of a table: its ``title`` in the list, the ``heading`` above it, ``notes`` below, one per paragraph.

    Names in braces, in notes and captions, are constants of its module or shared texts of its paper.
    """

    title: str
    heading: str
    notes: str = ""


class FigureText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is said of a figure: its ``title`` in the list and its ``caption``."""

    title: str
    caption: str


class PaperTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of one paper: its name, texts by the name of a table or figure, texts that several of them share, and
    all that it prints, in its order."""

    paper: str
    shared: dict[str, str] = {}
    tables: dict[str, TableText] = {}
    figures: dict[str, FigureText] = {}
    items: tuple[PaperItem, ...] = ()


@cache
def paper_texts(paper: str) -> PaperTexts:
    """The texts of one of PAPERS."""
    return load_toml(Path(__file__).with_name(f"{paper}.toml"), PaperTexts)


def one_line(text: str) -> str:
    """A text of such a file without its line breaks."""
    return " ".join(text.split())


class _Facts(dict[str, Any]):
    """Constants by name; a name that is none of them is that of a shared text."""

    def __init__(self, constants: Mapping[str, Any], texts: PaperTexts) -> None:
        super().__init__(constants, paper=texts.paper)
        self._shared = texts.shared

    def __missing__(self, name: str) -> str:
        return self.filled(self._shared[name])

    def filled(self, text: str) -> str:
        """The text in one line, with values for names in braces."""
        return one_line(text).format_map(self)


@dataclass(frozen=True)
class Published:
    """Devices and models that a table's or figure's published values are of."""

    devices: tuple[str, ...]
    models: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """What was run in place of the published setting, in words, and whether published values may stand beside it."""

    deviations: tuple[str, ...]
    beside_print: bool


class _Asking(RunStore):
    """Runs of another store, of which it keeps what was asked for; without one, no run has been made."""

    def __init__(self, store: RunStore | None = None) -> None:
        self._store, self.cells = store, dict[RunSpec, Measured | None]()

    def get(self, cell: RunSpec) -> Measured | None:
        """The run of that store, which is looked for once: a table asks for each of its figures."""
        if cell not in self.cells:
            self.cells[cell] = None if self._store is None else self._store.get(cell)
        return self.cells[cell]


@dataclass(frozen=True)
class Experiment(ABC):
    """What tables and figures have in common.

    ``reads``: the options of ``ebbench tables`` or ``figures`` that its content depends on, by parameter name.
    ``runs``: its cells, where they are not all that its content asks for. ``whole``: keep the run directories of its
    cells, not only their figures. ``workloads``: the only supported ones; empty: any. ``published_on``: what its values
    are of by default or in print, where it reads a device or a model. ``facts``: constants that its texts name in
    braces.
    """

    name: str
    reads: tuple[str, ...]
    _: KW_ONLY
    runs: Callable[[PaperOptions], list[RunSpec]] | None = None
    whole: bool = True
    workloads: tuple[str, ...] = ()
    published_on: Published | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def texts(self) -> PaperTexts:
        """The texts of its paper."""
        for texts in map(paper_texts, PAPERS):
            if self.name in texts.tables or self.name in texts.figures:
                return texts
        raise KeyError(self.name)

    @property
    def title(self) -> str:
        """Its title in the list of tables or figures."""
        return (self.texts.tables.get(self.name) or self.texts.figures[self.name]).title

    @abstractmethod
    def ask(self, options: PaperOptions, store: RunStore) -> object:
        """Make its content of the runs in a store."""

    def cells(self, options: PaperOptions, store: RunStore | None = None) -> list[RunSpec]:
        """The runs that it is made of; some follow from the results of others, which ``store`` has."""
        asking = _Asking(store)
        if self.runs is None:
            self.ask(options, asking)
        return self._asked(options, asking)

    def _asked(self, options: PaperOptions, asking: _Asking) -> list[RunSpec]:
        return list(asking.cells) if self.runs is None else self.runs(options)

    def worded(self, text: str) -> str:
        """One of its texts in one line, with constants and shared texts for names in braces. Raises KeyError."""
        return _Facts(self.facts, self.texts).filled(text)

    def setting(self, options: PaperOptions) -> Setting:
        """How the options differ from the published setting.

        Values of print are shown if the number of requests is theirs and a device and a model of theirs is among the
        chosen ones; an item gives none for the others.
        """
        deviations, beside = [], True
        if options.num_prompts is not None and "num_prompts" in self.reads:
            deviations.append(f"{options.num_prompts:,} requests a run")
            beside = False
        if (published := self.published_on) is not None:
            chosen = (("device", options.devices, published.devices), ("model", options.models, published.models))
            for kind, named, printed in chosen:
                deviations += [f"{kind} {name}" for name in named if name not in printed]
                beside = beside and (not named or any(name in printed for name in named))
        if options.outputs != "forced" and "outputs" in self.reads:
            deviations.append("answers of table 9's lengths")
        return Setting(tuple(deviations), beside)


Sections = Sequence[Section]


def each(
    section: Callable[..., Section], keys: Callable[[PaperOptions], Iterable[tuple[Any, ...]]]
) -> Callable[[PaperOptions, RunStore], Sections]:
    """A table's sections: ``section(options, store, *key)`` for each of ``keys``."""
    return lambda options, store: [section(options, store, *key) for key in keys(options)]


@dataclass(frozen=True)
class PaperTable(Experiment):
    """One published table. ``sections`` lays out the results of its cells next to the published values; ``findings``:
    notes that depend on the options or the results, after those of its text."""

    sections: Callable[[PaperOptions, RunStore], Sections]
    findings: Callable[[PaperOptions, RunStore, Sections], Iterable[str]] | None = field(default=None, kw_only=True)
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    def ask(self, options: PaperOptions, store: RunStore) -> Sections:
        """Its sections."""
        return self.sections(options, store)

    def document(self, options: PaperOptions, store: RunStore) -> Document:
        """Sections and notes, of which the last says how many runs are still to be made."""
        text = self.texts.tables[self.name]
        asking = _Asking(store)
        sections = tuple(self.sections(options, asking))
        notes = [self.worded(note) for note in text.notes.split("\n\n") if note]
        notes += self.findings(options, asking, sections) if self.findings else ()
        cells = self._asked(options, asking)
        if absent := len(store.missing(cells)):
            runs = f"{absent} of {len(set(cells))} runs"
            notes.append(f"{runs} have not been made with this version of the code; --run makes them.")
        return Document(self.name, text.heading, sections, tuple(notes))

    def filled(self, options: PaperOptions, store: RunStore) -> Document:
        """The document, which says where the runs are not in the published setting and then leaves that out.

        Raises UsageError if the options leave no row.
        """
        document, setting = self.document(options, store), self.setting(options)
        if not any(section.rows for section in document.sections) and not self.cells(options):
            raise UsageError(f"{self.name} has no row for {', '.join(setting.deviations) or 'these options'}")
        return _titled(document, setting) if setting.deviations else document


def _titled(document: Document, setting: Setting) -> Document:
    """Titled and noted with what was run; without published figures and differences from them, where they are of
    another setting."""
    sections = document.sections if setting.beside_print else tuple(map(_without_print, document.sections))
    run = ", ".join(setting.deviations)
    printed = any(_printed_groups(section) for section in document.sections)
    notes = (describe_setting(setting, "table", printed=printed), *document.notes)
    return replace(document, title=f"{document.title} ({run})", sections=sections, notes=notes)


def describe_setting(setting: Setting, item: str, *, printed: bool = True) -> str:
    """What was run in place of the own setting of a table or figure, in words; ``printed``: print has values of it."""
    run = f"Run with {', '.join(setting.deviations)} instead of the {item}'s own setting"
    if not printed:
        return f"{run}."
    beside = "" if setting.beside_print else ", so that no published figures stand beside it"
    return f"{run}{beside}. Numbers named below are those of the {item} as it is by default."


def _printed_groups(section: Section) -> set[str]:
    return {column.group for column in section.columns if column.name == "published"}


def _without_print(section: Section) -> Section:
    printed = _printed_groups(section)
    kept = [index for index, column in enumerate(section.columns) if not _of_print(column, printed)]
    rows = tuple(tuple(row[index] for index in kept) for row in section.rows)
    return replace(section, columns=tuple(section.columns[index] for index in kept), rows=rows)


def _of_print(column: Column, printed: Collection[str]) -> bool:
    """Whether a column holds published values or differences from them; ``printed``: groups with a published column.

    A difference in another group is one between values of ours.
    """
    of_print = column.name == "published" or column.group.startswith("published")
    return of_print or (column.name == "diff" and column.group in printed)


def figure(store: RunStore, cell: RunSpec, key: str, scale: float = 1.0) -> float | None:
    """One figure of a cell; None if it has not been run."""
    measured = store.get(cell)
    return None if measured is None else measured.get(key, scale)


def of_all(reduce: Callable[[list[float]], T], values: Iterable[float | None]) -> T | None:
    """``reduce`` of the values; None if there is none or one is unknown."""
    known = list(values)
    complete = [value for value in known if value is not None]
    return reduce(complete) if known and len(complete) == len(known) else None


def mean_figure(store: RunStore, cells: Sequence[RunSpec], key: str, scale: float = 1.0) -> float | None:
    """Mean over cells that differ in their seed; None unless all have been run."""
    mean = of_all(fmean, (figure(store, cell, key) for cell in cells))
    return None if mean is None else mean * scale


def ours(*names: str, group: str = "") -> tuple[Column, ...]:
    """Columns of ours, all in one group."""
    return tuple(Column(name, group=group, ours=True) for name in names)


def beside(group: str, *further: str, show: Callable[[float], str] | None = None) -> tuple[Column, ...]:
    """Columns for published and ours without their difference, then further ones of ours."""
    names = ("ours", *further)
    return (
        Column("published", group=group, show=show),
        *(Column(name, group=group, ours=True, show=show) for name in names),
    )


def changes(group: str) -> tuple[Column, Column]:
    """Columns for a change as published and in ours."""
    return Column("published", "change", group), Column("ours", "change", group, True)


def policy_columns(
    policies: Iterable[str], further: Iterable[str] = (), gain: str = "eb vs v1", *, vs_v1: bool = False,
    points: bool = False,
) -> tuple[Column, ...]:  # fmt: skip
    """Published, ours and their difference by policy, in ``points`` of percentages; ours of further ones, with
    ``vs_v1`` also against v1; and unless ``gain`` is empty that of EB over v1."""
    columns = [column for policy in policies for column in compared(policy, points=points)]
    for policy in further:
        columns += [Column("ours", group=policy, ours=True), *([Column("vs v1", "change", policy)] if vs_v1 else [])]
    return (*columns, *(changes(gain) if gain else ()))


def policy_row(
    published: Mapping[str, Value], ours: Mapping[str, Value], *, vs: str = "", gain: bool = True, points: bool = False
) -> tuple[Value, ...]:
    """The values of the columns of :func:`policy_columns`; policies that are not published are further ones.

    ``vs``: the name of v1, against which further ones are shown too.
    """
    row = [value for policy in published for value in comparison(published[policy], ours[policy], points=points)]
    for policy, rate in ours.items():
        if policy not in published:
            row += [rate, *([relative(rate, ours[vs])] if vs else [])]
    gains = [relative(rates["eb"], rates["v1"]) for rates in (published, ours)] if gain else []
    return (*row, *gains)


@dataclass(frozen=True)
class PaperFigure(Experiment):
    """One published figure. ``chart`` returns an altair chart, with published values if its last argument is true; the
    ``caption`` of its text says which parts are ours."""

    chart: Callable[[PaperOptions, RunStore, bool], Any]

    def ask(self, options: PaperOptions, store: RunStore) -> object:
        """Its chart."""
        return self.chart(options, store, False)

    @property
    def caption(self) -> str:
        """The words below it."""
        return self.worded(self.texts.figures[self.name].caption)

    def drawn(self, options: PaperOptions, store: RunStore) -> tuple[Any, str]:
        """The chart and its caption, which says what was run where that is not the published setting; published values
        of another setting are left out."""
        setting = self.setting(options)
        setting_text = f"{describe_setting(setting, 'figure')} " if setting.deviations else ""
        return self.chart(options, store, setting.beside_print), setting_text + self.caption


def no_runs(_options: PaperOptions) -> list[RunSpec]:
    """For tables and figures that are computed without a run."""
    return []


def make_runs(
    table: PaperTable | PaperFigure, options: PaperOptions, store: RunStore, *, workers: int | None, quiet: bool
) -> None:
    """Execute the missing runs of a table or figure, then those that follow from them, with progress on stderr."""
    while absent := store.missing(table.cells(options, store), whole=table.whole):
        with_progress(table.name, absent, store, whole=table.whole, workers=workers, quiet=quiet)


def drawn(
    figure: PaperFigure, options: PaperOptions, store: RunStore, *, run: bool, workers: int | None, quiet: bool
) -> tuple[Any, str]:
    """A figure and its caption, of stored runs; ``run`` executes missing ones. Raises DataError for missing ones."""
    if run:
        make_runs(figure, options, store, workers=workers, quiet=quiet)
    asking = _Asking(store)
    chart, caption = figure.drawn(options, asking)
    if missing := len(store.missing(asking.cells)):
        raise DataError(
            f"{missing} of {len(asking.cells)} runs of {figure.name} are not stored in {store.root}; add --run"
        )
    return chart, caption
