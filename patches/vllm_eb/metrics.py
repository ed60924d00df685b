"""Passes the policy's figures from the scheduler's process to the process that serves /metrics.

In vLLM the scheduler runs in the engine core's process, and Prometheus asks the API server's. vLLM's own statistics use
a structure without room for more values, so these figures go through a memory page that both processes map: a small
file in /dev/shm. The scheduler stores numbers of eight bytes, so that a reader never sees a partial one; the API server
reads them on request (:mod:`vllm_eb.stat_logger`). The file's name is derived from the engine's ``instance_id``, which
vLLM gives to both processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from vllm_eb.decisions import Decision, Mode, Phase, Record

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
