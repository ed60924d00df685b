"""Data sets given as logs: LongBench v2 is read; of the others, the error says how their texts are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ebbench.errors import InputFileError
from ebbench.workloads.formats_columns import CHOICES, Definition, read_columns
from ebbench.workloads.log_columns import names_in, recognise
from ebbench.workloads.log_files import LogFile
from ebbench.workloads.log_texts import BLOCK_TOKENS
from ebbench.workloads.recorded import Dropped, Reading, ReadOptions, Recorded, Rows, TraceFormat, unusable


def _messages_with(name: str, *keys: str) -> Callable[[LogFile], bool]:
    """Whether the first record has a list under ``name`` of messages with these keys, and no token counts."""

    def recognises(log: LogFile) -> bool:
        messages = log.sample[0].value.get(name)
        return isinstance(messages, list) and bool(messages) and _has_texts(messages[0], keys)

    return recognises


def _fields(*names: str) -> Callable[[LogFile], bool]:
    return lambda log: _has_texts(log.sample[0].value, names)


def _has_texts(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in names)


def _is_longbench(log: LogFile) -> bool:
    return _fields("context", "input")(log) and isinstance(log.sample[0].value.get("answers"), list)


def _without_counts(log: LogFile) -> bool:
    columns = recognise(names_in(record.value for record in log.sample), {})
    return not {"input", "output"} <= columns.names.keys()


def _data_set(name: str, workload: str, recognises: Callable[[LogFile], bool], hint: str = "") -> TraceFormat:
    """A data set that a bundled workload reads; as a log only by the columns that the user names."""

    def read(log: LogFile, options: ReadOptions) -> Reading:
        if options.columns:
            return read_columns(log, options, Definition())
        command = f"ebbench run {workload} --source file:{log.path}"
        problem = f"is {name}, a data set without token counts and no log; send its texts with: {command}{hint}"
        raise InputFileError(log.path, problem)

    return TraceFormat(
        f"{name} data set", "", (), lambda log: recognises(log) and _without_counts(log), read, choices=CHOICES
    )


_ROUNDS = " (conversations of 6 to 12 rounds; a copy of workloads/wildchat.toml with another rounds_min takes others)"
_LETTERS = ("choice_A", "choice_B", "choice_C", "choice_D")


def _read_longbench_v2(log: LogFile, options: ReadOptions) -> Reading:
    return Reading(
        _longbench_v2_rows(log, options), block_tokens=BLOCK_TOKENS, from_texts=True,
        notes=("LongBench v2 is a data set without times; a prompt is its context, question and choices",),
    )  # fmt: skip


def _longbench_v2_rows(log: LogFile, options: ReadOptions) -> Rows:
    texts = options.texts
    for record in log.records():
        parts = [record.value.get(name) for name in ("context", "question", *_LETTERS)]
        prompt, answer = "\n".join(part for part in parts if isinstance(part, str)), record.value.get("answer")
        inputs = texts.tokens(prompt) if prompt else None
        outputs = texts.tokens(answer) if isinstance(answer, str) and answer else None
        if inputs is None or outputs is None:
            yield Dropped(record.line, unusable(inputs, outputs))
            continue
        ids = texts.prefix_ids(prompt, inputs)
        yield Recorded(record.line, None, inputs, outputs, ids, prompt=prompt if texts.keep else None)


DATA_SETS = (
    _data_set("ShareGPT", "sharegpt", _messages_with("conversations", "from", "value")),
    _data_set("WildChat or LMSYS-Chat", "wildchat", _messages_with("conversation", "role", "content"), _ROUNDS),
    _data_set("NuminaMath", "numinamath", _fields("problem", "solution")),
    _data_set("LongBench", "longbench", _is_longbench),
    TraceFormat(
        "LongBench v2",
        "",
        (),
        _fields("question", "choice_A", "context", "answer"),
        _read_longbench_v2,
    ),
)
