"""Messages between the workers and the parent on a socket (four bytes of length, then MessagePack), and of nodes."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec

from ebbench.client.dialects import DraftCounts
from ebbench.client.session_plan import MachineLoad


class RequestRecord(msgspec.Struct, tag="record", array_like=True, gc=False):
    """Measurements of one request. Times are monotonic ns, 0 for "never"; ``token_ns`` holds int64 values as bytes.

    ``token_ns``: one time per message with tokens; these carried ``bundled`` tokens more than one each, the first one
    ``first_tokens``. ``odd_numbers``: what the server reported where no number can be, by field.
    ``other_model``: the model that the server named in the response, if it is not the one asked for. ``estimated``:
    ``output_tokens`` was counted by the client.
    """

    row: int
    worker: int
    status: str
    intended_ns: int = 0
    sent_ns: int = 0
    first_byte_ns: int = 0
    end_ns: int = 0
    token_ns: bytes = b""
    bundled: int = 0
    first_tokens: int = 1
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error_class: str | None = None
    error_body: str | None = None
    http_status: int | None = None
    text: str | None = None
    thinking_tokens: int | None = None
    first_answer_ns: int = 0
    odd_numbers: dict[str, str] | None = None
    first_on_connection: bool = False
    other_model: str | None = None
    estimated: bool = False
    drafts: DraftCounts | None = None


class Batch(msgspec.Struct, tag="batch"):
    """Requests finished since the last batch, the number of open requests, and output tokens received so far."""

    records: list[RequestRecord]
    open_requests: int
    tokens: int


class Ready(msgspec.Struct, tag="ready"):
    """The worker has loaded the plan and waits for the start."""


class Assignment(msgspec.Struct, tag="assignment"):
    """A worker's number, of how many, and what they send. ``folder`` holds the plan and the shared schedule."""

    worker: int
    workers: int
    folder: str
    load: MachineLoad


class Start(msgspec.Struct, tag="start"):
    """Start sending at ``start_ns`` (monotonic)."""

    start_ns: int


class Stop(msgspec.Struct, tag="stop"):
    """Release no further session.

    ``abort``: also abort open requests. ``finish_sessions``: open sessions continue to their last turn.
    """

    abort: bool
    finish_sessions: bool = False


class ConnectionCounts(msgspec.Struct, frozen=True):
    """Connections that a worker opened, the most that were open at a time, and the most of them in use at a time."""

    opened: int = 0
    most_held: int = 0
    most_used: int = 0


class WorkerDone(msgspec.Struct, tag="done"):
    """The worker has finished.

    ``late_ns``: lateness of each tick of its loop, int64 as bytes. ``cpu_s``: CPU seconds since the start. ``error``:
    why it failed, if it did.
    """

    late_ns: bytes
    cpu_s: float
    error: str | None = None
    connections: ConnectionCounts = ConnectionCounts()


class NodeReport(msgspec.Struct):
    """A client node's batches, each with the number of its worker, and how many sessions it has released.

    ``done``: the final messages of its workers once all have ended, None for a worker that died.
    """

    batches: list[tuple[int, Batch]]
    released: int
    done: list[WorkerDone | None] | None = None


class Place(msgspec.Struct, frozen=True):
    """Where a client node runs. ``machine`` and ``network`` are equal for processes that share a loopback address."""

    host: str
    process: int
    version: str
    machine: str
    network: str


FromWorker = Batch | Ready | WorkerDone
FromParent = Assignment | Start | Stop
_PARENT = msgspec.msgpack.Decoder(FromParent)
_WORKER = msgspec.msgpack.Decoder(FromWorker)


def plan_path(folder: Path | str) -> Path:
    """Path of the plan, an Arrow file."""
    return Path(folder) / "plan.arrow"


def schedule_path(folder: Path | str) -> Path:
    """Path of the integers of the shared schedule."""
    return Path(folder) / "schedule"


def lock_path(folder: Path | str) -> Path:
    """Path of the lock of the shared schedule."""
    return Path(folder) / "lock"


def send(writer: asyncio.StreamWriter, message: FromWorker | FromParent) -> None:
    """Queue a message for sending; never blocks."""
    body = msgspec.msgpack.encode(message)
    writer.write(struct.pack("<I", len(body)) + body)


async def from_worker(reader: asyncio.StreamReader) -> FromWorker | None:
    """The next message of a worker, or None if the connection is closed."""
    body = await _body(reader)
    return None if body is None else _WORKER.decode(body)


async def from_parent(reader: asyncio.StreamReader) -> FromParent | None:
    """The next message of the parent, or None if the connection is closed."""
    body = await _body(reader)
    return None if body is None else _PARENT.decode(body)


async def _body(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
