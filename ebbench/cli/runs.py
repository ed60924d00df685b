"""``ebbench runs``: lists stored runs; shows, removes, moves and exports them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import AsJson, Format, check_format, given_options, grouped
from ebbench.errors import UsageError
from ebbench.process.command_line import Command, Group
from ebbench.runs import stored

app = typer.Typer(
    add_completion=False, cls=Group, invoke_without_command=True, rich_markup_mode="rich",
    help="Stored runs: list, show, remove, move, export. `ebbench runs` alone lists those below runs/.",
)  # fmt: skip

Roots = Annotated[
    list[Path] | None, typer.Option("--runs", "-r", help="Directories of runs. Repeatable. Default: runs.")
]
References = Annotated[list[str], typer.Argument(help="Paths, directory names, or the --name that runs were given.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_KEEP = "Remove all but the newest so many of those that match."
_OLDER = "Remove only those that are older: 30d, 12h, or than 2026-11-01."
_PROBES = "Remove no run: only the steps of superseded probes of capacity searches."


@app.callback(invoke_without_command=True)
@app.command("list", cls=Command)
@grouped
def list_all(
    context: typer.Context,
    filters: stored.Wanted,
    runs: Roots = None,
    sort: Annotated[str, typer.Option("--sort", help="date, name, workload, device, policy, tag or size.")] = "date",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only the newest so many.")] = None,
    style: Format = "table",
    as_json: AsJson = False,
) -> None:
    """List stored runs, the newest first; show, remove, move or export them.

    Only manifests are read. A capacity search is one row, with its probes.
    """
    from ebbench.report.listing import print_list

    if context.invoked_subcommand is not None:
        if given := given_options(context, context.params):
            raise UsageError(f"{given[0]} is for the list; give options after `{context.invoked_subcommand}`")
        return
    check_format(style, as_json=as_json)
    shown = stored.listed(runs).only(filters).sorted(sort, last, reverse=reverse)
    print_list(shown, "json" if as_json else style)


@app.command("show", cls=Command)
def show(references: References, runs: Roots = None) -> None:
    """Show what is known of runs besides their figures: labels, machine, files and sizes; of a search its answer.

    `ebbench show` prints the figures.
    """
    from ebbench.report.listing import print_described

    print_described(stored.meant(references, runs).runs)


@app.command("rm", cls=Command)
def remove(references: References, runs: Roots = None, yes: Yes = False) -> None:
    """Remove runs. One that is being made is refused, and files that ebbench did not write stay where they are."""
    from ebbench.report.listing import remove_asked

    stored.refuse_surroundings(references)
    remove_asked(stored.meant(references, runs), yes=yes)


@app.command("prune", cls=Command)
@grouped
def prune(
    filters: stored.Wanted,
    runs: Roots = None,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=0, help=_KEEP)] = None,
    older_than: Annotated[str | None, typer.Option("--older-than", help=_OLDER)] = None,
    probes: Annotated[bool, typer.Option("--probes", help=_PROBES)] = False,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove the runs that match and are older, beyond a number, or INVALID. Unfinished runs stay."""
    from ebbench.report.listing import prune_asked

    listing = stored.listed(runs).only(filters)
    prune_asked(listing, filters, keep_last, older_than, probes=probes, yes=yes, dry_run=dry_run)


@app.command("move", cls=Command)
def move(
    references: References,
    to: Annotated[Path, typer.Option("--to", help="The directory that they go into; made if it does not exist.")],
    runs: Roots = None,
) -> None:
    """Move runs into a directory, also on another disk. One that is being made is refused."""
    stored.refuse_surroundings(references)
    for place in stored.move(stored.meant(references, runs).runs, to):
        typer.echo(str(place))


@app.command("export", cls=Command)
def export(
    references: References,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Archive to write (.tar.gz); with --as a directory for its files.")
    ],
    kind: Annotated[str | None, typer.Option("--as", help="In another tool's format: llm-d, vllm or otava.")] = None,
    runs: Roots = None,
) -> None:
    """Write runs as one archive that another machine unpacks, or in the format of another tool."""
    from ebbench.export import export_stored

    for path in export_stored(stored.meant(references, runs).runs, kind, output):
        typer.echo(f"wrote {path}", err=True)
