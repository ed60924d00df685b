"""What a scheduler reports of its steps: to a record directory, to vLLM's /metrics, and to the gateway.

Each is optional. With asynchronous scheduling a step is scheduled while an earlier one is computed, so a step is noted
when it is scheduled and reported when its result comes back.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_eb import compat
from vllm_eb.config import PluginConfig, logger
from vllm_eb.controller import Controller
from vllm_eb.signals import Signal, SignalPublisher
from vllm_eb.strategy import Decision, Mode, Phase, Record

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
        existing = [int(path.stem) for path in folder.glob("*.msgpack") if path.stem.isdigit()]
        self._shard = max(existing, default=-1) + 1
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


PHASES: tuple[Phase, ...] = get_args(Phase)
MODES: tuple[Mode, ...] = get_args(Mode)
_LAYOUT = 1.0  # first number of a file: version of the layout
_MODE, _PHASE, _K, _LIMIT, _THETA, _MODE_SWITCHES, _PHASE_SWITCHES, _REFILLS = range(1, 9)
_NUMBERS = 9
_RANK_OF_COPY = re.compile(r"_dp\d+$")  # suffix that vLLM adds to instance_id for a data-parallel rank


@dataclass(frozen=True)
class Figures:
    """Current state of one engine's policy, and counts since the engine started.

    ``k``: idle slots that start a refill. ``n_limit``: requests that may run. ``theta``: k as a share of them. None if
    the policy has no such figure. A refill is a change to a phase that admits prompts.
    """

    mode: Mode
    phase: Phase
    k: int | None
    n_limit: int
    theta: float | None
    mode_switches: int
    phase_switches: int
    refills: int


class FiguresWriter:
    """Writes the figures of data-parallel rank ``rank`` of engine ``instance``, which begins in ``mode``.

    Raises OSError if the file cannot be created. :meth:`close` removes it; files left by killed engines are removed
    when the next engine starts.

    Passes the policy's figures from the scheduler's process to the process that serves /metrics.

    In vLLM the scheduler runs in the engine core's process, and Prometheus asks the API server's. vLLM's own statistics
    use a structure without room for more values, so these figures go through a memory page that both processes map: a
    small file in /dev/shm. The scheduler stores numbers of eight bytes, so that a reader never sees a partial one; the
    API server reads them on request (:mod:`vllm_eb.stat_logger`). The file's name is derived from the engine's
    ``instance_id``, which vLLM gives to both processes.
    """

    def __init__(self, instance: str, rank: int, mode: Mode, folder: Path | None = None) -> None:
        _remove_left_behind(_folder(folder))
        self._path = _folder(folder) / f"{_stem(instance)}{rank}-{os.getpid()}"
        self._numbers = _mapped(self._path, create=True)
        self._remove = weakref.finalize(self, _remove_file, self._path)  # not all schedulers are shut down properly
        self._numbers[:] = math.nan
        self._numbers[_MODE_SWITCHES:] = 0.0
        self._mode = mode

    def update(self, decision: Decision | None, records: Iterable[Record] = ()) -> None:
        """Update the figures from the controller's records since the last call and the current decision."""
        numbers = self._numbers
        for record in records:
            numbers[_THETA] = _or_nan(record.values.get("theta"))
            if record.kind == "phase":  # each record is one change
                numbers[_PHASE_SWITCHES] += 1
                numbers[_REFILLS] += record.phase != "decode"
            if record.mode != self._mode:
                numbers[_MODE_SWITCHES] += 1
                self._mode = record.mode
        if decision is None:
            return
        numbers[_MODE], numbers[_PHASE] = MODES.index(decision.mode), PHASES.index(decision.phase)
        numbers[_K], numbers[_LIMIT] = _or_nan(decision.k), decision.n_limit
        numbers[0] = _LAYOUT  # marks the file as filled

    def close(self) -> None:
        """Remove the file; may be called twice."""
        self._remove()


def read_figures(instance: str, folder: Path | None = None) -> Iterator[tuple[int, Figures]]:
    """Rank and figures of each engine core of ``instance`` on this machine that has scheduled a step."""
    for path in sorted(_folder(folder).glob(f"{_stem(instance)}*-*")):
        rank, _, writer = path.name.removeprefix(_stem(instance)).partition("-")
        if not _alive(int(writer)):
            continue
        try:
            numbers = _mapped(path, create=False)
        except (OSError, ValueError):  # removed after it was listed
            continue
        if numbers[0] == _LAYOUT:
            yield int(rank), _figures(numbers)


def _figures(numbers: npt.NDArray[np.float64]) -> Figures:
    def number(place: int) -> float | None:
        return None if math.isnan(numbers[place]) else float(numbers[place])

    k = number(_K)
    return Figures(
        mode=MODES[int(numbers[_MODE])],
        phase=PHASES[int(numbers[_PHASE])],
        k=None if k is None else int(k),
        n_limit=int(numbers[_LIMIT]),
        theta=number(_THETA),
        mode_switches=int(numbers[_MODE_SWITCHES]),
        phase_switches=int(numbers[_PHASE_SWITCHES]),
        refills=int(numbers[_REFILLS]),
    )


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_left_behind(folder: Path) -> None:
    """Remove files of this user's engines that no longer run."""
    for path in folder.glob(f"vllm_eb-{os.getuid()}-*"):
        writer = path.name.rpartition("-")[2]
        if writer.isdigit() and not _alive(int(writer)):
            _remove_file(path)


def _or_nan(value: float | int | None) -> float:
    return math.nan if value is None else float(value)


def _folder(folder: Path | None) -> Path:
    if folder is not None:
        return folder
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _stem(instance: str) -> str:
    """Prefix of an engine's file names; the user id separates users."""
    return f"vllm_eb-{os.getuid()}-{_RANK_OF_COPY.sub('', instance)}-"


def _mapped(path: Path, *, create: bool) -> npt.NDArray[np.float64]:
    """The numbers of a file, shared by all processes that map it.

    A new file is readable and writable by its owner only.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+b" if create else "rb") as file:
        if create:
            file.truncate(_NUMBERS * 8)
        return np.memmap(file, np.float64, "r+" if create else "r", shape=(_NUMBERS,))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class StepReports:
    """Reports of one scheduler, which is data-parallel rank ``rank`` of its engine.

    ``controller``: None if vLLM's own rules decide. Counts of KV blocks and requests are read from ``scheduler`` when a
    step is scheduled and when its result comes back.
    """

    def __init__(self, scheduler: Any, controller: Controller | None, config: PluginConfig, rank: int) -> None:
        self._scheduler, self._controller = scheduler, controller
        self._total_blocks = compat.usable_blocks(scheduler)
        self._recorder: Recorder | None = None
        if config.record is not None:
            head = {"policy": config.policy.name, "kv_blocks_total": self._total_blocks}
            self._recorder = Recorder(folder_of_rank(config.record, rank), head)
        self._publisher = SignalPublisher(config.signals, rank) if config.signals is not None else None
        self._rank, self._received, self._published = rank, 0, 0
        self._figures = self._make_figures(scheduler.vllm_config.instance_id, rank)
        self._in_flight: deque[tuple[Any, int, StepRecord | None]] = deque()  # output, time, what the record says
        self._device_free_ns = 0

    def _make_figures(self, instance: str, rank: int) -> FiguresWriter | None:
        """Writer of the figures for /metrics; None if vLLM keeps no statistics or the policy has none."""
        if not self._scheduler.log_stats or self._controller is None:
            return None
        try:
            figures = FiguresWriter(instance, rank, self._controller.mode)
        except OSError as error:
            logger.warning("vllm_eb: no policy figures in /metrics: %s", error)
            return None
        self._controller.keep_records()
        return figures

    @property
    def wanted(self) -> bool:
        """Whether anything is reported at all."""
        return any(report is not None for report in (self._recorder, self._figures, self._publisher))

    def received(self) -> None:
        """Count a request that arrived."""
        self._received += 1

    def scheduled(
        self, output: Any, step_id: int, decision: Decision | None, prefilling: Collection[Any], admitted: list[str]
    ) -> None:
        """Note a step that holds tokens.

        ``prefilling``: requests with prompt tokens left before it; ``admitted``: ids of the requests it admits.
        """
        if self._recorder is None and self._publisher is None:
            return
        now_ns, record = time.monotonic_ns(), None
        if self._recorder is not None:
            record = self._step_record(output, now_ns, step_id, decision, prefilling, admitted)
        self._in_flight.append((output, now_ns, record))

    def _step_record(
        self, output: Any, now_ns: int, step_id: int, decision: Decision | None, prefilling: Collection[Any],
        admitted: list[str],
    ) -> StepRecord:  # fmt: skip
        tokens = output.num_scheduled_tokens
        prompts = {request.request_id for request in prefilling}.union(admitted) & tokens.keys()
        running, waiting = self._scheduler.get_request_counts()
        return StepRecord(
            step_id=step_id,
            scheduled_ns=now_ns,
            mode=decision.mode if decision else "mb",
            prefill_tokens=sum(tokens[request_id] for request_id in prompts),
            decode_seqs=len(tokens) - len(prompts),
            scheduled=tokens,
            kv_blocks_used=self._total_blocks - compat.free_blocks(self._scheduler),
            waiting=waiting,
            running=running,
            preempted=output.preempted_req_ids or (),
            k=decision.k if decision else None,
            n_limit=decision.n_limit if decision else None,
        )

    def ended(self, output: Any, decision: Decision | None, prefilling: Collection[Any]) -> None:
        """Report the step of ``output``, whose result has come back, and the decisions since the last one.

        ``decision``: the last one; ``prefilling``: running requests with prompt tokens left.
        """
        if self._in_flight and self._in_flight[0][0] is output:
            _, scheduled_ns, record = self._in_flight.popleft()
            start_ns = max(self._device_free_ns, scheduled_ns)  # scheduled while another one ran, it starts after that
            end_ns = self._device_free_ns = time.monotonic_ns()
            if self._recorder is not None and record is not None:
                record.start_ns, record.end_ns = start_ns, end_ns
                self._recorder.step(record)
            if self._publisher is not None:
                self._publisher.publish(self._signal(end_ns - start_ns, prefilling))
                self._published += 1
        if self._recorder is not None or self._figures is not None:
            records = self._controller.drain_records() if self._controller is not None else []
            if self._recorder is not None:
                self._recorder.decisions(records)
            if self._figures is not None:
                self._figures.update(decision, records)

    def _signal(self, duration_ns: int, prefilling: Collection[Any]) -> Signal:
        """The end of a pass and the remaining work, for the gateway."""
        scheduler = self._scheduler
        unfinished = [request for request in prefilling if request.is_prefill_chunk]
        queued = sum(r.num_tokens - r.num_computed_tokens for r in (*unfinished, *scheduler.waiting))
        used = (self._total_blocks - compat.free_blocks(scheduler)) * compat.block_tokens(scheduler)
        generates = len(scheduler.running) > len(unfinished)
        continues = generates or queued > 0 or bool(self._in_flight)
        return Signal(self._rank, self._published, duration_ns, self._received, queued, used, continues, generates)

    def close(self) -> None:
        """Write what is left, and remove what other processes read."""
        for report in (self._publisher, self._recorder, self._figures):
            if report is not None:
                report.close()
