"""Statistics of a plan: means, percentiles and the decode share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ebbench.records.plan import Plan

PERCENTILES = (5, 50, 95, 99)


def describe(plan: Plan) -> dict[str, Any]:
    """Counts, length statistics in tokens, decode share ``mu_o/(mu_l+mu_o)`` and, for an open loop, the mean rate."""
    inputs = plan.table["input_tokens"].to_numpy()
    outputs = plan.table["output_tokens"].to_numpy()
    total = float(inputs.mean() + outputs.mean())
    described: dict[str, Any] = {
        "requests": len(plan),
        "sessions": len(np.unique(plan.table["session"].to_numpy())),
        "input_tokens": _lengths(inputs),
        "output_tokens": _lengths(outputs),
        "decode_share": float(outputs.mean()) / total,
    }
    if not plan.closed_loop:
        described["arrivals"] = _arrivals(plan)
    return described


def _lengths(values: Any) -> Mapping[str, float]:
    points = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": int(values.min()),
        **{f"p{q}": float(point) for q, point in zip(PERCENTILES, points, strict=True)},
        "max": int(values.max()),
    }


def _arrivals(plan: Plan) -> Mapping[str, float]:
    """Sessions per second over the time of arrivals, and their index of dispersion (1: Poisson)."""
    times = plan.table["arrival_ns"].drop_null().to_numpy() / 1e9
    gaps = np.diff(times)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    return {
        "duration_s": float(times[-1]),
        "sessions_per_s": 1.0 / mean_gap if mean_gap else 0.0,
        "gap_variation": float(gaps.std()) / mean_gap if mean_gap else 0.0,
    }
