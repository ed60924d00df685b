"""Plans and runs with a line of progress."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.markup import escape

from ebbench.devices.base import Device
from ebbench.records.plan import Plan
from ebbench.render.console import Console
from ebbench.render.live import reporter
from ebbench.runs.execute import Executed, execute
from ebbench.runs.prepare import Prepared
from ebbench.runs.series import Series


def planned(series: Series, seed: int, device: Device, messages: Console, *, quiet: bool) -> Plan:
    """The plan of one seed, with a spinner while it is read. Raises UsageError for a request that does not fit."""
    reading: AbstractContextManager[object] = nullcontext()
    if messages.is_terminal and not quiet:
        reading = messages.status(f"reading {escape(series.spec.plan.workload)}")  # a data set may take seconds
    with reading:
        return series.plan(seed, device)


def measured(
    ready: Prepared, directory: Path, label: str, messages: Console, *, quiet: bool, brief: bool = False
) -> Executed:
    """Execute a run and store it in ``directory``, with a progress line named ``label``.

    ``brief``: it is one run of many, of which only long ones are shown.
    """
    known = ready.plan.release_for_s is None
    with reporter(messages, label, len(ready.plan), quiet=quiet, brief=brief, known=known) as observer:
        return execute(ready, directory, observer)
