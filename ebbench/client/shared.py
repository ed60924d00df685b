"""What worker processes share beside messages: one file of integers and one lock, both by path.

No pickle and no inherited locks: a worker that dies cannot take the lock with it, since the kernel drops a lock
with its holder.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

_MEMORY = Path("/dev/shm")


def memory_folder() -> Path | None:
    """A folder in memory, or None (the usual temporary one) where there is none.

    A first write to a page of a file on disk may wait 5 to 20 ms for the file system, in the middle of a run.
    """
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


class SharedMemory:
    """Integers of 64 bits in a mapped file. Every process that opens the same path sees the same ones."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._ints = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, length: int) -> SharedMemory:
        """``length`` zeros under a new path."""
        path.write_bytes(bytes(8 * length))
        return cls(path)

    def __getitem__(self, index: int) -> int:
        return self._ints[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._ints[index] = value


class FileLock:
    """Mutual exclusion between processes, held for microseconds at a time."""

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
        """Give the descriptor back."""
        os.close(self._descriptor)
