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

    The kernel releases the lock when this process ends; if it is killed, the file stays and means nothing. Raises
    UsageError if another process holds the directory, RunError if a lock cannot be made there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(directory)
    except OSError as error:
        raise RunError(f"cannot lock {error.filename or directory}: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # a full disk; the name is only for the message
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # the directory may be gone
            (directory / LOCK).unlink()
        os.close(descriptor)


def _locked(directory: Path) -> int:
    """An open descriptor of the lock file, locked."""
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, directory)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between the two calls


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise UsageError(
            f"{directory} is in use by {holder}; wait until it ends, or give another output directory"
        ) from None
