"""The progress line of a run, on a terminal and off it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ebbench.engines.base import Progress
from ebbench.engines.vllm import startup_progress
from ebbench.records.plan import Plan
from ebbench.render import live
from ebbench.render.live import reporter
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy


def said(plan: Plan, waited_s: list[float]) -> list[str]:
    """The lines of a run that waited for its server, polled at these times, and then served two requests."""
    console = Console(file=io.StringIO(), width=40)
    with reporter(console, "eb", len(plan)) as observer:
        tell = startup_progress(observer, parse_policy("eb"), plan, Path("/tmp/server.log"))
        for moment_s in waited_s:
            tell(moment_s)
        observer.update(Progress("eb", 2, len(plan), 80, 100, 4.0, "eb", 0, 0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_wait_for_a_server_is_printed_every_minute() -> None:
    plan = build_plan("balanced", None, seed=0, num_prompts=2)
    first, *waiting, last = said(plan, [0.3 * step for step in range(500)])  # 150 s
    assert first == "eb: 2 requests"
    assert waiting == [
        "eb: waiting for the server to start, log /tmp/server.log (60 s)",
        "eb: waiting for the server to start, log /tmp/server.log (120 s)",
    ]
    assert last == "eb: 2/2  20 tok/s  exclusive  at 4.00 s"


def test_a_wait_for_a_server_below_a_minute_is_not_printed() -> None:
    plan = build_plan("balanced", None, seed=0, num_prompts=2)
    assert said(plan, [0.0, 17.0, 59.0]) == ["eb: 2 requests", "eb: 2/2  20 tok/s  exclusive  at 4.00 s"]


SNAPSHOT = Progress("eb", 1204, 4000, 95_120, 120_000, 10.0, "eb", 100, 3)


def test_progress_in_words() -> None:
    assert live.describe(SNAPSHOT) == "1,204/4,000  9,512 tok/s  exclusive  at 10.0 s"
    assert live.describe(replace(SNAPSHOT, time_s=0, mode="")) == "1,204/4,000  – tok/s  at 0 ms"


def test_progress_without_a_terminal_is_two_lines() -> None:
    console = Console(file=io.StringIO(), width=40)
    with live.reporter(console, "eb[red]", 4000) as reporter:
        for _ in range(50):
            reporter.update(SNAPSHOT)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.splitlines() == ["eb[red]: 4,000 requests", "eb[red]: " + live.describe(SNAPSHOT)]


def test_progress_on_a_terminal_is_one_live_line_and_none_with_quiet() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with live.reporter(console, "eb", 4000) as reporter:
        reporter.update(SNAPSHOT)
    assert "1,204/4,000  9,512 tok/s  exclusive" in console.file.getvalue()  # type: ignore[attr-defined]
    silent = Console(file=io.StringIO(), force_terminal=True)
    with live.reporter(silent, "eb", 4000, quiet=True) as reporter:
        reporter.update(SNAPSHOT)
    assert silent.file.getvalue() == ""  # type: ignore[attr-defined]
