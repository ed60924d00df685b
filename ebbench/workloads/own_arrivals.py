"""How the arrivals that a log, or a workload fitted to one, has of its own differ from the Poisson ones of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ebbench.errors import UsageError
from ebbench.traffic.schedule import Load, make_schedule
from ebbench.workloads.log_report import gaps_of
from ebbench.workloads.options import recorded_file
from ebbench.workloads.requests import Floats
from ebbench.workloads.spec import load_workload
from ebbench.workloads.trace import read_trace
from ebbench.workloads.trace_times import short_number

_FEWEST = 50
"""Gaps below which they are not compared."""
_CLUSTERED, _BURSTY, _EVEN = 1.5, 1.2, 0.8
"""Dispersion of counts per minute, and coefficients of variation of gaps, from which arrivals differ from Poisson's."""


def poisson_instead(workload: str, settings: Mapping[str, Any]) -> str:
    """That arrivals are Poisson where the workload has its own, and how those differ; empty where it has none.

    ``settings``: the other arguments of build_plan. Raises UsageError for a file that cannot be read.
    """
    starts = _own_starts(workload, settings)
    if starts is None or not len(starts) or not starts[-1]:
        return ""
    gaps = gaps_of(starts)
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
    spec = load_workload(workload)
    own = None if spec.fitted is None else spec.fitted.scenario()
    if own is None:
        return None
    times = make_schedule(own, Load(), None, spec.num_prompts, seed=0).arrival_s
    return None if times is None else np.sort(times)
