"""What ``ebbench run`` says before its first run: the engine, the load, the repeats, whose power is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbench.cli.repeats import beforehand
from ebbench.spec.server import is_server

if TYPE_CHECKING:
    from ebbench.engines.base import Engine
    from ebbench.records.plan import Plan
    from ebbench.render.console import Console
    from ebbench.runs.series import Series


def announce(series: Series, engine: Engine, sentence: str, plan: Plan, messages: Console) -> None:
    """Print these lines."""
    from ebbench.spec.server import VIRTUAL_TIME
    from ebbench.workloads.trace import time_note

    messages.print(sentence, markup=False, soft_wrap=True)
    for note in filter(None, (time_note(plan.facts), _at_once(plan))):
        messages.print(note, markup=False, soft_wrap=True)
    virtual = engine.name in VIRTUAL_TIME
    repeats_note = beforehand(
        plan.facts, series.repeats, policies=len(series.policies), until_clear=series.until_clear, virtual=virtual
    )
    if repeats_note:
        messages.print(repeats_note, markup=False, soft_wrap=True)
    if note := _power_note(engine):
        messages.print(note, markup=False, soft_wrap=True)
    if not series.policies_stated and not is_server(series.spec.engine):
        messages.print("No --policy given: running ebplus, and v1 as its baseline.", markup=False, soft_wrap=True)


def _power_note(engine: Engine) -> str:
    """Whose GPU power is measured, or why none is; empty for an engine in virtual time."""
    import os

    from ebbench.client.power import announcement
    from ebbench.engines.endpoint import EndpointEngine, SendingEngine

    if not isinstance(engine, SendingEngine):
        return ""
    url = engine.url if isinstance(engine, EndpointEngine) else "http://127.0.0.1"
    return announcement(url, engine.client.power, os.environ)


def _at_once(plan: Plan) -> str:
    """A note about the effect of an infinite request rate; empty for a finite rate."""
    if not plan.facts.get("all_at_once"):
        return ""
    sessions, open_at_most = int(plan.facts["sessions"]), max(phase.max_concurrency for phase in plan.phases)
    if open_at_most < sessions:
        return f"--request-rate inf: all {sessions:,} sessions wait for one of the {open_at_most:,} open at a time"
    return (
        f"--request-rate inf: all {sessions:,} sessions are released at once, as by `vllm bench serve`; TTFT counts "
        "the wait in the server's queue (--max-concurrency limits how many are open)"
    )
