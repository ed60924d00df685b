"""The progress line of a run, on a terminal and off it."""

from __future__ import annotations

import io
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.engines.vllm import startup_progress
from ebbench.records.plan import Progress
from ebbench.render import live
from ebbench.render.documents import Console
from ebbench.render.live import Work, in_words, reporter, shown, time_left_s
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def off_terminal() -> Console:
    return Console(file=io.StringIO(), width=40)


def wait_for_lines(console: Console, count: int) -> list[str]:
    """The lines once there are so many; nothing else happens meanwhile, as in a long step of a command."""
    deadline = time.monotonic() + 60
    while len(written(console)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return written(console)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come every 20 ms instead of every 10 s."""
    monkeypatch.setattr(live, "LINES_EVERY_S", 0.02)


@pytest.mark.usefixtures("often")
def test_a_wait_for_a_server_is_said_again_and_again_with_its_log() -> None:
    plan = build_plan("balanced", None, seed=0, num_prompts=2)
    console = off_terminal()
    with reporter(console, "eb", len(plan)) as observer:
        startup_progress(observer, parse_policy("eb"), plan, Path("/tmp/server.log"))(60.3)
        lines = wait_for_lines(console, 8)
        observer.update(Progress("eb", 2, len(plan), 80, 100, 4.0, "eb", 0, 0))
    assert lines[0] == "eb: 2 requests"
    waits = "eb: waiting for the server to start, log /tmp/server.log (60 s)"  # on a busy machine it comes late
    assert set(lines[-2:]) == {waits}
    assert written(console)[-1] == "eb: 2/2  20 tok/s  exclusive  at 4.00 s"


@pytest.mark.usefixtures("often")
def test_work_is_said_at_intervals_while_nothing_ends() -> None:
    console = off_terminal()
    with shown(console, Work("table 3", 40)) as work:
        work.done = 12
        lines = wait_for_lines(console, 2)
    assert lines[-1].startswith("table 3: 12 of 40 runs, ")
    assert len(written(console)) < len(lines) + 3, "it ends with the block"


def test_short_work_and_brief_runs_have_no_line() -> None:
    console = off_terminal()
    with shown(console, Work("table 3", 40)):
        pass
    with reporter(console, "v1, 12/s", 40, brief=True) as observer:
        observer.update(SNAPSHOT)
    assert written(console) == []


def test_quiet_work_has_no_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with shown(console, Work("table 3", 40), quiet=True):
        pass
    assert written(console) == []


def test_work_tells_its_state_and_the_time_left() -> None:
    work = Work("gate", 40, "pairs", at_most=True, done=10, began_s=time.monotonic() - 100)
    work.doing = "pair 11, baseline"
    assert work.describe() == ("gate: 10 of at most 40 pairs, at most 5 min to go, pair 11, baseline, 2 min so far")
    resumed = Work("sweep", 100, "cells", done=60, kept=50, began_s=time.monotonic() - 20)
    assert resumed.describe() == "sweep: 60 of 100 cells (50 from before), 80 s to go, 20 s so far"


def test_each_part_of_a_work_has_its_own_time_left() -> None:
    work = Work("plan", unit="candidates", began_s=time.monotonic() - 1000)
    work.reached("saturated rates", 3, 12)
    assert work.describe() == "plan: 3 of 12 candidates, saturated rates, 0 s so far"


@pytest.mark.parametrize(
    ("elapsed_s", "done", "total", "left_s"),
    [(10, 1, 5, 40), (10, 0, 5, None), (1, 1, 5, None), (10, 5, 5, None), (10, 1, 0, None)],
)
def test_the_time_left_follows_from_the_speed_so_far(
    elapsed_s: float, done: int, total: int, left_s: float | None
) -> None:
    assert time_left_s(elapsed_s, done, total) == left_s


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (9000, "2.5 h")])
def test_durations_are_told_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.usefixtures("often")
def test_a_run_tells_the_time_left_if_its_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SETTLED_S", 0.0)
    for known, told in ((True, r"4,000  \d+ s to go  9"), (False, r"4,000  9,512")):
        console = off_terminal()
        with reporter(console, "eb", 4000, known=known) as observer:
            observer.update(SNAPSHOT)
            assert re.search(told, wait_for_lines(console, 2)[1])


SNAPSHOT = Progress("eb", 1204, 4000, 95_120, 120_000, 10.0, "eb", 100, 3)


def test_progress_shows_requests_rate_mode_and_time() -> None:
    assert live.describe(SNAPSHOT) == "1,204/4,000  9,512 tok/s  exclusive  at 10.0 s"
    assert live.describe(replace(SNAPSHOT, time_s=0, mode="")) == "1,204/4,000  – tok/s  at 0 ms"


def test_progress_of_answers_without_tokens_counts_requests() -> None:
    embeddings = replace(SNAPSHOT, completed=8, planned=16, output_tokens=0, time_s=4.0)
    assert live.describe(embeddings).startswith("8/16  2 req/s  ")


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


def test_many_short_runs_have_a_line_once_one_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LINES_EVERY_S", 0.3)
    console = off_terminal()
    began_s = time.monotonic()
    while time.monotonic() - began_s < 60 and len(written(console)) < 2:
        with reporter(console, "v1, probe 3, 12/s", 40, brief=True) as observer:
            observer.update(SNAPSHOT)
            time.sleep(0.05)  # each is shorter than the interval
    assert all(line.startswith("v1, probe 3, 12/s: ") for line in written(console))
    assert time.monotonic() - began_s > 0.5, "not a line for each"


def test_a_command_that_shows_nothing_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "LINES_EVERY_S", 0.05)
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    ended = threading.Event()
    thread = threading.Thread(target=live.tell_elapsed, args=("theory", time.monotonic(), ended))
    with shown(off_terminal(), Work("table 3", 40)):  # its own line is enough
        thread.start()
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
    said = ""
    deadline = time.monotonic() + 60
    while "theory: " not in said and time.monotonic() < deadline:
        time.sleep(0.02)
        said += capsys.readouterr().err
    ended.set()
    thread.join()
    assert re.search(r"theory: \d+ s so far", said)
