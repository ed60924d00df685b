"""Converts conversations to requests: counts tokens, cuts contexts, applies caps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ebbench.errors import InputFileError
from ebbench.workloads.files import FileRecord
from ebbench.workloads.requests import Int32s, Requests, single_turn, strings, with_history
from ebbench.workloads.spec import Records, Schema
from ebbench.workloads.tokens import TokenCounter


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
    return _requests(sample, rules, counter, with_text)


def _admit(
    sample: _Sample, batch: list[Conversation], rules: Records, counter: TokenCounter, rng: np.random.Generator
) -> None:
    if rules.input_max is not None:
        batch = _cut_contexts(batch, rules, counter, rng)
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


def _cut_contexts(
    batch: list[Conversation], rules: Records, counter: TokenCounter, rng: np.random.Generator
) -> list[Conversation]:
    """Join context and question so that the prompt's length is uniformly distributed between the rules' bounds."""
    lowest, highest = rules.input_min or 1, rules.input_max or 1
    targets = rng.integers(lowest, highest, size=len(batch), endpoint=True)
    tails = [_BREAK + talk[0].message for talk in batch]
    tail_tokens = counter.count(tails)
    whole = counter.count([talk[0].context for talk in batch]) + tail_tokens
    return [
        [talk[0]._replace(message=counter.cut(talk[0].context, int(target - tail_size)) + tail, context="")]
        for talk, tail, tail_size, target, size in zip(batch, tails, tail_tokens, targets, whole, strict=True)
        if size >= lowest > tail_size  # independent of the target length, so that the seed does not select the records
    ]


def _requests(sample: _Sample, rules: Records, counter: TokenCounter, with_text: bool) -> Requests:
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
