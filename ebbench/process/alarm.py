"""Precise times on an event loop: a timer, and a processor soon after the loop is woken.

Event loops round timers to whole milliseconds (libuv and epoll both do), a large part of the lag that a load generator
may have. Linux's timerfd wakes the loop within about ten microseconds and costs nothing while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK_CLOEXEC = 0o2004000
_ITIMERSPEC = ctypes.c_long * 4
"""``struct itimerspec``: interval, then value, each in seconds and nanoseconds."""


class Alarm:
    """Calls ``callback()`` on the loop when the time of the last :meth:`set` has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._handle: asyncio.TimerHandle | None = None
        self._spec = _ITIMERSPEC()
        self._pointer = ctypes.byref(self._spec)
        self._fd, self._settime = _timerfd()
        if self._fd >= 0:
            loop.add_reader(self._fd, self._on_readable)

    def set(self, due_ns: int) -> None:
        """Fire at ``due_ns`` (time.monotonic_ns), at once if that is past; replaces an earlier time."""
        if self._fd < 0:
            self.clear()
            delay_s = max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
            self._handle = self._loop.call_later(delay_s, self._callback)
            return
        # A zero value would disarm the timer instead of firing it.
        self._spec[2], self._spec[3] = divmod(max(due_ns, 1), 1_000_000_000)
        self._settime(self._fd, _ABSOLUTE, self._pointer, None)

    def clear(self) -> None:
        """Cancel the time set, if any."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd >= 0:
            self._spec[2], self._spec[3] = 0, 0
            self._settime(self._fd, _ABSOLUTE, self._pointer, None)

    def close(self) -> None:
        """Close the descriptor; the callback is not called afterwards."""
        self.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        # A set() between expiry and this call makes the descriptor unreadable again: nothing is due yet.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._callback()


def _timerfd() -> tuple[int, Callable[..., int]]:
    """A timer descriptor and the call that arms it; descriptor -1 where the platform has none."""
    if not sys.platform.startswith("linux"):
        return -1, lambda *_: -1
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)), libc.timerfd_settime


@contextlib.contextmanager
def behind_others() -> Iterator[None]:
    """Context in which this thread, when something comes for it, waits until a running one leaves the processor.

    Its share stays the same. Only the usual policy is changed, and nothing where the system has no other or refuses it,
    as sandboxes do.
    """
    changed = False
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


_SLICE_NS = 100_000  # the shortest that Linux grants
_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Number of the system call ``sched_setattr``, which the C library has no function for."""
_KEEP_POLICY = 0x08


class _Attributes(ctypes.Structure):
    """``struct sched_attr``, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def take_short_slices() -> None:
    """Let this thread run in the shortest slices of the processor, and so at once when something comes for it.

    Since Linux 6.12 a thread that wakes takes the processor from one with a longer slice, if it has used less than its
    share; before, it may wait for the end of that slice, which is milliseconds. Needs no rights and takes no share from
    others. Where the system does not know it, nothing changes.
    """
    number = _SETATTR.get(os.uname().machine) if sys.platform.startswith("linux") else None
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = _Attributes(ctypes.sizeof(_Attributes), 0, _KEEP_POLICY, nice, 0, _SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
