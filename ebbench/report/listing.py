"""Stored runs as a table and as JSON: one row per run, a capacity search with its probes as one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from msgspec.structs import asdict

from ebbench.analysis.documents import Column, Document, Section, Value
from ebbench.analysis.environment import run_host
from ebbench.errors import DataError, UsageError
from ebbench.foreign.documents import visible
from ebbench.records.run import Run, each_once, find_runs, read_manifest
from ebbench.records.warnings import counted
from ebbench.render import numbers
from ebbench.render.documents import Console, narrowed, rendered, section_tables
from ebbench.report.page_data import shown_runs
from ebbench.runs.stored import Listing, StoredRun, Wanted, check_free, listed, prunable, remove
from ebbench.sizing.chart import stored_capacity
from ebbench.sizing.sentences import load

_LEAST = (
    "seed", "engine", "model", "commit", "workload", "label", "policy", "device", "begun (UTC)", "tags", "name",
)  # fmt: skip
"""Columns in the order in which a narrow terminal loses them; their values are in the run's directory name or alike."""
_TEXTS: Mapping[str, Callable[[StoredRun], str]] = {
    "name": lambda run: run.labels.name,
    "workload": lambda run: run.workload,
    "policy": lambda run: run.policy,
    "device": lambda run: run.device,
    "model": lambda run: run.model,
    "engine": lambda run: run.engine,
    "seed": lambda run: "" if run.seed is None else str(run.seed),
    "tags": lambda run: ", ".join(run.labels.tags),
    "label": lambda run: run.labels.label,
    "commit": lambda run: run.labels.commit[:10],
    "state": lambda run: run.state,
}
_SHARED = ("workload", "policy", "device", "model", "engine", "seed")
"""What the line above the table says where it is the same for all runs."""
_PROBLEMS = 10


def document(listing: Listing, width: int | None = None) -> Document:
    """The list for a terminal of ``width`` characters; None: with all columns."""
    runs = listing.runs
    texts = {name: [of(run) for run in runs] for name, of in _TEXTS.items()}
    alike = {name: texts[name][0] for name in _SHARED if len(runs) > 1 and len(set(texts[name])) == 1}
    shown = [name for name, column in texts.items() if name not in alike and any(column)]
    columns = (Column("run", "label"), Column("begun (UTC)", "label"), *(Column(name, "label") for name in shown),
               Column("size", show=numbers.size, key="bytes"))  # fmt: skip
    rows: list[tuple[Value, ...]] = [
        (_path(run.path, listing.roots), run.begun, *(texts[name][place] for name in shown), run.size)
        for place, run in enumerate(runs)
    ]
    faulty = frozenset(place for place, run in enumerate(runs) if not run.valid)
    section = Section("", columns, tuple(rows), faulty=faulty)
    if width is not None:
        section = narrowed(section, width, _LEAST)
    left_out = [column.name for column in columns if column not in section.columns]
    notes = [f"not shown in this width: {', '.join(left_out)}"] if left_out else []
    return Document("runs", head(runs, alike), (section,) if runs else (), (*notes, *problems(listing)))


def head(runs: Sequence[StoredRun], alike: Mapping[str, str]) -> str:
    """``12 runs and 1 search (17 probes), 31.2 MB; all balanced on h200``."""
    searches = [run for run in runs if run.kind == "search"]
    single = len(runs) - len(searches)
    parts = [counted(single, "run")] if single or not searches else []
    if searches:
        plural, probes = "es" * (len(searches) != 1), sum(run.probes for run in searches)
        parts.append(f"{len(searches):,} search{plural} ({counted(probes, 'probe')})")
    same = ", ".join(f"{name} {value}" for name, value in alike.items() if value)
    total = numbers.size(sum(run.size for run in runs))
    return f"{' and '.join(parts)}, {total}" + (f"; all: {same}" if same else "")


def problems(listing: Listing) -> list[str]:
    """One line per directory that is not in the list, and why; of many the first ones."""
    lines = [f"left out: {path}: {why}" for path, why in sorted(listing.problems.items())]
    more = len(lines) - _PROBLEMS
    return lines if more <= 0 else [*lines[:_PROBLEMS], f"left out: {more} more directories"]


def _path(path: Path, roots: Sequence[Path]) -> str:
    """The path within the only root, else as it is given."""
    if len(roots) == 1 and path != roots[0] and path.is_relative_to(roots[0]):
        return os.fspath(path.relative_to(roots[0]))
    return os.fspath(path)


def print_list(listing: Listing, style: str = "table") -> None:
    """Print the list, also as JSON; what is left out of it goes to stderr."""
    if style == "json":
        print(json.dumps(as_json(listing), indent=2))
        return
    if style != "table":
        print(rendered(document(listing), style), end="")
        return
    console = Console(highlight=False)
    shown = document(listing, console.width)
    console.say(f"{shown.title}.")
    for section in shown.sections:
        for piece in section_tables(section, console.width):
            console.print(piece, soft_wrap=False)
    for note in shown.notes:
        Console(stderr=True, highlight=False).say(note)


def remove_asked(chosen: Listing, *, yes: bool, dry_run: bool = False) -> None:
    """List what goes, ask, and remove it. Raises UsageError where nobody can be asked."""
    if not chosen.runs:
        print("nothing to remove")
        return
    check_free(chosen.runs)
    print_list(replace(chosen, problems={}))
    if dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing was removed; --yes removes what is listed above")
    if not yes:
        typer.confirm("Remove these for good?", abort=True)
    for run in chosen.runs:
        for left in remove(run):
            print(visible(f"left in place: {left}, which ebbench did not write"), file=sys.stderr)
    print(f"removed {len(chosen.runs)}")


def prune_asked(
    listing: Listing, wanted: Wanted, keep_last: int | None, older_than: str | None, *, probes: bool, yes: bool,
    dry_run: bool,
) -> None:  # fmt: skip
    """Remove what :func:`prunable` gives; with ``probes`` only steps of the probes of searches. Raises UsageError."""
    if not probes:
        remove_asked(prunable(listing, wanted, keep_last, older_than), yes=yes, dry_run=dry_run)
    elif dry_run or keep_last is not None or older_than is not None:
        raise UsageError("--probes removes no run: leave out --dry-run, --keep-last and --older-than")
    else:
        from ebbench.sizing.command import prune_probes

        print(prune_probes([run.path for run in listing.runs if run.kind == "search"]))


def print_described(runs: Sequence[StoredRun]) -> None:
    """Print what is known of each run besides its figures."""
    console = Console(highlight=False)
    for place, run in enumerate(runs):
        if place:
            console.say("")
        console.say(f"{run.path}" + (f" ({run.state})" if run.state else ""))
        described = {
            **asdict(run.labels), "tags": ", ".join(run.labels.tags), "begun": f"{run.begun} UTC",
            "what": f"{run.workload}, scenario {run.scenario}, policy {run.policy}"
                    + ("" if run.seed is None else f", seed {run.seed}"),
            "where": f"{run.model} on {run.device}, engine {run.engine}",
        }  # fmt: skip
        if run.kind == "run":
            manifest = read_manifest(run.path)
            described |= {"host": run_host(manifest), "reasons": "; ".join(map(str, manifest.reasons))}
        if run.kind == "search":
            described["answer"] = "; ".join(_answer(row) for row in load(run.path)) or "not finished"
        sizes = [
            f"{path.name} {numbers.size(path.stat().st_size)}" for path in sorted(run.path.iterdir()) if path.is_file()
        ]
        for name, text in (described | {"size": f"{numbers.size(run.size)}: {', '.join(sizes)}"}).items():
            if text:
                console.say(f"  {name:<9} {text}")


def _answer(row: Mapping[str, Any]) -> str:
    unit = " open sessions" if "capacity_concurrency" in row else "/s"
    reached = f"{row['policy']} {numbers.rate(stored_capacity(row))}{unit}"
    return f"{reached}, limited by {row['limited_by']} (limits {row['limits']})"


def as_json(listing: Listing) -> dict[str, Any]:
    """``runs``, one object each, and ``problems`` by directory."""
    runs = [
        {
            "path": str(run.path), "kind": run.kind, "begun": run.begun, "begun_unix_ns": run.anchor_unix_ns,
            "workload": run.workload, "scenario": run.scenario, "policy": run.policy, "engine": run.engine,
            "device": run.device, "model": run.model, "seed": run.seed, "valid": run.valid,
            "interrupted": run.interrupted, **asdict(run.labels), "probes": run.probes, "bytes": run.size,
        }
        for run in listing.runs
    ]  # fmt: skip
    return {"runs": runs, "problems": {str(path): why for path, why in listing.problems.items()}}


# Runs that `ebbench show` prints.

MANY = 4
"""Unlike runs from which on a list of them comes first."""


def print_head(paths: Sequence[Path], *, several: bool) -> None:
    """Print a list of many unlike runs, and which searches are left out below these directories."""
    below = listed([path for path in paths if path.is_dir()])
    if several and below.runs:
        print_list(replace(below, roots=tuple(paths)))
        print()
    searches = [run for run in below.runs if run.kind == "search" and run.path not in paths]
    if searches:
        probes = sum(run.probes for run in searches)
        told = f"{len(searches)} capacity search(es) with {probes} probes are left out"
        print(f"{told}: show their directories, such as {searches[0].path}, for their answers", file=sys.stderr)


def load_shown(paths: Sequence[Path]) -> tuple[list[Run], list[DataError]]:
    """The complete runs, and the errors of the others. Raises DataError if none is complete."""
    loaded, damaged = [], []
    places = each_once(path for given in paths for path in shown_runs(given) or find_runs([given]))
    if not places:
        raise DataError(f"{paths[0]}: no run besides the probes of capacity searches; give the directory of a search")
    for place in places:
        try:
            loaded.append(Run.load(place))
        except DataError as error:
            damaged.append(error)
    if damaged and not loaded:
        raise damaged[0]
    return loaded, damaged
