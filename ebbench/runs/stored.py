"""Lists, filters, sorts, removes, moves and packs stored runs. Only manifests are read."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import typer

from ebbench.config.declare import declare
from ebbench.errors import DataError, UnknownNameError, UsageError, check_known
from ebbench.foreign.documents import visible
from ebbench.records import files
from ebbench.records.manifest import RunLabels, encode_manifest
from ebbench.records.run import MANIFEST, PARTIAL, SEARCH, VALIDATION, Run, TableName, is_being_written
from ebbench.records.schema import DECISIONS, STEPS, with_columns
from ebbench.records.warnings import counted, warning
from vllm_eb.settings import name_hint

Kind = Literal["run", "search", "unfinished"]


class _Brief(msgspec.Struct, frozen=True):
    """What a list shows of a manifest; the rest, which is most of it, is not decoded."""

    anchor_unix_ns: int
    workload: str
    policy: str
    engine: str
    device: str
    model: str
    plan_hash: str
    scenario: str = ""
    seed: int | None = 0
    valid: bool = True
    interrupted: bool = False
    labels: RunLabels = RunLabels()


class StoredRun(_Brief, frozen=True, kw_only=True):
    """A run, an unfinished one, or a capacity search with all of its ``probes``; ``size`` in bytes of its files."""

    path: Path
    kind: Kind
    size: int
    probes: int = 0

    @property
    def begun(self) -> str:
        """When it began, in UTC to the minute."""
        return datetime.fromtimestamp(self.anchor_unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")

    @property
    def state(self) -> str:
        """What it is besides a valid run; empty for one."""
        if self.kind == "search":
            return f"search, {counted(self.probes, 'probe')}"
        if self.kind == "unfinished":
            return "running" if in_use(self.path) else "unfinished"
        return "interrupted" if self.interrupted else "" if self.valid else "INVALID"


@dataclass(frozen=True)
class Listing:
    """What is below ``roots``. ``problems``: why a directory is not in the list, by its path."""

    runs: tuple[StoredRun, ...]
    problems: Mapping[Path, str] = field(default_factory=dict)
    roots: tuple[Path, ...] = ()

    def only(self, wanted: Wanted) -> Listing:
        """The list with these runs only."""
        return replace(self, runs=tuple(run for run in self.runs if wanted.matches(run)))

    def sorted(self, order: str, last: int | None, *, reverse: bool) -> Listing:
        """The newest so many runs in an order of :data:`SORTS`. Raises UnknownNameError for another."""
        check_known("order", order, SORTS)
        return replace(self, runs=tuple(sorted(self.runs[:last], key=SORTS[order], reverse=reverse)))


DEFAULT_ROOTS = (Path("runs"),)
"""Where runs are looked up by name."""


def listed(roots: Sequence[Path] | None = None) -> Listing:
    """All runs and searches below ``roots``, each once, the newest first. Damaged and foreign directories are named.

    Raises DataError for a root that is no directory.
    """
    roots = roots if roots is not None else DEFAULT_ROOTS
    by_path: dict[Path, StoredRun] = {}
    problems: dict[Path, str] = {}
    for root in roots:
        if not root.is_dir():
            raise DataError(f"{root}: no such directory; make a run, or give another one with --runs")
        for entry in _runs_below(root, problems):
            by_path.setdefault(entry.path.resolve(), entry)
    newest_first = sorted(by_path.values(), key=lambda run: (-run.anchor_unix_ns, str(run.path)))
    return Listing(tuple(newest_first), problems, tuple(roots))


def _runs_below(directory: Path, problems: dict[Path, str], depth: int = 0) -> Iterator[StoredRun]:
    """Links to directories are followed in the first one only, as those that a user makes to a disk of runs."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        problems[directory] = f"cannot be read ({error.strerror or error})"
        return
    names = {entry.name for entry in entries}
    if VALIDATION in names:
        problems[directory] = "a validation; name the runs in it by its directories measured and predicted"
        return
    if names & {MANIFEST, SEARCH, PARTIAL}:
        try:
            yield _entry(directory, entries, names)
        except DataError as error:
            problems[directory] = str(error).removeprefix(f"{directory}/")
        return
    strange = len(problems)
    holds_runs = False
    for entry in entries:
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=depth == 0):
            for run in _runs_below(Path(entry.path), problems, depth + 1):
                holds_runs = True
                yield run
    foreign = any(entry.is_file() and not _KNOWN.fullmatch(entry.name) for entry in entries)
    if depth and foreign and not holds_runs and len(problems) == strange:
        problems[directory] = "holds no run"


def _entry(directory: Path, entries: Sequence[os.DirEntry[str]], names: Collection[str]) -> StoredRun:
    if SEARCH in names:
        return _search(directory)
    kind: Kind = "run" if MANIFEST in names else "unfinished"
    brief = _read(directory / (MANIFEST if kind == "run" else PARTIAL))
    return _stored(directory, kind, brief, sum(_size(entry) for entry in entries))


def _stored(path: Path, kind: Kind, brief: _Brief, size: int, **more: Any) -> StoredRun:
    return StoredRun(path=path, kind=kind, size=size, **{**msgspec.structs.asdict(brief), **more})


def _search(directory: Path) -> StoredRun:
    """A search with what its probes have in common, of which the first one is read; all policies are named."""
    manifests = sorted(directory.glob(f"*/{MANIFEST}")) or sorted(directory.glob(f"*/*/{MANIFEST}"))
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if not manifests:
        raise DataError("a search without a finished probe; the same `ebbench capacity` command continues it")
    briefs = [_read(path) for path in manifests]
    policies = ", ".join(dict.fromkeys(brief.policy for brief in briefs))
    first = min(briefs, key=lambda brief: brief.anchor_unix_ns)
    more = {"policy": policies, "probes": len(briefs), "seed": None, "valid": True, "interrupted": False}
    return _stored(directory, "search", first, size, **more)


def _read(path: Path) -> _Brief:
    try:
        return msgspec.json.decode(files.read_stored(path), type=_Brief)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a manifest ({error})") from None


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
    except OSError:  # removed meanwhile
        return 0


# Which of them are meant.

SORTS: Mapping[str, Callable[[StoredRun], Any]] = {
    "date": lambda run: -run.anchor_unix_ns,
    "name": lambda run: run.labels.name,
    "workload": lambda run: run.workload,
    "device": lambda run: run.device,
    "policy": lambda run: run.policy,
    "tag": lambda run: run.labels.tags,
    "size": lambda run: -run.size,
}
"""Orders of a list by their names: the newest and the largest first, texts by the alphabet."""


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(min|h|d|w)")
_UNITS = {"min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment_ns(option: str, text: str, now: datetime | None = None) -> int:
    """A time in ns since 1970: ``30d`` is so long ago, ``2026-11-01`` a day (UTC). Raises UsageError."""
    if age := _AGE.fullmatch(text.strip()):
        past = (now or datetime.now(UTC)) - timedelta(**{_UNITS[age[2]]: float(age[1])})
        return int(past.timestamp() * 1e9)
    try:
        day = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(f"{option} {text!r}: give an age, such as 30d, 12h or 2w, or a date, 2026-11-01") from None
    return int((day if day.tzinfo else day.replace(tzinfo=UTC)).timestamp() * 1e9)


_FILTERS = "Options"


def _moment(name: str, option: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {name: moment_ns(option, text)}


@dataclass(frozen=True)
class Wanted:
    """Runs with all of these properties. Texts may be patterns (``eb*``); empty ones match everything."""

    workload: str = declare("", "Of this workload, or pattern (eb*), as below.", _FILTERS)
    device: str = declare("", "On this device.", _FILTERS)
    model: str = declare("", "Of this model.", _FILTERS)
    policy: str = declare("", "Under this policy.", _FILTERS, names=("--policy", "-p"))
    engine: str = declare("", "Made by this engine; endpoint: a server's URL.", _FILTERS)
    name: str = declare("", "With this name.", _FILTERS)
    tags: tuple[str, ...] = declare(
        (), "With this tag; repeat for several.", _FILTERS, names=("--tag",), text=list[str]
    )
    label: str = declare("", "Of this branch or pull request.", _FILTERS)
    commit: str = declare("", "Of this commit.", _FILTERS)
    since_ns: int | None = declare(
        None, "Begun since: 30d, 12h, or 2026-11-01.", _FILTERS, names=("--since",), text=str,
        read=_moment("since_ns", "--since"),
    )  # fmt: skip
    before_ns: int | None = declare(
        None, "Begun before that.", _FILTERS, names=("--before",), text=str, read=_moment("before_ns", "--before")
    )
    invalid: bool = declare(False, "Only INVALID runs.", _FILTERS, names=("--invalid",))

    def matches(self, run: StoredRun) -> bool:
        """Whether a run has the properties."""
        texts = {name: getattr(run, name) for name in ("workload", "device", "model", "engine")}
        texts |= {name: getattr(run.labels, name) for name in ("name", "label", "commit")}
        policies = run.policy.split(", ") if run.kind == "search" else [run.policy]
        return (
            all(_like(text, getattr(self, name)) for name, text in texts.items())
            and any(_like(policy, self.policy) for policy in policies)
            and all(any(_like(own, tag) for own in run.labels.tags) for tag in self.tags)
            and (self.since_ns is None or run.anchor_unix_ns >= self.since_ns)
            and (self.before_ns is None or run.anchor_unix_ns < self.before_ns)
            and (not self.invalid or not run.valid)
        )


def _like(text: str, pattern: str) -> bool:
    return not pattern or text == pattern or fnmatchcase(text.lower(), pattern.lower())


def prunable(listing: Listing, wanted: Wanted, keep_last: int | None, older_than: str | None) -> Listing:
    """The finished runs beyond a number and of an age; without either only INVALID ones may go. Raises UsageError."""
    if keep_last is None and older_than is None and not wanted.invalid:
        raise UsageError("say what may go: --keep-last N, --older-than 30d, --invalid or --probes; filters narrow it")
    oldest_ns = None if older_than is None else moment_ns("--older-than", older_than)
    finished = [run for run in listing.runs if run.kind != "unfinished"][keep_last or 0 :]
    old = tuple(run for run in finished if oldest_ns is None or run.anchor_unix_ns < oldest_ns)
    return replace(listing, runs=old)


def meant(references: Sequence[str], roots: Sequence[Path] | None = None) -> Listing:
    """The runs that are named: by a path (a directory of runs means all of them), by ``--name``, or by directory.

    Raises UnknownNameError for a name that no run has, DataError for a path that is no run and holds none.
    """
    roots = roots if roots is not None else DEFAULT_ROOTS
    chosen: dict[Path, StoredRun] = {}
    problems: dict[Path, str] = {}
    for reference in references:
        path = Path(reference)
        below = listed([path]) if path.is_dir() else Listing(tuple(_runs_by_name(reference, roots)))
        if not below.runs:
            raise DataError(f"{path}: {next(iter(below.problems.values()), 'no run')}; it is left as it is")
        chosen |= {run.path.resolve(): run for run in below.runs}
        problems |= below.problems
    return Listing(tuple(chosen.values()), problems, tuple(roots))


def run_paths(references: Sequence[str | Path], tell: Callable[[str], object]) -> list[Path]:
    """Where the runs are that a user names. What exists is a path, and stays one; else it is the ``--name`` of runs.

    A name stands for its newest measurement; ``tell`` gets a sentence if it has others. Raises DataError for a name
    that no run has.
    """
    paths = []
    for reference in map(str, references):
        path = Path(reference).expanduser()
        if path.exists():
            paths.append(path)
            continue
        try:
            named = _runs_by_name(reference, DEFAULT_ROOTS)
        except UnknownNameError as error:
            below = ", ".join(map(str, DEFAULT_ROOTS))
            hint = f"; {name_hint(reference, error.known)}" if error.known and path.name == reference else ""
            raise DataError(f"{path}: no such run directory, and no run below {below} has that name{hint}") from None
        newest = _newest(named)
        if len(newest) < len(named):
            tell(
                f"{reference}: the newest {len(newest)} of {len(named)} runs of that name, begun {newest[0].begun} "
                f"UTC; `ebbench runs --name {reference}` lists the others"
            )
        paths += [run.path for run in newest]
    return paths


def _runs_by_name(reference: str, roots: Sequence[Path]) -> list[StoredRun]:
    """All runs with this name, or in a directory of this name. Raises UnknownNameError if there is none."""
    known = listed([root for root in roots if root.is_dir()]).runs
    named = [run for run in known if reference in (run.labels.name, run.path.name)]
    if not named:
        names = {run.labels.name for run in known if run.labels.name} or {run.path.name for run in known}
        raise UnknownNameError("run", reference, names)
    return named


def _newest(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The last runs of one commit of which none repeats another: the same plan under the same policy is a new
    measurement under an old name, as of every night."""
    measurement: dict[tuple[object, ...], StoredRun] = {}
    for run in sorted(runs, key=lambda run: run.anchor_unix_ns):
        case = (run.kind, run.plan_hash, run.policy, run.engine, run.device, run.model)
        before = next(iter(measurement.values()), run)
        if case in measurement or run.labels.commit != before.labels.commit:
            measurement = {}
        measurement[case] = run
    return list(measurement.values())


# Removing, moving and packing. A run that is being made is left alone, as is every file that ebbench did not write.

_OURS = re.compile(
    r"(manifest(\.partial)?|capacity|capacity-answers|cell)\.json|(.+\.)?server\.log|vllm.*\.log|\.lock"
    rf"|({'|'.join(get_args(TableName))})(\.part-\d+)?\.parquet|\w+\.tail\.arrows|\..+\.\d+\.tmp"
)
_KNOWN = re.compile(rf"{_OURS.pattern}|results\.parquet|sweep\.toml|[0-9a-f]{{16}}\.json|gate-command\.txt")
"""Files that are in directories beside runs: of sweeps, and of the gate."""
_JUST_WRITTEN_S = 60.0
"""A run that an older version makes holds no lock; it stores something every few seconds."""


def in_use(directory: Path) -> bool:
    """Whether a command makes this run now, or works on a directory that holds it."""
    if (directory / PARTIAL).exists() and not (directory / MANIFEST).exists():
        with suppress(OSError, ValueError):
            last_s = max(path.stat().st_mtime for path in directory.iterdir())
            if time.time() - last_s < _JUST_WRITTEN_S:
                return True
    places = [directory, *(path / files.LOCK for path in (directory, *directory.absolute().parents))]
    return any(map(is_being_written, places))


def check_free(runs: Iterable[StoredRun]) -> None:
    """Raise UsageError for a run that is being made, or that is reached by a link."""
    for run in runs:
        if run.path.is_symlink():
            raise UsageError(f"{run.path} is a link to {run.path.resolve()}; give that directory")
        if in_use(run.path):
            raise UsageError(f"{run.path} is in use: a command writes to it; wait until it ends")


def refuse_surroundings(references: Iterable[str]) -> None:
    """Raise UsageError for the working directory and those above it, which may hold the runs of others, too."""
    for reference in references:
        path = Path(reference)
        if path.is_dir() and Path.cwd().is_relative_to(path.resolve()):
            raise UsageError(
                f"{reference} is {path.resolve()}, in which you are; give runs, or a directory of them below"
            )


def remove(run: StoredRun) -> list[Path]:
    """Remove the files of a run that ebbench wrote, and its directory unless others are in it; returns these others.

    The manifest is removed last: after an interruption it still is a run, and can be removed.
    """
    return _emptied(run.path, run.kind == "search")


def _emptied(directory: Path, also_inside: bool) -> list[Path]:
    """What is left; ``also_inside``: its directories, of probes, are emptied too."""
    others = []
    for path in sorted(directory.iterdir(), key=lambda path: path.name in (MANIFEST, PARTIAL, SEARCH)):
        if path.is_dir() and not path.is_symlink() and also_inside:
            others += _emptied(path, also_inside)
        elif path.is_dir() or not _OURS.fullmatch(path.name):
            others.append(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        directory.rmdir()
    return others


def move(runs: Sequence[StoredRun], target: Path) -> list[Path]:
    """Move runs into a directory, which is made; returns their new paths. Raises UsageError before anything is moved
    if one is in use or two would have one name."""
    check_free(runs)
    places = [target / run.path.resolve().name for run in runs]
    for run, place in zip(runs, places, strict=True):
        if place.exists() or places.count(place) > 1:
            raise UsageError(f"{run.path} cannot be moved: {place} exists already, or another run would become it")
        if target.resolve().is_relative_to(run.path.resolve()):
            raise UsageError(f"{run.path} cannot be moved into itself")
    target.mkdir(parents=True, exist_ok=True)
    for run, place in zip(runs, places, strict=True):
        shutil.move(run.path, place)
    return places


def pack(runs: Sequence[StoredRun], target: Path) -> None:
    """Write runs as a compressed archive, which `tar xf` unpacks to their directories. Raises RunError, UsageError."""
    if not target.name.endswith((".tar.gz", ".tgz")):
        raise UsageError(f"--output {target}: an archive is a .tar.gz file; --as llm-d, vllm or otava has a directory")
    names = [run.path.resolve().name for run in runs]
    if several := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two of the runs are named {several}; export them one by one, or the directory above them")

    def write(path: Path) -> None:
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:  # Parquet is compressed already
            for run, name in zip(runs, names, strict=True):
                archive.add(run.path.resolve(), name)

    files.write_with(target, write)


# What is left of a simulated run that is one of many: what its figures are computed from. The steps, most of it, can be
# simulated again.

SHRUNK = "shrunk"
"""Code of the warning, and name of the fact, that says so."""


def shrink(directory: Path, facts: Mapping[str, Any]) -> int:
    """Remove steps, decisions and gaps between tokens of a simulated run; returns the bytes that this frees.

    ``facts``: what was read from them, kept in the manifest. A measured run, and one that was shrunk, is not changed.
    Answers whose tokens came several at a time keep their gaps, which their TPOT needs. Raises DataError, RunError.
    """
    run = Run.load(directory)
    manifest = run.manifest
    if manifest.clock != "virtual" or SHRUNK in manifest.facts:
        return 0
    tables = {"steps": STEPS.empty_table(), "decisions": DECISIONS.empty_table()}
    requests = run.requests
    if not pc.any(requests["bundled_tokens"]).as_py():
        nothing = pa.nulls(len(requests), requests.schema.field("itl_ns").type)
        tables["requests"] = with_columns(requests, {"itl_ns": nothing})
    before = sum(path.stat().st_size for path in directory.iterdir())
    kept = {name: rows for name, rows in manifest.rows.items() if name not in tables}
    smaller = msgspec.structs.replace(
        manifest, facts={**manifest.facts, **facts, SHRUNK: True}, rows=kept,
        warnings=(*manifest.warnings, warning(SHRUNK)),
    )  # fmt: skip
    # A manifest without the rows of these tables fits them before and after; at any moment the run can be read.
    files.write_bytes(encode_manifest(smaller), directory / MANIFEST)
    for name, table in tables.items():
        files.write_table(table, directory / f"{name}.parquet")
    rows = kept | {name: len(table) for name, table in tables.items()}
    files.write_bytes(encode_manifest(msgspec.structs.replace(smaller, rows=rows)), directory / MANIFEST)
    return before - sum(path.stat().st_size for path in directory.iterdir())


# Arguments of commands that name runs.


def runs_meant(paths: Sequence[Path]) -> list[Path]:
    """The paths, with those of runs for a ``--name``. Raises DataError for what is neither."""
    if all(path.exists() for path in paths):
        return list(paths)
    return run_paths(paths, lambda line: typer.echo(visible(line), err=True))


def _as_paths(paths: list[Path] | None) -> list[Path] | None:
    return paths and runs_meant(paths)


RUNS = "Run directories, directories of runs, or --name of runs."
RunPaths = Annotated[list[Path], typer.Argument(help=RUNS, callback=_as_paths)]
RunRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs", "-r", help="Directories, or --name, of runs. Repeatable. Default: runs.", callback=_as_paths
    ),
]
