"""Converts records in the data sets' schemas to exchanges: a user's messages and their responses.

Selection rules: Zhang et al., ICML 2026, section 4.1 and appendix E.1, as stated in the workload files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from ebbench.errors import InputFileError
from ebbench.workloads.files import FileRecord
from ebbench.workloads.spec import Records, Schema


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


def _numinamath(record: NuminaMath, rules: Records) -> list[Conversation]:
    return [[Exchange(record.problem + rules.suffix, record.solution)]]


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
    "numinamath": _Kind(NuminaMath, _numinamath, '{"problem": text, "solution": text}'),
    "wildchat": _Kind(WildChat, _wildchat, '{"conversation": [{"role": "user" or "assistant", "content": text}, ...]}'),
}


def columns_of(schema: Schema) -> list[str]:
    """Names of the record's fields that are read."""
    return [field.encode_name for field in msgspec.structs.fields(_KINDS[schema].struct)]


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


def plain(record: msgspec.Struct) -> Any:
    """The record as plain data in the data set's schema, with only the fields that are read."""
    return msgspec.to_builtins(record)
