"""Sources of a workload's requests: the hub, a file, or its length profile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ebbench.errors import EbbenchError, InputFileError, RunError, UnknownNameError, UsageError
from ebbench.traffic.arrivals import substream
from ebbench.workloads.data_sets import Conversation, checked, columns_of, conversations, plain, sample_requests
from ebbench.workloads.files import FileRecord, read_file, read_json
from ebbench.workloads.fitted import draw_fitted
from ebbench.workloads.requests import Int64s, Requests, part_of, repeatable, single_turn, with_history
from ebbench.workloads.spec import Hub, Profile, Records, Turns, WorkloadSpec
from ebbench.workloads.tokens import TokenCounter, token_counter


def draw_requests(profile: Profile, sessions: int, seed: int, part: str = "") -> Requests:
    """Draw ``sessions`` sessions. ``part``: name of a scenario phase, which gets its own random substream."""
    turns = substream(seed, f"content/turns{part}")
    rounds = np.ones(sessions, np.int64) if profile.turns is None else draw_rounds(profile.turns, turns, sessions)
    n = int(rounds.sum())
    inputs = profile.input.draw(substream(seed, f"content/input{part}"), n)
    outputs = profile.output.draw(substream(seed, f"content/output{part}"), n)
    if profile.turns is None:
        return single_turn(inputs, outputs)
    return with_history(rounds, inputs, outputs)


def draw_rounds(turns: Turns, rng: np.random.Generator, sessions: int) -> Int64s:
    """Rounds per session: ``min`` plus a geometric number, capped at ``max``; shape (sessions,)."""
    if turns.min == turns.max:
        return np.full(sessions, turns.min)
    go_on = continuation(turns)
    if go_on == 0.0:
        return np.full(sessions, turns.min)
    more = rng.geometric(1.0 - go_on, size=sessions) - 1 if go_on < 1.0 else turns.max
    return np.minimum(turns.min + more, turns.max).astype(np.int64) * np.ones(sessions, np.int64)


def continuation(turns: Turns) -> float:
    """Probability of one more round such that the mean after the cap is ``turns.mean``.

    The mean of ``min(min + G, max)`` is ``min + q + q^2 + ... + q^(max-min)``, which increases with q: solved by
    bisection.
    """
    powers = np.arange(1, turns.max - turns.min + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if turns.min + float((middle**powers).sum()) < turns.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


PROBE_S = 3.0
_DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address (``HF_ENDPOINT``)."""
    return (environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def why_unreachable(hub: Hub, environ: Mapping[str, str] = os.environ, deadline_s: float = PROBE_S) -> str | None:
    """Why the hub does not serve the data set, or None if it does; decided within ``deadline_s`` seconds."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    import httpx  # noqa: F401 - before the deadline begins: it may take a second

    address = endpoint(environ)
    answer: list[str | None] = []
    # In a thread, since no client limits resolving, connecting and reading by one deadline.
    asker = threading.Thread(target=lambda: answer.append(_ask(address, hub, deadline_s)), daemon=True)
    asker.start()
    asker.join(deadline_s)
    return answer[0] if answer else f"no response from {address} within {deadline_s:g} s"


def _ask(address: str, hub: Hub, deadline_s: float) -> str | None:
    import httpx

    try:
        response = httpx.get(f"{address}/api/datasets/{checked_name(hub)}", timeout=deadline_s)
    except httpx.HTTPError as error:
        return f"{address} cannot be reached ({error or type(error).__name__})"
    except (ValueError, httpx.InvalidURL) as error:
        return f"{address} is not a usable address ({error})"
    if response.status_code >= 500 or response.status_code == 404:
        return f"{address} answered {response.status_code} for {hub.dataset}"
    return None


def checked_name(hub: Hub) -> str:
    """The data set's name, which becomes part of URLs and paths. Raises UsageError for invalid characters."""
    if not _NAME.fullmatch(hub.dataset) or ".." in hub.dataset:
        raise UsageError(f"{hub.dataset!r} is not the name of a data set; write owner/name")
    return hub.dataset


def stream(hub: Hub) -> Iterator[FileRecord]:
    """Records in file order. Errors of ``datasets`` and of the network are passed on."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    # The default of twenty retries of five seconds is for long downloads; here the profile is the fallback.
    datasets.config.STREAMING_READ_MAX_RETRIES = 3
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 3
    return _files(hub) if hub.files else _split(hub, datasets)


def _split(hub: Hub, datasets: Any) -> Iterator[FileRecord]:
    options = {"columns": list(hub.columns)} if hub.columns else {}
    name, common = checked_name(hub), {"split": hub.split, "revision": hub.revision, "streaming": True}
    try:
        rows = datasets.load_dataset(name, **common, **options)
    except ValueError as error:
        if "columns" not in str(error):
            raise
        rows = datasets.load_dataset(name, **common)  # not Parquet, so that columns cannot be selected
    for index, row in enumerate(rows, start=1):
        yield FileRecord(None, index, row)


def _files(hub: Hub) -> Iterator[FileRecord]:
    # datasets' JSON builder reads a whole array before its first record; reading in pieces gives the same records.
    from datasets.utils.file_utils import xopen

    root = f"hf://datasets/{checked_name(hub)}@{hub.revision}"
    for file in hub.files:
        url = f"zip://{file}::{root}/{hub.archive}" if hub.archive else f"{root}/{file}"
        with xopen(url, "rb") as stream:
            yield from read_json(stream, f"{hub.dataset}/{file}")


class Cache:
    """Selected records on disk, one file per data set, selection and number of sessions."""

    def __init__(self, folder: Path, key: str, hub: Hub) -> None:
        slug = re.sub(r"[^\w-]+", "-", checked_name(hub))
        digest = hashlib.sha256(f"{key}|{hub}".encode()).hexdigest()[:16]
        self._folder, self._stem = folder, f"{slug}-{digest}"

    def find(self, sessions: int) -> Path | None:
        """The smallest file with at least ``sessions`` sessions, or with the whole data set; None if there is none."""
        found = []
        for path in self._folder.glob(f"{self._stem}-*.jsonl"):
            size = path.stem.rpartition("-")[2]
            if size == "all" or (size.isdigit() and int(size) >= sessions):
                found.append((float("inf") if size == "all" else int(size), path))
        return min(found)[1] if found else None

    def keep(self, records: Iterable[Any], sessions: int | None) -> Path:
        """Write the records atomically; ``sessions`` None means that the data set holds no more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{'all' if sessions is None else sessions}.jsonl"
        aside = path.with_suffix(f".{os.getpid()}.part")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        aside.replace(path)
        return path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/ebbench/datasets``, by default under ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ebbench" / "datasets"


@dataclass(frozen=True)
class Selection:
    """The requests to gather: ``sessions`` sessions for ``seed``. ``lengths_set``: the caller set the lengths.

    ``rate_scale``: factor of the arrival rate, for fitted workloads whose lengths change with time. ``redraw``: a data
    set that holds too few is drawn from again, unless its texts are sent.
    """

    sessions: int
    seed: int
    lengths_set: bool = False
    tokenizer: str | None = None
    with_text: bool = True
    rate_scale: float = 1.0
    redraw: bool = False


def gather(workload: WorkloadSpec, profile: Profile, source: str, selection: Selection) -> Requests:
    """Requests from ``source`` (auto, hub, file:PATH, profile); their facts name the source and the reason.

    Raises UsageError, InputFileError, RunError (``hub`` that cannot be read).
    """
    _check(workload, source, selection)
    if source.startswith("file:"):
        return _from_file(workload, Path(source.removeprefix("file:")).expanduser(), selection)
    if source == "hub":
        return _from_hub(workload, selection)
    if workload.fitted is not None and not selection.lengths_set:
        facts = {"source": "fitted", "source_reason": f"distributions in the file of {workload.name}"}
        drawn = draw_fitted(workload.fitted, selection.sessions, selection.seed, selection.rate_scale)
        return replace(drawn, facts=facts)
    if source == "profile":
        return _from_profile(profile, selection, "asked for")
    if workload.records is None:
        return _from_profile(profile, selection, "synthetic workload")
    if selection.lengths_set:
        return _from_profile(profile, selection, "lengths were set")
    return _from_either(workload, profile, selection)


def _check(workload: WorkloadSpec, source: str, selection: Selection) -> None:
    kind = "file" if source.startswith("file:") else source
    if kind not in ("auto", "hub", "file", "profile") or source == "file:":
        raise UnknownNameError("source", source, ["auto", "hub", "file:PATH", "profile"])
    if kind not in ("hub", "file"):
        return
    if workload.records is None or (kind == "hub" and workload.hub is None):
        missing = "[records]" if workload.records is None else "[hub]"
        raise UsageError(f"workload {workload.name!r} has no {missing} in its file; leave out --source {source}")
    if selection.lengths_set:
        raise UsageError(f"lengths cannot be set for the records of --source {source}; leave one of them out")


def _from_profile(profile: Profile, selection: Selection, reason: str, warnings: tuple[str, ...] = ()) -> Requests:
    requests = draw_requests(profile, selection.sessions, selection.seed)
    facts = {
        "source": "profile",
        "source_reason": reason,
        "input_lengths": profile.input.text,
        "output_lengths": profile.output.text,
    }
    return replace(requests, facts=facts, warnings=warnings)


def _from_file(workload: WorkloadSpec, path: Path, selection: Selection) -> Requests:
    assert workload.records is not None  # checked by _check
    rules = workload.records
    requests = _select(read_file(path, columns_of(rules.schema)), str(path), rules, selection).requests
    if not len(requests):
        raise InputFileError(path, f"holds no {rules.schema} record that passes the selection rules of {workload.name}")
    return _described(requests, f"file:{path}", "asked for", selection)


def _from_hub(workload: WorkloadSpec, selection: Selection) -> Requests:
    try:
        return _read_hub(workload, selection)
    except _UnreadableError as error:
        raise RunError(
            f"--source hub: {error}; use --source profile for lengths from published statistics, or file:PATH"
        ) from None


def _from_either(workload: WorkloadSpec, profile: Profile, selection: Selection) -> Requests:
    if workload.hub is None:
        return _from_profile(profile, selection, "the workload's file names no data set on the hub")
    try:
        return _read_hub(workload, selection)
    except _UnreadableError as error:
        warning = (
            f"lengths come from the published statistics of {workload.name}, not from the data set: {error} "
            "(--source profile uses them without asking the hub)"
        )
        return _from_profile(profile, selection, str(error), (warning,))


class _UnreadableError(EbbenchError):
    """The hub cannot serve the data set; the message is the reason."""


def _read_hub(workload: WorkloadSpec, selection: Selection) -> Requests:
    assert workload.hub is not None  # checked by _check
    assert workload.records is not None
    # The tokenizer is part of the key: some rules select records by token counts.
    key = f"{msgspec.json.encode(workload.records).decode()}|{selection.tokenizer}"
    cache = Cache(cache_folder(), key, workload.hub)
    kept = cache.find(selection.sessions)
    if kept is not None:
        taken = _select(read_file(kept, ()), str(kept), workload.records, selection)
        return _described(taken.requests, "hub", f"{workload.hub.dataset}, read before and kept in {kept}", selection)
    reason = why_unreachable(workload.hub)
    if reason is not None:
        raise _UnreadableError(reason)
    taken = _stream_hub(workload, selection)
    _keep(cache, taken, selection)
    return _described(taken.requests, "hub", f"{workload.hub.dataset}, first records of the hub's files", selection)


def _stream_hub(workload: WorkloadSpec, selection: Selection) -> _Taken:
    assert workload.hub is not None
    assert workload.records is not None
    try:
        taken = _select(stream(workload.hub), workload.hub.dataset, workload.records, selection)
    except UsageError as error:
        raise _UnreadableError(f"the data set on the hub is not as expected: {error}") from None
    except Exception as error:  # datasets, huggingface_hub, fsspec, aiohttp and httpx have no common base class
        first = next(iter(str(error).splitlines()), "")
        raise _UnreadableError(
            f"{workload.hub.dataset} cannot be read: {type(error).__name__}: {first[:200]}"
        ) from error
    if not len(taken.requests):
        raise _UnreadableError(f"{workload.hub.dataset} holds no record that passes the selection rules")
    return taken


def _keep(cache: Cache, taken: _Taken, selection: Selection) -> None:
    """Cache the selected records. A cache that cannot be written only costs time later."""
    complete = taken.requests.sessions < selection.sessions
    try:
        cache.keep(taken.records, None if complete else selection.sessions)
    except OSError:
        return


@dataclass
class _Taken:
    """Requests, and the records (reduced, in the data set's schema) that they come from."""

    requests: Requests
    records: list[Any] = field(default_factory=list)


def _select(records: Iterable[FileRecord], name: str, rules: Records, selection: Selection) -> _Taken:
    used: list[Any] = []

    def talks() -> Iterator[Conversation]:
        for record in checked(records, rules.schema, name):
            found = conversations(record, rules)
            if found:
                used.append(plain(record))
            yield from found

    counter = token_counter(selection.tokenizer)
    cut = substream(selection.seed, "content/cut")
    requests = sample_requests(talks(), rules, counter, selection.sessions, cut, selection.with_text)
    return _Taken(_counted(requests, counter), used)


def _counted(requests: Requests, counter: TokenCounter) -> Requests:
    return replace(requests, facts={"token_counts": counter.description}, warnings=counter.warnings)


def _described(requests: Requests, source: str, reason: str, selection: Selection) -> Requests:
    """The requests with facts about their source, and a note where it holds too few."""
    warnings, have = requests.warnings, requests.sessions
    if have < selection.sessions:
        held = f"{source} holds {have:,} sessions where the plan takes {selection.sessions:,}"
        if selection.redraw and repeatable(requests):
            requests = part_of(requests, selection.sessions)
            warnings = (*warnings, f"{held}: they are taken again, each time with new contents")
        else:
            warnings = (*warnings, f"{held}: {have:,} are sent")
    return replace(requests, facts={"source": source, "source_reason": reason, **requests.facts}, warnings=warnings)
