"""Results of ``ebbench capacity`` as JSON: one object per policy, for --json and stored with the probes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbench.analysis.caveats import told_once
from ebbench.capacity.drive import SearchOutcome
from ebbench.capacity.limits import LatencyLimits
from ebbench.capacity.probe import ProbeReading
from ebbench.errors import DataError
from ebbench.records import files

FILE = "capacity-answers.json"


def rows_of(
    found: Mapping[str, SearchOutcome], by_concurrency: bool, limits: LatencyLimits, notes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One object per policy. ``notes``: warnings that all policies share."""
    return [as_dict(name, outcome, by_concurrency, limits, notes) for name, outcome in found.items()]


def store(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the results into the directory of the search."""
    files.write_bytes(json.dumps(rows, indent=1, allow_nan=False).encode() + b"\n", folder / FILE)


def load(folder: Path) -> list[dict[str, Any]]:
    """The results stored in a search's directory; empty without a finished search.

    Raises DataError for a damaged file.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    rows = files.read_stored_json(path)
    try:
        return [{**row, "policy": str(row["policy"]), "curve": list(row["curve"])} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def as_dict(
    policy: str, outcome: SearchOutcome, by_concurrency: bool, limits: LatencyLimits, notes: Sequence[str]
) -> dict[str, Any]:
    """One object of ``--json``. ``high`` is null if no probed load was too high.

    Rates are in requests/s: the searched session rate times the requests per session. ``curve`` has one entry per probe
    in order of load; its latencies are medians, and the percentiles at the required attainment, in ms. ``warnings``:
    the caveats of plan and device. ``attainment``, latencies and goodput are those of the requests sent in the steady
    ``window`` of the probe at ``nearest_load``; what a full KV cache cost is that of this whole probe.
    """
    estimate, near = outcome.estimate, outcome.nearest
    name = "capacity_concurrency" if by_concurrency else "capacity_requests_per_s"
    factor = 1.0 if by_concurrency else near.requests_per_session
    return {
        "policy": policy,
        name: None if estimate.capacity is None else factor * estimate.capacity,
        "low": factor * estimate.low,
        "high": factor * estimate.high if math.isfinite(estimate.high) else None,
        "requests_per_session": near.requests_per_session,
        "attainment": near.attainment,
        "limits": str(limits),
        "limits_ms": limits.slo.limits(),
        "required_attainment": limits.attainment,
        "limited_by": outcome.limited_by,
        "goodput_requests_per_s": near.goodput_requests_per_s,
        "goodput_tokens_per_s": near.goodput_tokens_per_s,
        "output_tokens_per_s": near.output_tokens_per_s,
        "median_ttft_ms": near.ttft_ms,
        "median_tpot_ms": near.tpot_ms,
        "fitted": estimate.fitted,
        "stopped": outcome.stopped or None,
        "refused": outcome.refused or None,
        "probes": len(outcome.readings),
        **near.kv_figures,
        "warnings": [*notes, *near.kv_warnings, *told_once(outcome.caveats, lambda _: "")],
        "nearest_run_dir": near.run_dir,
        "nearest_load": factor * near.probe.load,
        "window": "steady",
        "curve": [_point(each, factor) for each in sorted(outcome.readings, key=lambda each: each.probe.load)],
        "run_dirs": [reading.run_dir for reading in outcome.readings],
    }


def _point(reading: ProbeReading, factor: float) -> dict[str, Any]:
    return {
        "load": factor * reading.probe.load,
        "attainment": reading.attainment,
        "runaway": reading.probe.runaway,
        "failed": reading.probe.failed or None,
        "decides": reading.decides,
        "median_ttft_ms": reading.ttft_ms,
        "median_tpot_ms": reading.tpot_ms,
        "ttft_at_attainment_ms": reading.ttft_high_ms,
        "tpot_at_attainment_ms": reading.tpot_high_ms,
        "requests_per_s": reading.requests_per_session * reading.completed_sessions_per_s,
        "output_tokens_per_s": reading.output_tokens_per_s,
        **reading.kv_figures,
        "run_dir": reading.run_dir,
    }
