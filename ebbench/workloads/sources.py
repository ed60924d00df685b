"""Sources of a workload's requests: the hub, a file, or its length profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ebbench.errors import EbbenchError, InputFileError, RunError, UnknownNameError, UsageError
from ebbench.traffic.substreams import substream
from ebbench.workloads import hub as hub_source
from ebbench.workloads.files import FileRecord, read_file
from ebbench.workloads.fitted import draw_fitted
from ebbench.workloads.profile import draw_requests
from ebbench.workloads.records import Conversation, checked, columns_of, conversations, plain
from ebbench.workloads.requests import Requests, part_of, repeatable
from ebbench.workloads.sampling import sample_requests
from ebbench.workloads.spec import Profile, Records, WorkloadSpec
from ebbench.workloads.tokens import TokenCounter, token_counter


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
    cache = hub_source.Cache(hub_source.cache_folder(), key, workload.hub)
    kept = cache.find(selection.sessions)
    if kept is not None:
        taken = _select(read_file(kept, ()), str(kept), workload.records, selection)
        return _described(taken.requests, "hub", f"{workload.hub.dataset}, read before and kept in {kept}", selection)
    reason = hub_source.why_unreachable(workload.hub)
    if reason is not None:
        raise _UnreadableError(reason)
    taken = _stream_hub(workload, selection)
    _keep(cache, taken, selection)
    return _described(taken.requests, "hub", f"{workload.hub.dataset}, first records of the hub's files", selection)


def _stream_hub(workload: WorkloadSpec, selection: Selection) -> _Taken:
    assert workload.hub is not None
    assert workload.records is not None
    try:
        taken = _select(hub_source.stream(workload.hub), workload.hub.dataset, workload.records, selection)
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


def _keep(cache: hub_source.Cache, taken: _Taken, selection: Selection) -> None:
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
