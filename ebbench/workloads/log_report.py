"""What a log was recognised as and what its traffic is like: lengths, gaps, sessions, repeated prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ebbench.errors import UsageError
from ebbench.records import CHUNK_TOKENS
from ebbench.traffic.arrivals import dispersion
from ebbench.traffic.spec import Load, make_schedule
from ebbench.workloads.log_columns import keeps_failed
from ebbench.workloads.options import is_mixture, recorded_file
from ebbench.workloads.recorded import short_number
from ebbench.workloads.requests import Floats, Requests
from ebbench.workloads.shared_prefix import repeats_in
from ebbench.workloads.spec import load_workload
from ebbench.workloads.trace import Trace, read_trace

# How the arrivals that a log, or a workload fitted to one, has of its own differ from the Poisson ones of a search.

_FEWEST = 50
"""Gaps below which they are not compared."""
_CLUSTERED, _BURSTY, _EVEN = 1.5, 1.2, 0.8
"""Dispersion of counts per minute, and coefficients of variation of gaps, from which arrivals differ from Poisson's."""


def poisson_instead(workload: str, settings: Mapping[str, Any]) -> str:
    """A note that arrivals are Poisson where the workload has its own, and how those differ; empty where it has none.

    ``settings``: the other arguments of build_plan. Raises UsageError for a file that cannot be read.
    """
    starts = _own_starts(workload, settings)
    if starts is None or not len(starts) or not starts[-1]:
        return ""
    gaps = describe_gaps(starts)
    of = "recorded ones" if recorded_file(workload) else "ones fitted to a log"
    compared = (
        _differ(gaps["gap_variation"], gaps.get("dispersion_per_minute"))
        if len(starts) > _FEWEST
        else "are too few to be compared with them"
    )
    return (
        f"Arrivals are Poisson at each rate. The {of} ({short_number(gaps['requests_per_s'])} sessions/s) {compared}; "
        "--scenario trace scales them to each rate instead."
    )


def _differ(variation: float, dispersion: float | None) -> str:
    if dispersion is not None and dispersion > _CLUSTERED:
        many = f"counts per minute vary {short_number(dispersion)} times as much"
        return f"come in waves ({many}), so that less is carried at their crests"
    measured = f"coefficient of variation of the gaps {variation:.2f}, Poisson's 1"
    if variation > _BURSTY:
        return f"are burstier ({measured}), so that less is carried under them"
    if variation < _EVEN:
        return f"are more even ({measured}), so that more is carried under them"
    return f"are about as irregular ({measured})"


def _own_starts(workload: str, settings: Mapping[str, Any]) -> Floats | None:
    """When sessions start, in s; None where a workload says nothing of it."""
    path = recorded_file(workload)
    if path is not None:
        trace = read_trace(path, settings.get("columns"), settings.get("tokenizer"))
        if trace.stamps is None:
            return None
        try:
            return trace.timed(settings.get("time_unit")).arrival_s
        except UsageError:  # the unit of its times is not known, and not needed
            return None
    if is_mixture(workload):
        return None
    spec = load_workload(workload)
    own = None if spec.fitted is None else spec.fitted.scenario()
    if own is None:
        return None
    times = make_schedule(own, Load(), None, spec.num_prompts, seed=0).arrival_s
    return None if times is None else np.sort(times)


_WINDOWS = 10
"""Fewest windows of a minute for which the dispersion of counts is given."""


def describe_log(trace: Trace, time_unit: str | None) -> dict[str, Any]:
    """Facts for ``ebbench workloads show log:FILE``, as plain values; times in s. Raises UsageError."""
    rows = trace.collected
    dropped = [{"reason": reason, "rows": count, "first_line": line} for reason, (count, line) in rows.dropped.items()]
    described: dict[str, Any] = {
        "format": trace.name,
        "columns": {} if trace.columns is None else dict(trace.columns.names),
        "rows": len(rows) + sum(count for count, _ in rows.dropped.values()),
        "requests": len(rows),
        "dropped": dropped,
    }
    if keeps := keeps_failed(rows.failed_by, described["columns"]):
        described["failed_are_kept_with"] = keeps
    requests = trace.requests
    if trace.stamps is None:
        described["time_hint"] = trace.reading.time_hint
    else:
        requests = trace.timed(time_unit)
        described["arrivals"] = describe_gaps(np.sort(trace.seconds(time_unit)[1]))
    if rows.sessions:
        described["sessions"] = _sessions(requests)
    if rows.cached_share is not None:
        described["cached_share"] = rows.cached_share
    if rows.acceptance:
        described["acceptance"] = rows.acceptance
    if requests.hash_ids is not None:
        described["prefixes"] = repeated_prefixes(requests)
    return described


def describe_gaps(starts: Floats) -> dict[str, Any]:
    """Gaps between sorted times (s), their coefficient of variation, and the dispersion of counts per minute."""
    gaps = np.diff(starts)
    if not gaps.size or not starts[-1]:
        return {"requests_per_s": None, "span_s": float(starts[-1])}
    points = np.percentile(gaps, (5, 50, 95, 99))
    described = {
        "span_s": float(starts[-1]),
        "requests_per_s": float(len(gaps) / starts[-1]),
        "gap_mean_s": float(gaps.mean()),
        **{f"gap_p{q}_s": float(point) for q, point in zip((5, 50, 95, 99), points, strict=True)},
        "gap_max_s": float(gaps.max()),
        "gap_variation": float(gaps.std() / gaps.mean()),
    }
    if starts[-1] >= 60 * _WINDOWS:
        described["dispersion_per_minute"] = dispersion(starts, 60.0)
    return described


def _sessions(requests: Requests) -> Mapping[str, Any]:
    """Sessions, their turns, and the known pauses between turns (s)."""
    turns = np.bincount(requests.session)
    described: dict[str, Any] = {
        "sessions": requests.sessions,
        "several_turns": int((turns > 1).sum()),
        "turns_mean": float(turns.mean()),
        "turns_max": int(turns.max()),
        "parallel_requests": sum(waits is not None for waits in requests.after or ()),
    }
    if requests.content is not None:
        repeats = requests.turn > 0
        if repeats.any():
            begins = np.zeros(len(requests), bool)
            begins[np.unique(requests.content, return_index=True)[1]] = True
            described["turns_with_history"] = float((~begins[repeats]).mean())
    if requests.pause_s is not None and (known := requests.pause_s[~np.isnan(requests.pause_s)]).size:
        described["pause_median_s"] = float(np.median(known))
        described["pause_mean_s"] = float(known.mean())
        if requests.tool_share is not None:
            described["tool_pauses"] = float(np.nanmean(requests.tool_share))
    return described


def repeated_prefixes(requests: Requests) -> Mapping[str, Any]:
    """Share of the prompt tokens whose blocks an earlier prompt had: the hit rate of a cache that keeps everything."""
    size = requests.block_tokens or CHUNK_TOKENS
    blocks = repeats_in(requests).blocks
    repeated = np.minimum(requests.input_tokens, blocks * size).sum()
    return {"block_tokens": size, "repeated_share": float(repeated / requests.input_tokens.sum())}
