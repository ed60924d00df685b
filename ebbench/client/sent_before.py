"""Which prompts were sent to which server before: what nothing emptied may still be in its prefix cache.

One line per run of this user, in ``$XDG_STATE_HOME/ebbench/prompts-sent.jsonl``, by default under ``~/.local/state``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

MOST_LINES = 2_000
"""Older half dropped beyond this: a line has about 150 bytes."""


class SentPrompts(msgspec.Struct):
    """The prompts of one run. ``key`` identifies where they come from, ``count`` is how many of them it sent."""

    server: str
    model: str
    key: str
    count: int
    unix_s: int


class MetBefore(NamedTuple):
    """Share of a plan's prompts that a server was sent before, and when last (seconds since 1970)."""

    share: float
    unix_s: int


def prompts_of(plan: pa.Table) -> tuple[str, int]:
    """What the prompts of a plan come from, and how many there are.

    Synthetic prompts of one seed are the same whatever the load, the first n of any number of them; so their seed's
    stream of contents is the key. Real text and recorded blocks are the same only in the same plan.
    """
    for name in ("prompt", "hash_ids"):
        column = plan.column(name)
        if column.null_count < len(column):
            sink = hashlib.sha256()
            for text in column.to_pylist():
                sink.update(repr(text).encode())
            return sink.hexdigest()[:16], len(column)
    contents = pc.unique(plan.column("content")).to_numpy()
    return f"seed-{int(contents.min()) >> 32:x}", len(contents)


def note_prompts(server: str, model: str, plan: pa.Table, environ: Mapping[str, str] = os.environ) -> MetBefore | None:
    """Note that a server was sent a plan's prompts; returns what was noted before, None if nothing.

    Without a writable folder nothing is known, and nothing noted.
    """
    key, count = prompts_of(plan)
    now = SentPrompts(server, model, key, count, int(time.time()))
    path = record_path(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = file.read().splitlines()
            if len(lines) >= MOST_LINES:
                lines = lines[len(lines) // 2 :]
                file.truncate(0)
                file.write(b"\n".join(lines) + b"\n")
            file.write(msgspec.json.encode(now) + b"\n")
    except OSError:
        return None
    before = [one for one in map(_decoded, lines) if one and (one.server, one.model, one.key) == (server, model, key)]
    if not before:
        return None
    return MetBefore(min(1.0, max(one.count for one in before) / count), max(one.unix_s for one in before))


def record_path(environ: Mapping[str, str]) -> Path:
    """The file that is written to."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ebbench" / "prompts-sent.jsonl"


def _decoded(line: bytes) -> SentPrompts | None:
    try:
        return msgspec.json.decode(line, type=SentPrompts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
