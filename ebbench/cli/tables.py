"""``ebbench tables``: the papers' tables with our results; phases and SLO surfaces of any run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli import completion
from ebbench.cli import paper_flags as paper
from ebbench.cli.options import grouped, opt, refuse_unused, runs_meant

if TYPE_CHECKING:
    from ebbench.analysis.documents import Document
    from ebbench.papers.table import PaperOptions, PaperTable

FORMATS = ("rich", "markdown", "latex", "html", "csv")


@dataclass(frozen=True)
class RunsFlags:
    """Where the runs of the table come from."""

    run: paper.Run = False
    runs: paper.Runs = Path("runs/papers")
    stored: Annotated[
        list[Path] | None,
        opt(
            "--from",
            help="Use your own runs for cells with the same plan, policy and settings.",
            panel=paper.RUNS,
        ),
    ] = None
    workers: paper.Workers = None


@dataclass(frozen=True)
class ChoiceFlags:
    """Options that override the table's protocol."""

    device: paper.Device = None
    model: paper.Model = None
    workload: paper.Workload = None
    policy: Annotated[
        list[str] | None,
        opt(
            "--policy",
            "-p",
            help="Policies in addition to the table's own.",
            panel=paper.CHOICE,
            complete=completion.policies,
        ),
    ] = None
    num_prompts: paper.NumPrompts = None
    seeds: Annotated[
        int | None,
        opt(
            "--seeds",
            help="Runs per cell, for tables 10, 11, 13 and e3. Default: 1; e3 takes 3 or more.",
            panel=paper.CHOICE,
        ),
    ] = None
    grid: Annotated[
        bool,
        opt(
            "--grid",
            help="Search each scheduler's best B and N instead of using the published ones.",
            panel=paper.CHOICE,
        ),
    ] = False
    outputs: Annotated[
        str,
        opt(
            "--outputs",
            help="forced (outputs as long as the scripts' limits) or profile (table 9).",
            panel=paper.CHOICE,
        ),
    ] = "forced"
    source: Annotated[
        str,
        opt(
            "--source",
            help="Lengths of tables 9 and 12: profile, hub, auto, or file:PATH (a copy of one data set).",
            panel=paper.CHOICE,
        ),
    ] = "profile"
    ttft: Annotated[str, opt("--ttft", help="TTFT targets in s, e.g. 2,5,10.", panel=paper.CHOICE)] = ""
    tpot: Annotated[str, opt("--tpot", help="TPOT targets in ms, e.g. 50,100.", panel=paper.CHOICE)] = ""
    by_phase: Annotated[bool, opt("--by-phase", help="Also show SLO surfaces per phase.", panel=paper.CHOICE)] = False

    def options(self) -> PaperOptions:
        """Options of the papers' tables. Raises UnknownNameError, UsageError."""
        from ebbench.engines.checks import check_counts
        from ebbench.papers.table import PaperOptions

        check_counts(seeds=self.seeds, num_prompts=self.num_prompts)
        return PaperOptions(
            tuple(self.device or ()),
            tuple(self.model or ()),
            tuple(self.workload or ()),
            _policies(self.policy or []),
            self.num_prompts,
            self.seeds,
            self.grid,
            paper.outputs(self.outputs),
            self.source,
            ttft_s=_numbers(self.ttft, "--ttft"),
            tpot_ms=_numbers(self.tpot, "--tpot"),
        )


_CHOICES = tuple(field.name for field in fields(ChoiceFlags))


@dataclass(frozen=True)
class TableOutputFlags:
    """Where the table goes, and in which form."""

    style: Annotated[str, opt("--format", "-f", help="rich, markdown, latex, html or csv.", panel=paper.OUTPUT)] = (
        "rich"
    )
    output: Annotated[Path | None, opt("--output", "-o", help="Write to this file.", panel=paper.OUTPUT)] = None
    quiet: paper.Quiet = False


@grouped
def tables(
    context: typer.Context,
    runs: RunsFlags,
    choice: ChoiceFlags,
    output: TableOutputFlags,
    name: Annotated[
        str, typer.Argument(help="list, table2, table3, ..., deferred-1; phases or slo for runs of your own (--from).")
    ] = "list",
) -> None:
    """Show a published table with our results: published, ours, difference.

    Results come from stored runs; --run executes the missing ones and stores them.
    """
    from ebbench.errors import UnknownNameError
    from ebbench.papers.registry import OF_RUNS, find_table

    if output.style not in FORMATS:
        raise UnknownNameError("format", output.style, FORMATS)
    if name == "list":
        refuse_unused(context, ("run", *_CHOICES), (), "without a table's name `ebbench tables`")
        _list()
    elif name in OF_RUNS:
        refuse_unused(context, ("run", *_CHOICES), OF_RUNS[name], f"`ebbench tables {name}`")
        _emit(_of_runs(name, runs.stored or [], choice), output)
    else:
        table, options = find_table(name), choice.options()
        refuse_unused(context, _CHOICES, table.reads, table.name)
        options.check_names(table.workloads)
        _emit(_filled(table, options, runs, quiet=output.quiet), output)


def _list() -> None:
    from ebbench.papers.registry import TABLES

    for table in TABLES:
        typer.echo(f"{table.name:12} {table.title}")
    typer.echo(f"{'phases':12} your own runs by phase, with recovery times (--from RUN)")
    typer.echo(f"{'slo':12} attainment of your own runs over TTFT and TPOT targets (--from RUN)")


def _policies(names: list[str]) -> tuple[str, ...]:
    from ebbench.runs.prepare import parse_policies

    return tuple(spec.name for spec in parse_policies(names)) if names else ()


def _numbers(text: str, option: str) -> tuple[float, ...]:
    from ebbench.config.declare import Setting, parse_values

    return parse_values(option, text, Setting("", above=0, infinite=True, example="2,5,10"))


def _of_runs(name: str, paths: list[Path], choice: ChoiceFlags) -> Document:
    from ebbench.analysis.phases import attainment_document, load_runs, phases_document
    from ebbench.errors import UsageError
    from ebbench.papers.eb.shifts import TPOT_MS, TTFT_S

    ttft_s, tpot_ms = _numbers(choice.ttft, "--ttft") or TTFT_S, _numbers(choice.tpot, "--tpot") or TPOT_MS
    if not paths:
        raise UsageError(f"`ebbench tables {name}` needs runs: give one or more with --from")
    loaded = load_runs(runs_meant(paths))
    if name == "phases":
        return phases_document(loaded)
    return attainment_document(loaded, [1e3 * value for value in ttft_s], tpot_ms, by_phase=choice.by_phase)


def _filled(table: PaperTable, options: PaperOptions, runs: RunsFlags, *, quiet: bool) -> Document:
    from ebbench.papers.table import make_runs
    from ebbench.runs.store import RunStore

    store = RunStore(runs.runs, runs.stored or [])
    if runs.run:
        make_runs(table, options, store, workers=runs.workers, quiet=quiet)
    return replace(table.filled(options, store), command=_command(), markup=True)


_PRIVATE = ("-o", "--output", "--runs", "--workers")


def _command() -> str:
    """The command that produced this table, without storage paths and number of processes."""
    import shlex

    words, skip = [], False
    for word in sys.argv[1:]:
        if skip:
            skip = False
        elif word in _PRIVATE:
            skip = True
        elif word not in ("-q", "--quiet") and not word.startswith(tuple(f"{name}=" for name in _PRIVATE)):
            words.append(word)
    return shlex.join(["ebbench", *words])


def _emit(document: Document, wanted: TableOutputFlags) -> None:
    from ebbench.render.documents import rendered

    text = rendered(document, wanted.style, width=None if wanted.output is None else 200)
    if wanted.output is None:
        sys.stdout.write(text)
        return
    from ebbench.records.files import write_bytes

    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(text.encode(), wanted.output)
