"""``ebbench tables``: the papers' tables with our results; phases and SLO surfaces of any run."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.config.declare import OUTPUT, declared_in
from ebbench.config.options import grouped, refuse_unused, under
from ebbench.papers.options import DEFAULT_FOLDER, MakeMissing, PaperOptions, Quiet, Stored, Workers, choice, of_runs

if TYPE_CHECKING:
    from ebbench.analysis.documents import Document

FORMATS = ("rich", "markdown", "latex", "html", "csv")
_CHOICES = (*declared_in(PaperOptions), "by_phase")
output = under(OUTPUT)


@grouped
def tables(
    context: typer.Context,
    *,
    name: Annotated[
        str, typer.Argument(help="list, table2, table3, ..., deferred-1; phases or slo for runs of your own (--from).")
    ] = "list",
    run: MakeMissing = False,
    runs: Stored = DEFAULT_FOLDER,
    stored: Annotated[
        list[Path] | None,
        of_runs("--from", help="Use your own runs for cells with the same plan, policy and settings."),
    ] = None,
    workers: Workers = None,
    options: PaperOptions,
    by_phase: Annotated[bool, choice("--by-phase", help="Also show SLO surfaces per phase.")] = False,
    style: Annotated[str, output("--format", "-f", help="rich, markdown, latex, html or csv.")] = "rich",
    target: Annotated[Path | None, output("--output", "-o", help="Write to this file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Show a published table with our results: published, ours, difference.

    Results come from stored runs; --run executes the missing ones and stores them.
    """
    from ebbench.errors import check_known
    from ebbench.papers.registry import OF_RUNS, document_of_runs, find_table, listed_tables
    from ebbench.papers.table import make_runs
    from ebbench.runs.store import RunStore

    check_known("format", style, FORMATS)
    if name == "list":
        refuse_unused(context, ("run", *_CHOICES), (), "without a table's name `ebbench tables`")
        for known, title in listed_tables().items():
            typer.echo(f"{known:12} {title}")
        return
    if name in OF_RUNS:
        refuse_unused(context, ("run", *_CHOICES), OF_RUNS[name], f"`ebbench tables {name}`")
        _emit(document_of_runs(name, stored or [], options, by_phase=by_phase), style, target)
        return
    table = find_table(name)
    refuse_unused(context, _CHOICES, table.reads, table.name)
    options.check_names(table.workloads)
    store = RunStore(runs, stored or [])
    if run:
        make_runs(table, options, store, workers=workers, quiet=quiet)
    _emit(replace(table.filled(options, store), command=_command(), markup=True), style, target)


_PRIVATE = ("-o", "--output", "--runs", "--workers")


def _command() -> str:
    """The command that produced this table, without storage paths and number of processes."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if skip:
            skip = False
        elif word in _PRIVATE:
            skip = True
        elif word not in ("-q", "--quiet") and not word.startswith(tuple(f"{name}=" for name in _PRIVATE)):
            words.append(word)
    return shlex.join(["ebbench", *words])


def _emit(document: Document, style: str, target: Path | None) -> None:
    from ebbench.records.files import write_bytes
    from ebbench.render.documents import rendered

    text = rendered(document, style, width=None if target is None else 200)
    if target is None:
        sys.stdout.write(text)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(text.encode(), target)
