"""Converts a finished run to a probe of the search: counted requests, share within the limits, growth of the queue.

Only requests sent in the steady window count. The window starts after the system has filled; its end is moved forward
by a 90th percentile of latency, so that no counted request is served while the system drains. Counted requests that
failed did not meet the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ebbench.analysis.columns import MISSING, Ints, Mask, RequestColumns
from ebbench.analysis.explain import FIGURES as KV_FIGURES
from ebbench.analysis.metrics import (
    NS_PER_MS,
    Window,
    completed_sessions_per_s,
    limited_ns,
    meets,
    session_ends_ns,
    slo_from_limits,
    steady_windows,
    tpot_ns,
)
from ebbench.analysis.validity import FAILURE_COLUMNS, FAILURE_LIMIT, failures_by_cause, of_device
from ebbench.records.plan import ClosedPhase
from ebbench.records.run import Run
from ebbench.records.warnings import API_SERVER_LOAD, KV_CACHE, RunWarning
from ebbench.sizing.estimate import Floats, MetCounts, Probe
from ebbench.sizing.limits import LatencyLimits

BATCHES = 20
"""Parts of a run from which its dispersion is estimated."""
FEWEST_PER_OPEN = 8
"""Counted sessions per concurrently open session: a shorter run is mostly filling and draining."""
CORRELATED = 0.4
"""Correlation of neighbouring batches above which a run is too short to estimate the share (Fishman 1978)."""
_UNCLEAR = 0.5
"""A share below this is too low for any length of the run."""
_GROWTH = 0.01
_FEWEST_ENDED, _FASTER = 20, 1.25
"""Sessions that end in the second half of the arrivals, and the ratio of its two halves, by which a run is long enough
to show that the queue grows."""
_FULL = 0.98
_STEP_COLUMNS = ["start_ns", "end_ns", "kv_blocks_used", "kv_blocks_total"]


@dataclass(frozen=True)
class ProbeReading:
    """A probe and further results of its run. Latencies in ms, rates per s."""

    probe: Probe
    run_dir: str
    short: bool
    """Too few sessions for the number that were open, or so few that the queue may have grown only because the
    batch was filling; the probe is not used."""
    correlation: float
    """Of the shares within the limits of neighbouring parts of the run; 0 where it is not known. It is high in a run in
    which the queue changed more slowly than the run lasted."""
    sessions: int
    """Of the whole run."""
    invalid: str
    """Reasons why the run is INVALID although its requests did not fail, such as a late client; the probe is not used,
    since it does not describe the server."""
    mean_open: float
    requests_per_session: float
    completed_sessions_per_s: float
    """Sessions that ended in the steady window."""
    attainment: float
    """Share of counted requests that met the joint limits; 1 if only percentiles are limited."""
    shares: dict[str, float]
    """Share that met each limit alone."""
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: float | None
    """Median, as is ``tpot_ms``."""
    tpot_ms: float | None
    ttft_high_ms: float | None
    """Percentile at the required attainment, as is ``tpot_high_ms``."""
    tpot_high_ms: float | None
    memory_full: float
    """Share of the time with a full KV cache."""
    caveats: tuple[RunWarning, ...] = ()
    """Of plan and device."""
    server_warnings: tuple[RunWarning, ...] = ()
    """That vLLM's API server is busy."""
    kv_warnings: tuple[RunWarning, ...] = ()
    """What a full KV cache cost."""
    kv_figures: Mapping[str, float | None] = field(default_factory=dict)
    """What a full KV cache cost, by the names of the run's JSON."""
    met: bool = True
    """Whether every requirement was met and the queue stayed bounded."""
    asked: int = 0
    """Sessions asked for."""

    @property
    def decides(self) -> bool:
        """Whether the search may use the probe."""
        return not self.short and not self.invalid

    @property
    def correlated(self) -> bool:
        """Whether this run alone looks too short for its queue."""
        return self.correlation > CORRELATED

    @property
    def clearly_over(self) -> bool:
        """Whether the load is too high regardless of the length of the run."""
        few = any(count.share < _UNCLEAR for count in self.probe.counts)
        return few or self.probe.runaway or bool(self.probe.failed)


def read_probe(run: Run, load: float, limits: LatencyLimits, per_open: int = FEWEST_PER_OPEN) -> ProbeReading:
    """Read a finished run. ``per_open``: see :func:`read_measured`. Raises DataError if its tables are damaged."""
    manifest = run.manifest
    steps = run.table("steps", _STEP_COLUMNS)
    reasons = "" if manifest.valid else why_invalid(run)
    measured = ProbeTables(run.requests, steps, manifest.phases, manifest.seed, reasons, str(run.path))
    reading = read_measured(measured, load, limits, per_open)
    if (full := manifest.facts.get(MEMORY_FULL)) is not None:
        reading = replace(reading, memory_full=float(full))
    servers = [warning for warning in manifest.warnings if warning.code in API_SERVER_LOAD]
    memory = [warning for warning in manifest.warnings if warning.code == KV_CACHE]
    others = [warning for warning in manifest.warnings if warning not in (*servers, *memory)]
    plan = (warning for warning in others if (warning.about or warning.code) == "plan")
    return replace(
        reading,
        caveats=(*plan, *of_device(manifest.engine, others)),
        server_warnings=tuple(servers),
        kv_warnings=tuple(memory),
        kv_figures={name: manifest.facts.get(name) for name in KV_FIGURES},
    )


def why_invalid(run: Run) -> str:
    """The reasons for which a run is INVALID, and the most frequent failure of its requests."""
    failures = failures_by_cause(run.table("requests", FAILURE_COLUMNS))
    return "; ".join(map(str, (*run.manifest.reasons, *failures[:1])))


@dataclass(frozen=True)
class ProbeTables:
    """Tables of one run, its closed-loop phases (none: open loop), and the reasons if it is INVALID."""

    requests: pa.Table
    steps: pa.Table
    phases: Sequence[ClosedPhase]
    seed: int
    reasons: str = ""
    run_dir: str = ""


def read_measured(
    run: ProbeTables, load: float, limits: LatencyLimits, per_open: int = FEWEST_PER_OPEN
) -> ProbeReading:
    """Read the tables of one run at ``load``. ``per_open``: with fewer counted sessions per open one it is short.

    Without limits every counted request that completed meets them.
    """
    columns = RequestColumns.of(run.requests)
    windows = steady_windows(columns, run.phases)
    counted, length_s = _counted_requests(columns, windows)
    mean_open = sum(window.target for window in windows) / len(windows) if windows else 0.0
    sessions = len(np.unique(columns.session[counted])) if counted.any() else 0
    runaway = not run.phases and _queue_grows(columns, windows)
    failed = run.reasons if _failed_share(columns) > FAILURE_LIMIT else ""
    masks = limits.masks(columns)
    met = [meets(columns, counted & columns.ok, requirement.slo) for requirement in limits.requirements()]
    counts = tuple(_counts(columns, counted & of, mask) for of, mask in zip(masks, met, strict=True))
    ok, tokens = counted & columns.ok, columns.output_tokens
    good = np.logical_and.reduce([ok, *(mask | ~of for of, mask in zip(masks, met, strict=True))])
    ttft = (columns.first_token - columns.intended)[ok & columns.generated].astype(np.float64)
    tpot = tpot_ns(columns, ok)
    probe = Probe(load, run.seed, counts, runaway, failed, _served_per_s(columns))
    return ProbeReading(
        probe=probe,
        run_dir=run.run_dir,
        short=not failed and _is_short(columns, counts, runaway=runaway, enough=sessions >= per_open * mean_open),
        correlation=0.0 if failed or runaway else max(map(_correlation, counts), default=0.0),
        sessions=len(np.unique(columns.session)),
        invalid="" if failed else run.reasons,
        mean_open=mean_open,
        requests_per_session=float(counted.sum()) / max(1, sessions),
        completed_sessions_per_s=completed_sessions_per_s(columns, windows),
        attainment=float(good.sum() / max(1, counted.sum())),
        met=probe.meets(limits.requirements()),
        shares=_shares(columns, counted, limits),
        goodput_requests_per_s=_per_second(float(good.sum()), length_s),
        goodput_tokens_per_s=_per_second(float(tokens[good].sum()), length_s),
        output_tokens_per_s=_per_second(float(tokens[ok].sum()), length_s),
        ttft_ms=_quantile_ms(ttft, 0.5),
        tpot_ms=_quantile_ms(tpot, 0.5),
        ttft_high_ms=_quantile_ms(ttft, limits.attainment),
        tpot_high_ms=_quantile_ms(tpot, limits.attainment),
        memory_full=_memory_full(run.steps, windows),
    )


def _is_short(columns: RequestColumns, counts: Sequence[MetCounts], *, runaway: bool, enough: bool) -> bool:
    """Whether a run is too short to decide; ``enough``: it has sessions enough for those open at a time."""
    unseen = any(not count.counted for count in counts)  # a class without a request in the steady window
    return unseen or (_still_filling(columns) if runaway else not enough)


MEMORY_FULL = "memory_full"
"""Fact of a probe whose steps were removed: what a search reads from them."""


def memory_full(run: Run) -> float:
    """Share of a run's steady time with a full KV cache."""
    windows = steady_windows(RequestColumns.of(run.requests), run.manifest.phases)
    return _memory_full(run.table("steps", _STEP_COLUMNS), windows)


def _failed_share(columns: RequestColumns) -> float:
    lost = (columns.status == "failed") | (columns.status == "timed_out")
    return float(lost.mean()) if len(lost) else 0.0


def _counted_requests(columns: RequestColumns, windows: tuple[Window, ...]) -> tuple[Mask, float]:
    """The counted requests, and the duration of their arrivals in s."""
    nothing: Mask = np.zeros(len(columns.status), np.bool_)
    if not windows:
        return nothing, 0.0
    start, end = windows[0].start_ns, windows[-1].end_ns
    latency = (columns.last_token - columns.intended)[columns.ok]
    drain = int(np.quantile(latency, 0.9)) if len(latency) else 0
    last = max(end - drain, (start + end) // 2)
    return (columns.intended > start) & (columns.intended <= last), (last - start) / 1e9


def _counts(columns: RequestColumns, counted: Mask, met: Mask) -> MetCounts:
    order = np.argsort(columns.intended[counted], kind="stable")
    good = met[counted][order]
    batches = tuple((int(part.sum()), len(part)) for part in np.array_split(good, BATCHES) if len(part))
    return MetCounts(int(good.sum()), len(good), batches)


def _correlation(counts: MetCounts) -> float:
    """Correlation of neighbouring batches, in a run whose share is not too low for any length; else 0."""
    if not _UNCLEAR <= counts.share < 1 or len(counts.batches) < BATCHES:
        return 0.0
    off = np.array([met / counted for met, counted in counts.batches]) - counts.share
    return float(off[1:] @ off[:-1]) / float(off @ off)


def _shares(columns: RequestColumns, counted: Mask, limits: LatencyLimits) -> dict[str, float]:
    shares = {}
    by_requirement = list(zip(limits.requirements(), limits.masks(columns), strict=True))
    for at, (requirement, of) in enumerate(by_requirement):
        tail = at - (len(by_requirement) - len(limits.tails))
        for name, (metric, limit) in zip(requirement.name.split(), requirement.slo.limits().items(), strict=True):
            met = meets(columns, counted & of & columns.ok, slo_from_limits({metric: limit}))
            key = str(limits.tails[tail]) if tail >= 0 else name
            shares[key] = float(met.sum() / max(1, int((counted & of).sum())))
    return shares


def _queue_grows(columns: RequestColumns, windows: tuple[Window, ...]) -> bool:
    """Whether significantly more sessions were open in the last quarter of the arrivals than in the second.

    Growth is measured per arrival: a server that falls behind by 1 % of the arrivals, plus three standard deviations of
    a Poisson number of open sessions, is overloaded.
    """
    sent = columns.intended != MISSING
    if not windows or sent.sum() < 8:
        return False
    arrivals = np.sort(columns.intended[sent])
    ends = np.sort(np.where(columns.end == MISSING, np.iinfo(np.int64).max, columns.end)[sent])
    edges = np.quantile(arrivals, [0.25, 0.5, 0.75, 1.0]).astype(np.int64)
    second, last = _mean_open(arrivals, ends, edges[0], edges[1]), _mean_open(arrivals, ends, edges[2], edges[3])
    between = len(arrivals) / 2
    return last - second > _GROWTH * between + 3 * math.sqrt(max(second, 1.0))


def _still_filling(columns: RequestColumns) -> bool:
    """Whether completions still become more frequent in the second half of the arrivals, or are too few to tell.

    An overloaded system completes as many sessions in the last quarter as in the one before. In a run of few sessions
    the number of open ones grows at any load, since the first ones have hardly ended when the last ones are sent.
    """
    before, last = (_ended_between(columns, *edges) for edges in ((0.5, 0.75), (0.75, 1.0)))
    return before + last < _FEWEST_ENDED or last > _FASTER * before + 2 * math.sqrt(before + last)


def _served_per_s(columns: RequestColumns) -> float:
    """Sessions completed per second in the second half of the arrivals, when an overloaded system is full."""
    arrivals = columns.intended[columns.intended != MISSING]
    start, end = int(np.quantile(arrivals, 0.5)), int(arrivals.max())
    return _ended_between(columns, 0.5, 1.0) / max(1, end - start) * 1e9


def _ended_between(columns: RequestColumns, after: float, until: float) -> int:
    """Number of sessions that ended between two quantiles of the arrivals."""
    sent = columns.intended != MISSING
    start, end = np.quantile(columns.intended[sent], [after, until]).astype(np.int64)
    last = session_ends_ns(columns)
    return int(((last > start) & (last <= end)).sum())


def _mean_open(arrivals: Ints, ends: Ints, start: int, end: int) -> float:
    times = np.linspace(start, end, 64)
    return float(np.mean(np.searchsorted(arrivals, times, "right") - np.searchsorted(ends, times, "right")))


def _memory_full(steps: pa.Table, windows: tuple[Window, ...]) -> float:
    """Share of the steady time with a full KV cache; 0 if the engine records no steps."""
    if not steps.num_rows or not windows:
        return 0.0
    start, end, used, total = (steps[name].to_numpy() for name in _STEP_COLUMNS)
    inside = (end > windows[0].start_ns) & (start < windows[-1].end_ns)
    length = (end - start) * inside
    return float((length * (used >= _FULL * total)).sum() / max(1, length.sum()))


def _per_second(amount: float, length_s: float) -> float:
    return amount / length_s if length_s > 0 else 0.0


def _quantile_ms(values_ns: Floats, share: float) -> float | None:
    return float(np.quantile(values_ns, share)) / 1e6 if len(values_ns) else None


def least_limits_ms(
    requests: pa.Table, phases: Sequence[ClosedPhase], limits: LatencyLimits, index: int
) -> dict[str, float]:
    """The lowest limits, in ms, with which the requests that requirement ``index`` is of would meet it.

    Infinite where a figure is unknown for so many requests that no limit is met.
    """
    columns = RequestColumns.of(requests)
    counted, _ = _counted_requests(columns, steady_windows(columns, phases))
    counted = counted & limits.masks(columns)[index]
    requirement = limits.requirements()[index]
    names, share = tuple(requirement.slo.limits()), requirement.share
    values = [np.where(columns.ok, limited_ns(columns, name), np.inf)[counted] for name in names]
    ranked = [np.sort(latencies) for latencies in values]
    count = int(counted.sum())
    least = [math.inf] * len(values)
    for rank in range(math.ceil(share * count - 1e-9), count + 1):
        least = [float(latencies[rank - 1]) for latencies in ranked]
        met = np.logical_and.reduce([latencies <= limit for latencies, limit in zip(values, least, strict=True)])
        if met.sum() >= share * count:
            break
    return {name: limit / NS_PER_MS for name, limit in zip(names, least, strict=True)}
