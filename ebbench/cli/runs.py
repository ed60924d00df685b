"""``ebbench runs``: lists stored runs; shows, removes, moves and exports them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import Command, Format, Group, check_format, given_options, grouped
from ebbench.untrusted import visible

if TYPE_CHECKING:
    from ebbench.runs.stored import Listing, StoredRun

app = typer.Typer(
    add_completion=False, cls=Group, invoke_without_command=True, rich_markup_mode="rich",
    help="Stored runs: list, show, remove, move, export. `ebbench runs` alone lists those below runs/.",
)  # fmt: skip

Roots = Annotated[
    list[Path] | None, typer.Option("--runs", "-r", help="Directories of runs. Repeatable. Default: runs.")
]
References = Annotated[list[str], typer.Argument(help="Paths, directory names, or the --name that runs were given.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass(frozen=True)
class Filters:
    """Which runs are meant; texts may be patterns."""

    workload: Annotated[str, typer.Option("--workload", help="Of this workload, or pattern (eb*), as below.")] = ""
    device: Annotated[str, typer.Option("--device", help="On this device.")] = ""
    model: Annotated[str, typer.Option("--model", help="Of this model.")] = ""
    policy: Annotated[str, typer.Option("--policy", "-p", help="Under this policy.")] = ""
    engine: Annotated[str, typer.Option("--engine", help="Made by this engine; endpoint: a server's URL.")] = ""
    name: Annotated[str, typer.Option("--name", help="With this name.")] = ""
    tag: Annotated[list[str] | None, typer.Option("--tag", help="With this tag; repeat for several.")] = None
    label: Annotated[str, typer.Option("--label", help="Of this branch or pull request.")] = ""
    commit: Annotated[str, typer.Option("--commit", help="Of this commit.")] = ""
    since: Annotated[str | None, typer.Option("--since", help="Begun since: 30d, 12h, or 2026-11-01.")] = None
    before: Annotated[str | None, typer.Option("--before", help="Begun before that.")] = None
    invalid: Annotated[bool, typer.Option("--invalid", help="Only INVALID runs.")] = False

    def of(self, listing: Listing) -> Listing:
        """The listing with these runs only. Raises UsageError."""
        from ebbench.runs.stored import Wanted, moment_ns

        texts = {name: getattr(self, name) for name in ("workload", "device", "model", "policy", "engine", "name")}
        since, before = (
            None if text is None else moment_ns(option, text)
            for option, text in (("--since", self.since), ("--before", self.before))
        )
        wanted = Wanted(
            **texts, label=self.label, commit=self.commit, tags=tuple(self.tag or ()), since_ns=since,
            before_ns=before, invalid=self.invalid,
        )  # fmt: skip
        return replace(listing, runs=tuple(run for run in listing.runs if wanted.matches(run)))


@app.callback(invoke_without_command=True)
@app.command("list", cls=Command)
@grouped
def list_all(
    context: typer.Context,
    filters: Filters,
    runs: Roots = None,
    sort: Annotated[str, typer.Option("--sort", help="date, name, workload, device, policy, tag or size.")] = "date",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only the newest so many.")] = None,
    style: Format = "table",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List stored runs, the newest first; show, remove, move or export them.

    Only manifests are read. A capacity search is one row, with its probes.
    """
    from ebbench.errors import UnknownNameError, UsageError
    from ebbench.report.listing import as_json as described
    from ebbench.report.listing import print_list
    from ebbench.runs.stored import SORTS, listed

    if context.invoked_subcommand is not None:
        if given := given_options(context, context.params):
            raise UsageError(f"{given[0]} is for the list; give options after `{context.invoked_subcommand}`")
        return
    check_format(style, as_json=as_json)
    if sort not in SORTS:
        raise UnknownNameError("order", sort, SORTS)
    roots = runs or [Path("runs")]
    listing = filters.of(listed(roots))
    listing = replace(listing, runs=tuple(sorted(listing.runs[:last], key=SORTS[sort], reverse=reverse)))
    if as_json:
        sys.stdout.write(json.dumps(described(listing), indent=2) + "\n")
    else:
        print_list(listing, roots, style)


@app.command("show", cls=Command)
def show(references: References, runs: Roots = None) -> None:
    """Show what is known of runs besides their figures: labels, machine, files and sizes; of a search its answer.

    `ebbench show` prints the figures.
    """
    from ebbench.report.listing import print_described

    print_described(_meant(references, runs))


@app.command("rm", cls=Command)
def remove(references: References, runs: Roots = None, yes: Yes = False) -> None:
    """Remove runs. One that is being made is refused, and files that ebbench did not write stay where they are."""
    _remove(_meant(references, runs), runs, yes=yes)


@app.command("prune", cls=Command)
@grouped
def prune(
    filters: Filters,
    runs: Roots = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Remove all but the newest so many of those that match.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Remove only those that are older: 30d, 12h, or than 2026-11-01.")
    ] = None,
    probes: Annotated[
        bool, typer.Option("--probes", help="Remove no run: only the steps of superseded probes of capacity searches.")
    ] = False,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove the runs that match and are older, beyond a number, or INVALID. Unfinished runs stay."""
    from ebbench.errors import UsageError
    from ebbench.runs.stored import listed, moment_ns
    from ebbench.sizing.command import prune_probes

    roots = runs or [Path("runs")]
    selected = [run for run in filters.of(listed(roots)).runs if run.kind != "unfinished"]
    if probes:
        saved = sum(prune_probes(run.path) for run in selected if run.kind == "search" and not dry_run)
        typer.echo(
            f"freed {saved / 1e6:.1f} MB of the probes of {sum(run.kind == 'search' for run in selected)} searches"
        )
        return
    if keep_last is None and older_than is None and not filters.invalid:
        raise UsageError("say what may go: --keep-last N, --older-than 30d, --invalid or --probes; filters narrow it")
    oldest_ns = None if older_than is None else moment_ns("--older-than", older_than)
    chosen = [run for run in selected[keep_last or 0 :] if oldest_ns is None or run.begun_ns < oldest_ns]
    _remove(chosen, roots, yes=yes, dry_run=dry_run)


@app.command("move", cls=Command)
def move(
    references: References,
    to: Annotated[Path, typer.Option("--to", help="The directory that they go into; made if it does not exist.")],
    runs: Roots = None,
) -> None:
    """Move runs into a directory, also on another disk. One that is being made is refused."""
    from ebbench.runs.stored import move as moved

    for place in moved(_meant(references, runs), to):
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
    from ebbench.errors import UnknownNameError, UsageError
    from ebbench.export import EXPORTS
    from ebbench.export import export as exported
    from ebbench.records.run import Run, find_runs
    from ebbench.runs.stored import pack

    chosen = _meant(references, runs)
    if kind is None:
        if not output.name.endswith((".tar.gz", ".tgz")):
            raise UsageError(
                f"--output {output}: an archive is a .tar.gz file; --as llm-d, vllm or otava has a directory"
            )
        pack(chosen, output)
        written = [output]
    elif kind not in EXPORTS:
        raise UnknownNameError("export", kind, EXPORTS)
    else:
        written = exported(kind, [Run.load(path) for run in chosen for path in find_runs([run.path])], output)
    for path in written:
        typer.echo(f"wrote {path}", err=True)


def _meant(references: list[str], runs: list[Path] | None) -> list[StoredRun]:
    from ebbench.runs.stored import DEFAULT_ROOTS, meant

    return list(meant(references, runs or DEFAULT_ROOTS).runs)


def _remove(chosen: list[StoredRun], runs: list[Path] | None, *, yes: bool, dry_run: bool = False) -> None:
    """List what goes, ask, and remove it. Raises UsageError where nobody can be asked."""
    from ebbench.errors import UsageError
    from ebbench.report.listing import print_list
    from ebbench.runs.stored import Listing, check_free, remove

    if not chosen:
        typer.echo("nothing to remove")
        return
    check_free(chosen)
    print_list(Listing(tuple(chosen)), runs or [Path("runs")])
    if dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing was removed; --yes removes what is listed above")
    if not yes:
        typer.confirm("Remove these for good?", abort=True)
    for run in chosen:
        for left in remove(run):
            typer.echo(visible(f"left in place: {left}, which ebbench did not write"), err=True)
    typer.echo(f"removed {len(chosen)}")
