"""A directory of results belongs to one command at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebbench.errors import RunError, UsageError

LOCK = ".lock"


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Inside, no other process can enter ``directory``, which is made if it does not exist.

    The kernel releases the lock when this process ends, killed or not; the file stays. Raises UsageError if another
    process holds the directory, RunError if a lock cannot be made there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(f"cannot make {error.filename or directory}: {error.strerror or error}") from error
    try:
        _lock(descriptor, directory)
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk; the name is only for the message
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunError(f"cannot lock {directory / LOCK}: {error.strerror}") from error
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise UsageError(
            f"{directory} is in use by {holder}; wait until it ends, or give another output directory"
        ) from None
