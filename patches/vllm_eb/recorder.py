"""Records steps and decisions inside the engine, outside the scheduling path.

The scheduling thread only appends references to a queue; a daemon thread encodes and writes. A record directory holds
shards ``NNNNNN.msgpack`` of length-prefixed msgpack frames. After a kill, each shard is readable up to its last
complete frame. Frames are lists whose first item is their kind; all times are CLOCK_MONOTONIC ns::

    ["head", {"monotonic_ns", "unix_ns", "pid", "policy", "kv_blocks_total"}]      first frame of every shard
    ["ids", [name, ...]]                               further request ids; number = position
    ["step", step_id, scheduled_ns, start_ns, end_ns, mode, prefill_tokens, decode_seqs, numbers, tokens,
             kv_blocks_used, waiting, running, preempted_names, k, n_limit]     tokens null: one per request
    ["decision", time_ns, step_id, kind, reason, mode, phase, values]
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from vllm_eb.decisions import Record
from vllm_eb.log import logger

SHARD_STEPS = 4096
FLUSH_EVERY_S = 0.5
MAX_QUEUED = 20_000  # steps and groups of decisions: some minutes of a busy server, about 100 MB at 1,000 sequences
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class StepRecord:
    """One step as the scheduler saw it. ``scheduled`` maps request ids to tokens, in scheduling order."""

    step_id: int
    scheduled_ns: int
    mode: str
    prefill_tokens: int
    decode_seqs: int
    scheduled: Mapping[str, int]
    kv_blocks_used: int
    waiting: int
    running: int
    preempted: Collection[str]
    k: int | None
    n_limit: int | None
    start_ns: int = 0
    end_ns: int = 0


class Recorder:
    """Writes a record directory. ``close`` writes the queue and ends the thread.

    Records steps and decisions inside the engine, outside the scheduling path.

    The scheduling thread only appends references to a queue; a daemon thread encodes and writes. A record directory
    holds shards ``NNNNNN.msgpack`` of length-prefixed msgpack frames. After a kill, each shard is readable up to its
    last complete frame. Frames are lists whose first item is their kind; all times are CLOCK_MONOTONIC ns::

        ["head", {"monotonic_ns", "unix_ns", "pid", "policy", "kv_blocks_total"}]      first frame of every shard
        ["ids", [name, ...]]                               further request ids; number = position
        ["step", step_id, scheduled_ns, start_ns, end_ns, mode, prefill_tokens, decode_seqs, numbers, tokens,
                 kv_blocks_used, waiting, running, preempted_names, k, n_limit]     tokens null: one per request
        ["decision", time_ns, step_id, kind, reason, mode, phase, values]
    """

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        self._folder, self._head = folder, dict(head)
        folder.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[StepRecord | Sequence[Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="vllm_eb-recorder", daemon=True)
        self._shard = _next_shard(folder)
        self._file: BinaryIO | None = None
        self._numbers: dict[str, int] = {}
        self._steps = 0
        self.failure: OSError | None = None
        self.dropped = 0
        self._open()
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Queue one finished step."""
        self._put(record)

    def decisions(self, records: Sequence[Record]) -> None:
        """Queue decision records."""
        if records:
            self._put(records)

    def _put(self, item: StepRecord | Sequence[Record]) -> None:
        """Queue an item; drop it if the disk has failed, or if the queue is full because the disk is too slow."""
        if self.failure is not None:
            return
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(item)
            return
        if not self.dropped:
            logger.error("vllm_eb: the disk of %s is too slow for the record: steps are missing from it", self._folder)
        self.dropped += 1

    def close(self) -> None:
        """Write the queue; takes at most 10 s."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _write_all(self) -> None:
        try:
            last_flush = time.monotonic()
            while True:
                try:
                    item = self._queue.get(timeout=FLUSH_EVERY_S)
                except queue.Empty:
                    self._flush()
                    continue
                if item is None:
                    break
                self._write_item(item)
                if time.monotonic() - last_flush > FLUSH_EVERY_S:
                    self._flush()
                    last_flush = time.monotonic()
        except OSError as error:  # disk full: serving continues without recording
            self.failure = error
            logger.error("vllm_eb: the record in %s ends here: %s", self._folder, error)
        finally:
            if self._file is not None:
                self._file.close()

    def _write_item(self, item: StepRecord | Sequence[Record]) -> None:
        if isinstance(item, StepRecord):
            if self._steps >= SHARD_STEPS:
                self._open()
            self._steps += 1
            self._write_step(item)
            return
        for record in item:
            time_ns = round(record.time_s * 1e9)
            what = [record.kind, record.reason, record.mode, record.phase, record.values]
            self._frame(["decision", time_ns, record.step_id, *what])

    def _write_step(self, step: StepRecord) -> None:
        fresh = [name for name in step.scheduled if name not in self._numbers]
        if fresh:
            first = len(self._numbers)
            self._numbers.update((name, first + place) for place, name in enumerate(fresh))
            self._frame(["ids", fresh])
        numbers = [self._numbers[name] for name in step.scheduled]
        tokens = list(step.scheduled.values()) if step.prefill_tokens else None
        self._frame(
            ["step", step.step_id, step.scheduled_ns, step.start_ns, step.end_ns, step.mode, step.prefill_tokens,
             step.decode_seqs, numbers, tokens, step.kv_blocks_used, step.waiting, step.running, list(step.preempted),
             step.k, step.n_limit]
        )  # fmt: skip

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = (self._folder / f"{self._shard:06d}.msgpack").open("xb")
        self._shard += 1
        self._numbers, self._steps = {}, 0
        clocks = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns(), "pid": os.getpid()}
        self._frame(["head", self._head | clocks])
        self._flush()

    def _frame(self, content: list[Any]) -> None:
        assert self._file is not None
        payload = msgspec.msgpack.encode(content)
        self._file.write(_LENGTH.pack(len(payload)) + payload)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()


def folder_of_rank(folder: Path, rank: int) -> Path:
    """Directory of data-parallel rank ``rank``: ranks share their settings, but each numbers its steps from 0."""
    return folder if rank == 0 else folder / f"rank-{rank}"


def _next_shard(folder: Path) -> int:
    existing = [int(path.stem) for path in folder.glob("*.msgpack") if path.stem.isdigit()]
    return max(existing, default=-1) + 1


def read_frames(path: Path) -> list[list[Any]]:
    """Complete frames of a shard; a frame cut by a kill is dropped. Raises ValueError for a file of another format."""
    data = path.read_bytes()
    frames, position = [], 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        end = position + _LENGTH.size + length
        if end > len(data):
            break
        try:
            frames.append(msgspec.msgpack.decode(data[position + _LENGTH.size : end]))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a vllm_eb record ({error} at byte {position})") from None
        position = end
    if not frames or not isinstance(frames[0], list) or frames[0][0] != "head":
        raise ValueError(f"{path} is not a vllm_eb record: it does not begin with a head frame")
    return frames
