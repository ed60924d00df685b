"""The saturated rate that scenarios with shares refer to, measured before the run if it was not given.

In virtual time a closed loop with twice the sequences that fit into a batch measures it within seconds
(:func:`saturated_rate`). In real time such a loop could take an hour on a small server, and the size of a
server's batch may be unknown. There a capacity search without limits doubles the open sessions until twice as many
complete no more per second, within a budget.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Slo, completed_sessions_per_s, session_ends_ns, steady_windows
from ebbench.engines.sim import SimEngine
from ebbench.errors import InterruptedRunError, RunError, UsageError
from ebbench.records import files
from ebbench.records.plan import Plan
from ebbench.records.run import MANIFEST, SEARCH, default_run_dir, unused
from ebbench.records.warnings import Fact, fact
from ebbench.runs.execute import run_plan, stoppable
from ebbench.runs.prepare import without_load
from ebbench.sizing.drive import SearchBudget, SearchConfig, search_capacity
from ebbench.sizing.limits import LatencyLimits
from ebbench.sizing.prober import RunProber, one_server
from ebbench.sizing.sentences import SATURATION, not_saturated, saturation_begins
from ebbench.spec.server import VIRTUAL_TIME
from ebbench.workloads.planner import make_plan

if TYPE_CHECKING:
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine
    from ebbench.render.documents import Console
    from ebbench.runs.prepare import Series
    from ebbench.sizing.drive import SearchOutcome
    from ebbench.spec.run import RunSpec


# The rate at which a system that is never idle completes sessions, from closed loops in simulation.
#
# A closed loop with twice as many open sessions as a batch holds keeps the batch full. For 18 combinations of three
# devices, three workloads and two policies no smaller loop completed more than 1 % more.
#
# Where requests share prefixes, such as the turns of a conversation, fewer open sessions may complete several times
# as much, because the prefix cache then holds their prefixes: an H200 completed 1.6 conversations/s of wildchat with
# 2,048 open and 4.2/s with 256. There loops of falling size are tried, and the highest rate counts.

SESSIONS_PER_OPEN = 8
"""Sessions of a closed loop per open one: within 4 % of the rate with 60 (five settings on three GPUs, three seeds).
With 3, and the filling counted, the rate was 9 to 15 % too low."""
_SMALLEST = 8
_PAST_THE_PEAK = 0.7
"""Loops of falling size end at this share of the highest rate so far: with fewer open sessions a batch is emptier."""


class Saturated(NamedTuple):
    """The highest rate in sessions/s, and the number of open sessions that completed it."""

    per_s: float
    concurrency: int


def saturated_rate(spec: RunSpec, simulated: Callable[[Plan], pa.Table], max_num_seqs: int) -> Saturated:
    """The saturated rate of an engine whose batches hold ``max_num_seqs`` sequences, under the run's workload.

    ``simulated``: carries out a plan; returns its requests.
    """

    def loop(concurrency: int) -> tuple[float, bool]:
        sessions = SESSIONS_PER_OPEN * concurrency
        plan = make_plan(spec.changed(scenario="saturated", num_prompts=sessions, max_concurrency=concurrency).plan)
        # Turns of a session find prefixes of others in the cache, and hashed blocks may.
        shares = bool(np.any(plan.table["turn"])) or plan.table["hash_ids"].null_count < len(plan)
        return completed_once_full(simulated(plan), plan, concurrency), shares

    concurrency = 2 * max_num_seqs
    rate, shared = loop(concurrency)
    best = Saturated(rate, concurrency)
    while shared and concurrency > _SMALLEST:
        concurrency //= 2
        rate, _ = loop(concurrency)
        if rate < _PAST_THE_PEAK * best.per_s:
            break
        best = max(best, Saturated(rate, concurrency))
    return best


def completed_once_full(requests: pa.Table, plan: Plan, concurrency: int) -> float:
    """Sessions/s that a closed loop completed after its first ``concurrency`` sessions had ended.

    Until then the batch is filled and has answers of one age, of which few end. ``requests``: those of the run.
    """
    columns = RequestColumns.of(requests)
    windows = steady_windows(columns, plan.phases)
    ends = np.sort(session_ends_ns(columns))
    full_ns = int(ends[min(concurrency, len(ends)) - 1])
    later = [replace(window, start_ns=full_ns) for window in windows if window.start_ns < full_ns < window.end_ns]
    return completed_sessions_per_s(columns, later or windows)


BUDGET_S = 600.0
"""Longest measurement in real time."""
_SESSIONS, _ALONE, _PER_OPEN = 60, 4, 4
"""In real time: fewest sessions per probe, sessions sent one at a time first, counted sessions per open one."""


def with_saturation(
    series: Series, engine: Engine, device: Device, messages: Console, *, beside: Path | None, quiet: bool
) -> Series:
    """The series with the measured rate; says before how it is measured and for how long, and what came out.

    Measured under the first policy, since all policies get the same plan. Raises RunError if nothing could be measured,
    InterruptedRunError if the user stopped it.
    """

    def say(text: str) -> None:
        messages.say(text, quiet=quiet)

    if engine.name in VIRTUAL_TIME:
        saturation = _simulated(series, engine, device)
    else:
        most = 2 * series.spec.server.max_num_seqs if engine.name == "vllm" else None
        folder = _folder(series, beside)
        say(saturation_begins(series.spec.plan.scenario, BUDGET_S, most, folder))
        saturation = _measured(series, engine, device, messages, folder, most, quiet=quiet)
    say(saturation.worded(SATURATION))
    return replace(series, spec=series.spec.changed(saturation_rate=saturation.values["rate"]))


def _simulated(series: Series, engine: Engine, device: Device) -> Fact:
    """The saturated rate. The emulated engine makes the simulator's steps, so simulation measures for both."""
    spec, policy = without_load(series.spec), series.policies[0]
    simulator = engine if isinstance(engine, SimEngine) else SimEngine()

    def simulated(plan: Plan) -> pa.Table:
        _, result = run_plan(simulator, plan, policy, device, replace(spec.server, warmup=0), stoppable(None))
        return result.uninterrupted().requests

    pool = None if simulator.topology is None else simulator.topology.decode or simulator.topology.replicas
    saturated = saturated_rate(spec, simulated, (1 if pool is None else pool.units) * spec.server.max_num_seqs)
    if not saturated.per_s:
        raise UsageError(
            f"saturation could not be measured: {spec.plan.workload} has too few sessions to fill a batch; give "
            "--saturation-rate, or a smaller --max-num-seqs"
        )
    rate = _rounded(saturated.per_s)
    elsewhere = simulator is not engine
    return fact("simulated", rate=rate, policy=policy.name, sessions=saturated.concurrency, elsewhere=elsewhere)


def _measured(
    series: Series, engine: Engine, device: Device, messages: Console, folder: Path, most: int | None, *, quiet: bool
) -> Fact:
    """Rate of completions of the largest closed loops of a capacity search without limits."""
    begun = time.monotonic()
    search = SearchConfig(
        limits=LatencyLimits(Slo(), 0.95),
        by_concurrency=True,
        sessions=_SESSIONS,
        seconds=0.0,
        precision=0.1,
        seed=series.spec.plan.seed,
        real_time=True,
        most=math.inf if most is None else most,
        alone=_ALONE,
        per_open=_PER_OPEN,
    )
    first = series.policies[0]
    probing = replace(series, policies=(first,), spec=replace(without_load(series.spec), goodput=""))
    prober = RunProber(probing, "saturated", True, device, engine, messages, folder, quiet=quiet)
    try:
        with one_server(prober) as kept:
            outcome = search_capacity(search, kept, SearchBudget(seconds=BUDGET_S))
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted while saturation was measured; its runs are in {folder}") from None
    finally:
        if any(folder.glob(f"*/{MANIFEST}")):  # its runs are probes, which lists of runs show as one search
            files.write_text(json.dumps({"saturation": series.spec.plan.workload}) + "\n", folder / SEARCH)
    return read_saturation(outcome, first.name, time.monotonic() - begun)


def read_saturation(outcome: SearchOutcome, policy: str, seconds: float) -> Fact:
    """The highest rate of all loops; with more sessions than a prefix cache serves the largest ones may be slower."""
    usable = sorted((r for r in outcome.readings if r.decides and not r.probe.failed), key=lambda r: r.probe.load)
    if not usable:
        raise RunError(not_saturated(outcome))
    rate = _rounded(max(reading.completed_sessions_per_s for reading in usable))
    return fact(
        "measured", rate=rate, policy=policy, sessions=usable[-1].probe.load, runs=len(outcome.readings),
        seconds=seconds, limited_by=outcome.limited_by, stopped=outcome.stopped,
    )  # fmt: skip


def _rounded(rate: float) -> float:
    return float(np.format_float_positional(rate, precision=4, fractional=False)) if rate else rate


def _folder(series: Series, beside: Path | None) -> Path:
    """Where the runs of the measurement are stored: beside the command's output directory."""
    if beside is None:
        return default_run_dir(series.spec.plan.workload, "saturation")
    return unused(beside.with_name(f"{beside.name}-saturation"))
