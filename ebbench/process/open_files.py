"""The limit on open files of this process and its children: one descriptor is needed per connection."""

from __future__ import annotations

import contextlib
import resource

OTHER_FILES = 64
"""Descriptors that a process of the client needs beside its connections."""


def allow_open_files(wanted: int) -> int:
    """Raise the soft limit to ``wanted``, as far as the hard limit lets; returns how many may be open then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a limit of the kernel below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft
