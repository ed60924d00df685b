"""Data sets as requests: read from a file or the hub, converted, counted in tokens, cut and capped."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ebbench.errors import EbbenchError, InputFileError, UsageError
from ebbench.records.files import user_cache
from ebbench.records.warnings import warning
from ebbench.traffic.arrivals import substream
from ebbench.workloads.files import FileRecord, read_file, read_json
from ebbench.workloads.requests import Int32s, Requests, first_sessions, repeatable, single_turn, strings, with_history
from ebbench.workloads.spec import Hub, Records, Schema, Selection, WorkloadSpec
from ebbench.workloads.tokens import TokenCounter, token_counter

# Converts records in the data sets' schemas to exchanges: a user's messages and their responses.
#
# Selection rules: Zhang et al., ICML 2026, section 4.1 and appendix E.1, as stated in the workload files.


class Exchange(NamedTuple):
    """One message and its response. LongBench's context is separate, since it is cut to length."""

    message: str
    answer: str
    context: str = ""


Conversation = list[Exchange]


class _Said(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str


class ShareGpt(msgspec.Struct, frozen=True):
    """``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}``."""

    conversations: list[_Said]


class LongBench(msgspec.Struct, frozen=True):
    """``{"context": ..., "input": ..., "answers": [...]}``."""

    context: str
    input: str
    answers: list[str]


class NuminaMath(msgspec.Struct, frozen=True):
    """``{"problem": ..., "solution": ...}``; ``messages`` repeats the same and is not read."""

    problem: str
    solution: str


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | None


class WildChat(msgspec.Struct, frozen=True):
    """``{"conversation": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}``."""

    conversation: list[_Message]


def _pairs(messages: Iterable[tuple[str, str]], asker: str, answerer: str) -> Conversation:
    """Pairs of neighbouring question and response. Empty ones are skipped, since an empty prompt cannot be sent."""
    return [
        Exchange(question, answer)
        for (speaker, question), (then, answer) in pairwise(messages)
        if speaker == asker and then == answerer and question and answer
    ]


def _sharegpt(record: ShareGpt, _: Records) -> list[Conversation]:
    messages = ((turn.speaker, turn.value) for turn in record.conversations)
    return [[pair] for pair in _pairs(messages, "human", "gpt")]


def _longbench(record: LongBench, _: Records) -> list[Conversation]:
    answer = record.answers[0] if record.answers else ""
    return [[Exchange(record.input, answer, record.context)]]


def _wildchat(record: WildChat, rules: Records) -> list[Conversation]:
    messages = ((turn.role, turn.content or "") for turn in record.conversation)
    rounds = _pairs(messages, "user", "assistant")
    return [rounds[: rules.rounds_max]] if len(rounds) >= (rules.rounds_min or 1) else []


class _Kind(NamedTuple):
    struct: type[msgspec.Struct]
    take: Callable[[Any, Records], list[Conversation]]
    expected: str


_KINDS: Mapping[Schema, _Kind] = {
    "sharegpt": _Kind(ShareGpt, _sharegpt, '{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}'),
    "longbench": _Kind(LongBench, _longbench, '{"context": text, "input": text, "answers": [text, ...]}'),
    "numinamath": _Kind(
        NuminaMath,
        lambda record, rules: [[Exchange(record.problem + rules.suffix, record.solution)]],
        '{"problem": text, "solution": text}',
    ),
    "wildchat": _Kind(WildChat, _wildchat, '{"conversation": [{"role": "user" or "assistant", "content": text}, ...]}'),
}


def checked(records: Iterable[FileRecord], schema: Schema, name: str) -> Iterator[msgspec.Struct]:
    """Records in typed form. Raises InputFileError with line, record number and the expected form."""
    kind = _KINDS[schema]
    for record in records:
        try:
            yield msgspec.convert(record.value, kind.struct)
        except msgspec.ValidationError as error:
            problem = str(error).replace("`", "'")
            raise InputFileError(
                name, f"record {record.number} is not in the {schema} schema: {problem}; expected {kind.expected}",
                record.line,
            ) from None  # fmt: skip


def conversations(record: msgspec.Struct, rules: Records) -> list[Conversation]:
    """The conversations of a record that pass the workload's selection rules except those on token counts."""
    return _KINDS[rules.schema].take(record, rules)


# Converts conversations to requests: counts tokens, cuts contexts, applies caps.

_BATCH = 256  # conversations whose texts are tokenized together
_BREAK = "\n\n"  # between a context and its question, and between turns of a conversation


@dataclass
class _Sample:
    """Selected records in flat lists; ``rounds``: exchanges per session."""

    rounds: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    message_tokens: list[Int32s] = field(default_factory=list)
    answer_tokens: list[Int32s] = field(default_factory=list)


def sample_requests(
    source: Iterable[Conversation],
    rules: Records,
    counter: TokenCounter,
    sessions: int,
    rng: np.random.Generator,
    with_text: bool,
) -> Requests:
    """The first ``sessions`` conversations that pass the rules, as requests; fewer if the source ends.

    ``rng`` draws the lengths to which LongBench contexts are cut.
    """
    sample = _Sample()
    conversations = iter(source)
    while (missing := sessions - len(sample.rounds)) > 0:
        batch = list(islice(conversations, min(_BATCH, missing)))
        if not batch:
            break
        _admit(sample, batch, rules, counter, rng)
    nothing = np.zeros(0, np.int32)
    message_tokens = np.maximum(np.concatenate([nothing, *sample.message_tokens]), 1)
    output_tokens = np.maximum(np.concatenate([nothing, *sample.answer_tokens]), 1)
    if rules.output_max is not None:
        output_tokens = np.minimum(output_tokens, rules.output_max)
    if rules.output_fixed is not None:
        output_tokens = np.full_like(output_tokens, rules.output_fixed)
    rounds = np.asarray(sample.rounds, np.int64)
    single = not len(rounds) or rounds.max() == 1
    requests = (
        single_turn(message_tokens, output_tokens) if single else with_history(rounds, message_tokens, output_tokens)
    )
    if not with_text:
        return requests
    texts = sample.messages if single else _histories(sample, output_tokens, counter)
    return Requests(
        requests.session, requests.turn, requests.input_tokens, requests.output_tokens, prompt=strings(texts)
    )


def _admit(
    sample: _Sample, batch: list[Conversation], rules: Records, counter: TokenCounter, rng: np.random.Generator
) -> None:
    if rules.input_max is not None:
        # Join context and question so that the prompt's length is uniformly distributed between the rules' bounds.
        lowest, highest = rules.input_min or 1, rules.input_max or 1
        targets = rng.integers(lowest, highest, size=len(batch), endpoint=True)
        tails = [_BREAK + talk[0].message for talk in batch]
        tail_tokens = counter.count(tails)
        whole = counter.count([talk[0].context for talk in batch]) + tail_tokens
        # Which records are kept is independent of the target length, so that the seed does not select them.
        batch = [
            [talk[0]._replace(message=counter.cut(talk[0].context, int(target - tail_size)) + tail, context="")]
            for talk, tail, tail_size, target, size in zip(batch, tails, tail_tokens, targets, whole, strict=True)
            if size >= lowest > tail_size
        ]
    messages = [text for talk in batch for text in _messages(talk)]
    answers = [exchange.answer for talk in batch for exchange in talk]
    rounds = np.fromiter((len(talk) for talk in batch), np.int64, len(batch))
    message_tokens, answer_tokens = counter.count(messages), counter.count(answers)
    if rules.answer_min is not None and len(batch):
        shortest = np.minimum.reduceat(answer_tokens, np.cumsum(rounds) - rounds)
        rows = np.repeat(shortest >= rules.answer_min, rounds)
        rounds = rounds[shortest >= rules.answer_min]
        message_tokens, answer_tokens = message_tokens[rows], answer_tokens[rows]
        messages = [text for text, kept in zip(messages, rows, strict=True) if kept]
        answers = [text for text, kept in zip(answers, rows, strict=True) if kept]
    sample.rounds += rounds.tolist()
    sample.messages += messages
    sample.answers += answers
    sample.message_tokens.append(message_tokens)
    sample.answer_tokens.append(answer_tokens)


def _messages(talk: Conversation) -> Iterator[str]:
    """Messages as they enter the prompt: with separators in a conversation of several rounds."""
    if len(talk) == 1:
        yield talk[0].message
        return
    for turn, exchange in enumerate(talk):
        yield (_BREAK if turn else "") + exchange.message + _BREAK


def _histories(sample: _Sample, output_tokens: Int32s, counter: TokenCounter) -> list[str]:
    """The whole prompt of each turn: all earlier messages, responses cut to their output tokens, and the new
    message."""
    prompts, row = [], 0
    for rounds in sample.rounds:
        history = ""
        for _ in range(rounds):
            prompt = history + sample.messages[row]
            prompts.append(prompt)
            history = prompt + counter.cut(sample.answers[row], int(output_tokens[row]))
            row += 1
    return prompts


# The `hub` source: first records of a data set on the Hugging Face hub, streamed through `datasets`.
#
# Selected records are cached on disk (only the fields read, in the data set's own schema), so that the next plan of
# the same workload needs no network.

PROBE_S = 3.0
_DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def why_unreachable(hub: Hub, environ: Mapping[str, str] = os.environ, deadline_s: float = PROBE_S) -> str | None:
    """Why the hub does not serve the data set, or None if it does; decided within ``deadline_s`` seconds."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    import httpx  # noqa: F401 - before the deadline begins: it may take a second

    address = (environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
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
        caches = []
        for path in self._folder.glob(f"{self._stem}-*.jsonl"):
            size = path.stem.rpartition("-")[2]
            if size == "all" or (size.isdigit() and int(size) >= sessions):
                caches.append((float("inf") if size == "all" else int(size), path))
        return min(caches)[1] if caches else None

    def keep(self, records: Iterable[Any], sessions: int | None) -> Path:
        """Write the records atomically; ``sessions`` None means that the data set holds no more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{'all' if sessions is None else sessions}.jsonl"
        aside = path.with_suffix(f".{os.getpid()}.part")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        aside.replace(path)
        return path


def from_file(workload: WorkloadSpec, path: Path, selection: Selection) -> Requests:
    """Requests from the records of a file. Raises InputFileError if none passes the workload's rules."""
    assert workload.records is not None  # checked by _check
    rules = workload.records
    requests, _ = _select(
        read_file(path, [field.encode_name for field in msgspec.structs.fields(_KINDS[rules.schema].struct)]),
        str(path),
        rules,
        selection,
    )
    if not len(requests):
        raise InputFileError(path, f"holds no {rules.schema} record that passes the selection rules of {workload.name}")
    return _described(requests, f"file:{path}", "asked for", selection)


class UnreadableError(EbbenchError):
    """The hub cannot serve the data set; the message is the reason."""


def read_hub(workload: WorkloadSpec, selection: Selection) -> Requests:
    """Requests from the hub, or from what was kept of it. Raises UnreadableError."""
    hub, rules = workload.hub, workload.records
    assert hub is not None  # checked by _check
    assert rules is not None
    # The tokenizer is part of the key: some rules select records by token counts.
    key = f"{msgspec.json.encode(rules).decode()}|{selection.tokenizer}"
    cache = Cache(user_cache() / "datasets", key, hub)
    kept = cache.find(selection.sessions)
    if kept is not None:
        requests, _ = _select(read_file(kept, ()), str(kept), rules, selection)
        return _described(requests, "hub", f"{hub.dataset}, read before and kept in {kept}", selection)
    reason = why_unreachable(hub)
    if reason is not None:
        raise UnreadableError(reason)
    try:
        requests, records = _select(stream(hub), hub.dataset, rules, selection)
    except UsageError as error:
        raise UnreadableError(f"the data set on the hub is not as expected: {error}") from None
    except Exception as error:  # datasets, huggingface_hub, fsspec, aiohttp and httpx have no common base class
        first = next(iter(str(error).splitlines()), "")
        raise UnreadableError(f"{hub.dataset} cannot be read: {type(error).__name__}: {first[:200]}") from error
    if not len(requests):
        raise UnreadableError(f"{hub.dataset} holds no record that passes the selection rules")
    with suppress(OSError):  # a cache that cannot be written only costs time later
        cache.keep(records, None if requests.sessions < selection.sessions else selection.sessions)
    return _described(requests, "hub", f"{hub.dataset}, first records of the hub's files", selection)


def _select(
    records: Iterable[FileRecord], name: str, rules: Records, selection: Selection
) -> tuple[Requests, list[Any]]:
    """Requests, and the records (reduced, in the data set's schema) that they come from."""
    used: list[Any] = []

    def talks() -> Iterator[Conversation]:
        for record in checked(records, rules.schema, name):
            talks_of_record = conversations(record, rules)
            if talks_of_record:
                used.append(msgspec.to_builtins(record))
            yield from talks_of_record

    counter = token_counter(selection.tokenizer)
    cut = substream(selection.seed, "content/cut")
    requests = sample_requests(talks(), rules, counter, selection.sessions, cut, selection.with_text)
    facts = {"token_counts": counter.description}
    return replace(requests, facts=facts, warnings=counter.warnings), used


def _described(requests: Requests, source: str, reason: str, selection: Selection) -> Requests:
    """The requests with facts about their source, and a note where it holds too few."""
    warnings, have = requests.warnings, requests.sessions
    if have < selection.sessions:
        again = selection.redraw and repeatable(requests)
        if again:
            requests = first_sessions(requests, selection.sessions)
        too_short = warning("source-too-short", source=source, sessions=have, asked=selection.sessions, again=again)
        warnings = (*warnings, too_short)
    return replace(requests, facts={"source": source, "source_reason": reason, **requests.facts}, warnings=warnings)
