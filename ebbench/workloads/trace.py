"""Recorded traffic: Azure's CSV and Mooncake's JSON lines, the format seen from the first line."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from ebbench.errors import InputFileError, UsageError
from ebbench.traffic.spec import Replay
from ebbench.workloads.arrow import int_lists, ints
from ebbench.workloads.requests import Floats, Requests, single_turn

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # tokens behind one hash id in Mooncake's traces
_LARGEST = np.iinfo(np.int32).max


class MooncakeRow(msgspec.Struct, frozen=True):
    """One line: milliseconds, tokens, and the identities of the prompt's blocks of 512 tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


def read_trace(path: Path) -> Requests:
    """All requests of a trace in order of time, ``arrival_s`` counted from the first. Raises InputFileError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text ({error.reason})") from None
    first = next((number for number, line in enumerate(lines) if line.strip()), None)
    if first is None:
        raise InputFileError(path, "is empty; expected an Azure CSV or Mooncake JSON lines")
    if lines[first].lstrip().startswith("{"):
        requests, kind = _mooncake(path, lines), "Mooncake JSON lines"
    elif _columns(lines[first])[:3] == list(AZURE_HEADER):
        requests, kind = _azure(path, lines, first), "Azure CSV"
    else:
        raise InputFileError(
            path,
            f"is no trace: expected the header {','.join(AZURE_HEADER)} (Azure) or JSON lines with timestamp, "
            "input_length and output_length (Mooncake)",
            first + 1,
        )
    return replace(_in_order(requests), facts={"source": f"file:{path}", "source_reason": kind})


def _columns(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _azure(path: Path, lines: list[str], header: int) -> Requests:
    seconds, inputs, outputs = [], [], []
    for number, line in enumerate(lines[header + 1 :], start=header + 2):
        if not line.strip():
            continue
        cells = _columns(line)
        try:
            stamp, context, generated = cells[0], int(cells[1]), int(cells[2])
            seconds.append(_seconds(stamp))
        except (ValueError, IndexError):
            problem = f"expected time, context tokens and generated tokens, found {line.strip()[:80]!r}"
            raise InputFileError(path, problem, number) from None
        _check_lengths(path, number, context, generated)
        inputs.append(context)
        outputs.append(generated)
    return _requests(path, np.array(seconds), inputs, outputs)


def _seconds(stamp: str) -> float:
    """Seconds of ``2023-11-16 18:17:03.9799600`` (any number of decimals, with or without a zone)."""
    whole, _, rest = stamp.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = dt.datetime.fromisoformat(whole + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _mooncake(path: Path, lines: list[str]) -> Requests:
    decoder = msgspec.json.Decoder(MooncakeRow)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            problem = str(error).replace("`", "'")
            raise InputFileError(
                path, f"{problem}; expected timestamp, input_length, output_length and optional hash_ids", number
            ) from None
        _check_lengths(path, number, row.input_length, row.output_length)
        if row.hash_ids and len(row.hash_ids) > -(-row.input_length // BLOCK_TOKENS):
            problem = f"{len(row.hash_ids)} hash_ids are too many for {row.input_length} tokens in blocks of 512"
            raise InputFileError(path, problem, number)
        rows.append(row)
    requests = _requests(
        path,
        np.array([row.timestamp for row in rows]) / 1e3,
        [row.input_length for row in rows],
        [row.output_length for row in rows],
    )
    return replace(requests, hash_ids=int_lists([row.hash_ids for row in rows]))


def _check_lengths(path: Path, line: int, input_tokens: int, output_tokens: int) -> None:
    if not (1 <= input_tokens <= _LARGEST and 1 <= output_tokens <= _LARGEST):
        problem = f"lengths must be 1 token or more, not {input_tokens} and {output_tokens}"
        raise InputFileError(path, problem, line)


def _requests(path: Path, seconds: Floats, inputs: list[int], outputs: list[int]) -> Requests:
    if not len(seconds):
        raise InputFileError(path, "holds no requests")
    return single_turn(
        np.array(inputs, np.int32), np.array(outputs, np.int32), arrival_s=seconds - float(seconds.min())
    )


def _in_order(requests: Requests) -> Requests:
    """Requests by time; those of one moment keep the order of the file."""
    assert requests.arrival_s is not None  # every trace has times
    order = np.argsort(requests.arrival_s, kind="stable")
    if (np.diff(order) == 1).all():
        return requests
    return replace(
        requests,
        input_tokens=requests.input_tokens[order],
        output_tokens=requests.output_tokens[order],
        hash_ids=None if requests.hash_ids is None else requests.hash_ids.take(ints(order, pa.int64())),
        arrival_s=requests.arrival_s[order],
    )


def replayed(requests: Requests, replay: Replay) -> Requests:
    """Slice, repeat and scale in time. A slice begins at zero; a repetition has contents of its own.

    Raises UsageError when the slice is empty.
    """
    assert requests.arrival_s is not None  # every trace has times
    end = np.inf if replay.duration_s is None else replay.start_s + replay.duration_s
    inside = (requests.arrival_s >= replay.start_s) & (requests.arrival_s < end)
    if not inside.any():
        length = float(requests.arrival_s[-1])
        raise UsageError(
            f"no request of the trace lies in the slice from {replay.start_s:g} s; it is {length:g} s long"
        )
    part = requests.keep(inside)
    assert part.arrival_s is not None
    part = replace(part, arrival_s=part.arrival_s - replay.start_s)
    times = part.arrival_s
    assert times is not None
    # Without a stated length one repetition follows another after a mean gap.
    span = replay.duration_s or float(times[-1]) * (1 + 1 / max(1, len(times) - 1))
    starts = np.repeat(np.arange(replay.repeat), len(times)) * span
    n = replay.repeat
    return replace(
        single_turn(np.tile(part.input_tokens, n), np.tile(part.output_tokens, n)),
        hash_ids=_repeated_hashes(part.hash_ids, n),
        arrival_s=(np.tile(times, n) + starts) / replay.speed,
        facts={**requests.facts, "speed": replay.speed, "repeat": n},
    )


def _repeated_hashes(hash_ids: pa.Array | None, repeat: int) -> pa.Array | None:
    """Fresh identities in each repetition, or a repetition would be served from the prefix cache of the last."""
    if hash_ids is None or repeat == 1:
        return hash_ids
    rows = hash_ids.to_pylist()
    step = max((one for row in rows if row for one in row), default=-1) + 1
    return int_lists([None if row is None else [one + i * step for one in row] for i in range(repeat) for row in rows])
