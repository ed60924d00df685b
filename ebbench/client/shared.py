"""State shared by worker processes: a file of integers and a lock, both opened by path.

A lock on a file does not outlive its process: the kernel releases it when a worker dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

_MEMORY = Path("/dev/shm")


def memory_folder() -> Path | None:
    """A directory in memory (``/dev/shm``), or None if there is none.

    The first write to a page of a file on disk can wait 5 to 20 ms for the file system, in the middle of a run.
    """
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


class SharedMemory:
    """64-bit integers in a mapped file, shared by every process that opens the same path."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._ints = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, length: int) -> SharedMemory:
        """Create a file of ``length`` zeros at a new path."""
        path.write_bytes(bytes(8 * length))
        return cls(path)

    def __getitem__(self, index: int) -> int:
        return self._ints[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._ints[index] = value


class FileLock:
    """Mutual exclusion between processes; held for microseconds."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def __enter__(self) -> FileLock:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)
