"""Fits a workload to a log: see :mod:`ebbench.workloads.fitted` for what is learned."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ebbench.errors import UsageError
from ebbench.foreign.documents import toml_value
from ebbench.traffic.arrivals import relative_roots, step_edges, stretch_centres
from ebbench.traffic.lengths import LengthSpec
from ebbench.workloads.fitted import (
    GROUP,
    Arrivals,
    Fitted,
    Lengths,
    Prefixes,
    Repeated,
    Sessions,
    fit_drift,
    fit_points,
)
from ebbench.workloads.overlap import MAIN, find_starts, fit_overlap
from ebbench.workloads.requests import Floats, Int64s, Requests
from ebbench.workloads.shared_prefix import Repeats, repeats_in
from ebbench.workloads.spec import Profile, WorkloadSpec
from ebbench.workloads.trace import Trace

# Fits arrivals: a rate curve and the gaps after it, or, of bursty traffic, steps of equally many sessions.

_MOST_GAPS = 400
_STEP, _MOST_STEPS = 50, 120
"""Requests per step of the rate curve in the mean, at least, and most steps."""
_BURSTY, _MOST_STEPS_OF_BURSTS = 0.5, 1200
"""Burstiness below which steps hold equally many sessions, and most steps then."""
_SHORTEST_STEP_S = 1e-6
_TICK_JITTER = 0.01


def fit_arrivals(times: Floats) -> Arrivals | None:
    """Rate curve and burstiness of sessions that start at ``times`` (s, rising)."""
    count, span = len(times), float(times[-1] - times[0])
    if count < 2 or span <= 0:
        return None
    period = span * count / (count - 1)
    steps = max(1, min(_MOST_STEPS, count // _STEP))
    tick = _tick(times)
    if tick is not None:
        steps = max(1, min(steps, int(period / (2 * tick))))
    starts = times - times[0]
    counts = np.histogram(starts, bins=steps, range=(0.0, period))[0]
    burstiness, gaps = _residual(starts, counts, period, tick)
    if burstiness < _BURSTY and tick is None and count >= 4 * GROUP:
        return _bursty(starts, period, burstiness)
    return Arrivals(
        rate=round(count / period, 6),
        period_s=round(period, 6),
        burstiness=round(burstiness, 4),
        gaps=gaps,
        levels=_levels(counts, burstiness),
        tick_s=tick,
    )


def _bursty(starts: Floats, period: float, burstiness: float) -> Arrivals:
    """Arrivals by steps of equally many sessions, so that the curve is fine where the rate is high."""
    count = len(starts)
    gaps = np.diff(starts, prepend=starts[-1] - period)  # the first follows the last of the period before
    per_step = count / min(_MOST_STEPS_OF_BURSTS, count // GROUP)
    edges = step_edges(count, per_step)
    widths = np.maximum(np.add.reduceat(gaps, edges[:-1]), _SHORTEST_STEP_S)
    roots = np.add.reduceat(relative_roots(gaps), edges[:-1]) / np.diff(edges)
    centres = stretch_centres(np.repeat(np.arange(len(widths)), np.diff(edges)), gaps)
    return Arrivals(
        rate=round(count / period, 6),
        period_s=round(period, 6),
        burstiness=round(burstiness, 4),
        gaps=fit_points(gaps / gaps.mean(), 6, _MOST_GAPS),
        steps_s=tuple(round(float(width), 6) for width in widths),
        step_roots=tuple(round(float(root), 4) for root in roots),
        step_centres=tuple(round(float(centre), 3) for centre in centres),
    )


def _levels(counts: Any, burstiness: float) -> tuple[float, ...]:
    """Relative rates per step. What the randomness of the counts adds to their variance is taken out again."""
    if len(counts) < 2:
        return ()
    relative = counts / counts.mean()
    noise = min(1.0, 1.0 / burstiness) / counts.mean()
    kept = np.sqrt(max(0.0, 1.0 - noise / max(float(relative.var()), 1e-12)))
    return tuple(round(float(level), 4) for level in np.maximum(0.0, 1.0 + kept * (relative - 1.0)))


def _tick(times: Floats) -> float | None:
    """The clock's step, if at least a third of the gaps are 0 and the others multiples of one number."""
    gaps = np.diff(times)
    rising = gaps[gaps > 1e-9]
    if len(rising) == 0 or len(rising) > 2 / 3 * len(gaps):
        return None
    step = float(np.median(rising))
    multiples = rising / step
    near = np.abs(multiples - np.rint(multiples)) < _TICK_JITTER
    return round(step, 6) if near.all() and multiples.min() > 0.5 else None


def _residual(times: Floats, counts: Any, period: float, tick: float | None) -> tuple[float, tuple[float, ...]]:
    """Gamma shape of the gaps after the rate curve is taken out, and their distribution where no gamma has it.

    With a coarse clock: the shape that gives the dispersion of the counts per tick.
    """
    curve = np.concatenate([[0.0], np.cumsum(counts)])
    places = np.linspace(0.0, period, len(counts) + 1)
    if tick is not None:
        observed = np.bincount(np.rint(times / tick).astype(int))
        expected = np.diff(np.interp(np.arange(len(observed) + 1) * tick, places, curve))
        variation = float(((observed - expected) ** 2).sum() / max(expected.sum(), 1e-12))
        return _shape(variation), ()
    gaps = np.diff(np.interp(times, places, curve))  # mean gap of 1
    gaps /= max(gaps.mean(), 1e-12)
    return _shape(float(gaps.var())), fit_points(gaps, 6, _MOST_GAPS)


def _shape(variation: float) -> float:
    return float(np.clip(1.0 / max(variation, 1e-3), 0.02, 50.0))


_BIN, _MOST_BINS = 200, 32
"""Fewest requests per range of prompt lengths, and most ranges."""
_MOST_RANGES, _MOST_OUTPUTS = 16, 400
_FEWEST = 40


def fit_workload(trace: Trace, name: str, time_unit: str | None = None) -> WorkloadSpec:
    """The workload fitted to a log. Raises UsageError for a log of too few requests or ambiguous times."""
    if len(trace.requests) < _FEWEST:
        count = len(trace.requests)
        raise UsageError(f"{trace.path}: {count} requests are too few to fit a workload, which takes {_FEWEST}")
    requests = trace.requests if trace.stamps is None else trace.timed(time_unit)
    several = bool(requests.turn.any())
    repeats = None if requests.hash_ids is None or several else repeats_in(requests)
    first = requests.turn == 0
    sessions = _sessions(requests) if several else None
    if sessions is not None and requests.after is not None:
        sessions = _with_overlap(sessions, requests, trace.s_per_output_token(time_unit))
    single = not several and repeats is None
    fitted = Fitted(
        lengths=_lengths(requests, first if several else np.ones(len(requests), bool), repeats),
        outputs=fit_points(requests.output_tokens, most=_MOST_OUTPUTS, tailed=True) if single else (),
        arrivals=None if requests.arrival_s is None else fit_arrivals(requests.arrival_s),
        sessions=sessions,
        prefixes=None if repeats is None else _prefixes(requests, repeats),
        # Which prompts repeat which depends on their order already; with a drift Mooncake came no closer.
        drift=None if repeats is not None else fit_drift(_sizes(requests), None if several else requests.output_tokens),
        acceptance=tuple(round(rate, 6) for rate in trace.collected.acceptance),
    )
    profile = Profile(input=_summary(requests.input_tokens), output=_summary(requests.output_tokens))
    rates = ", ".join(f"{rate:.2f}" for rate in fitted.acceptance)
    drafted = f"; drafted tokens accepted by position: {rates} (--speculative method=M takes them)" if rates else ""
    return WorkloadSpec(
        name=name,
        description=f"Fitted to {len(requests):,} requests of a log{drafted}",
        num_prompts=requests.sessions,
        profile=profile,
        fitted=fitted,
    )


def _summary(tokens: Any) -> LengthSpec:
    mean, std = float(tokens.mean()), float(tokens.std())
    if std < 1e-9:
        return LengthSpec(family="fixed", mean=mean)
    return LengthSpec(family="lognormal", mean=round(max(1.0, mean), 3), std=round(max(std, 1e-3), 3))


def _lengths(requests: Requests, of_output: Any, repeats: Repeats | None) -> tuple[Lengths, ...]:
    """Ranges of prompt lengths with the lengths of their requests; of sessions the first prompts and all outputs."""
    inputs, outputs = requests.input_tokens[of_output], requests.output_tokens
    own_outputs = outputs
    if requests.after is not None:  # those of requests that overlap are learned apart
        starts = find_starts(requests)
        own_outputs = np.delete(outputs, starts.rows[starts.overlaps > 0])
    shared = np.zeros(len(requests))
    if repeats is not None:
        shared = np.minimum(1.0, repeats.blocks * (requests.block_tokens or 512) / requests.input_tokens)
    order = np.argsort(inputs, kind="stable")
    count = max(1, min(_MOST_BINS, len(order) // _BIN))
    bins = []
    for rows in np.array_split(order, count):
        own = np.flatnonzero(of_output)[rows]
        made = own_outputs if not of_output.all() else outputs[own]
        bins.append(
            Lengths(
                share=round(len(rows) / len(order), 6),
                input=fit_points(inputs[rows]),
                output=fit_points(made),
                repeated=() if repeats is None else fit_points(shared[own], 4),
            )
        )
    return tuple(bins)


def _sizes(requests: Requests) -> Floats:
    """Prompt tokens per session."""
    sizes: Floats = np.bincount(requests.session, requests.input_tokens).astype(np.float64)
    return sizes


def _prefixes(requests: Requests, repeats: Repeats) -> Prefixes | None:
    used = repeats.blocks > 0
    if used.sum() < GROUP:
        return None
    blocks, lags = repeats.blocks[used], repeats.lag[used]
    depths = np.minimum(1.0, blocks / np.maximum(repeats.earlier_blocks[used], 1))
    count = max(1, min(_MOST_RANGES, len(blocks) // (2 * GROUP)))
    tops = np.unique(np.quantile(blocks, np.arange(1, count + 1) / count, method="higher"))
    ranges, low = [], 0
    for top in tops:
        rows = (blocks > low) & (blocks <= top)
        if rows.sum() >= GROUP:
            mean = blocks[rows].mean() if top == tops[-1] else top
            ranges.append(Repeated(blocks=float(mean), lag=fit_points(lags[rows]), depth=fit_points(depths[rows], 4)))
            low = top
    return Prefixes(block_tokens=requests.block_tokens or 512, ranges=tuple(ranges)) if ranges else None


def _sessions(requests: Requests) -> Sessions:
    later = np.flatnonzero(requests.turn > 0)
    previous = _previous(requests)
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    grown = later[previous[later] >= 0]
    added = requests.input_tokens[grown] - total[previous[grown]]
    anew = requests.input_tokens[later[previous[later] < 0]]
    aside = grown[~np.isin(requests.streams[grown - 1], requests.streams[requests.turn == 0])]
    return Sessions(
        turns=fit_points(np.bincount(requests.session)),
        added=fit_points(np.maximum(added, 1)) if len(added) else (1.0,),
        **_pauses(requests, later),
        fresh=round(len(anew) / len(later), 4),
        fresh_input=fit_points(anew) if len(anew) else (),
        resumes=round(float((previous[aside] != aside - 1).mean()), 4) if len(aside) else 0.0,
    )


def _pauses(requests: Requests, rows: Int64s) -> dict[str, Any]:
    """The fields of :class:`Sessions` about the pauses before ``rows``. Those of tools stand apart where the log has
    enough of both kinds."""
    if requests.pause_s is None:
        return {}
    rows = rows[~np.isnan(requests.pause_s[rows])]
    seconds, by_tools = np.maximum(requests.pause_s[rows], 0.0), np.zeros(len(rows), bool)
    if requests.tool_share is not None and GROUP <= (requests.tool_share[rows] > 0).sum() <= len(rows) - GROUP:
        by_tools = requests.tool_share[rows] > 0
    return {
        "pause_s": fit_points(seconds[~by_tools], 4) if len(rows) else (),
        "tool_pause_s": fit_points(seconds[by_tools], 4) if by_tools.any() else (),
        "tools": _share_of_tools(requests, rows),
    }


def _share_of_tools(requests: Requests, rows: Int64s) -> float | None:
    """The share of the pauses before ``rows`` that tools take, of those whose kind the log tells; None of none."""
    known = np.array([]) if requests.tool_share is None else requests.tool_share[rows]
    known = known[~np.isnan(known)]
    return round(float(known.mean()), 4) if len(known) else None


def _with_overlap(sessions: Sessions, requests: Requests, s_per_output_token: float) -> Sessions:
    """The sessions with how their requests overlap; then pauses and added tokens are those of the session itself."""
    starts = find_starts(requests)
    previous = _previous(requests)[starts.rows]
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    added = np.maximum(requests.input_tokens[starts.rows] - total[previous], 1)
    pauses = np.zeros(len(starts.rows)) if requests.pause_s is None else np.maximum(requests.pause_s[starts.rows], 0.0)

    def points(values: Any, where: Any, digits: int) -> tuple[float, ...]:
        return fit_points(values[where], digits) if where.any() else ()

    waited, side = starts.ended > 0, starts.kind != MAIN
    at_once = starts.rows[~waited]
    staggers = np.zeros(len(at_once))
    if requests.pause_s is not None:
        before = np.where(requests.turn[at_once] > 1, requests.pause_s[at_once - 1], 0.0)
        staggers = np.maximum(requests.pause_s[at_once] - before, 0.0)
    overlap = fit_overlap(
        starts,
        s_per_output_token,
        stagger_s=points(staggers, np.ones(len(staggers), bool), 4),
        fork_pause_s=points(pauses, waited & (starts.overlaps == 1), 4),
        side_pause_s=points(pauses, waited & (starts.overlaps == 2), 4),
        fork_tools=_share_of_tools(requests, starts.rows[starts.overlaps == 1]) or 0.0,
        side_tools=_share_of_tools(requests, starts.rows[starts.overlaps == 2]) or 0.0,
        side_added=points(added, side & (previous >= 0), 2),
        side_output=points(requests.output_tokens[starts.rows], starts.overlaps > 0, 2),
    )
    alone = _pauses(requests, starts.rows[starts.overlaps == 0])
    if alone.get("pause_s"):
        tools = sessions.tools if alone["tools"] is None else alone["tools"]
        sessions = replace(sessions, **alone | {"tools": tools})
    return replace(sessions, added=points(added, ~side, 2) or sessions.added, overlap=overlap)


def _previous(requests: Requests) -> Int64s:
    """Row of the turn whose history each prompt continues, -1 where it begins anew."""
    streams = requests.streams
    order = np.argsort(streams, kind="stable")
    same = np.flatnonzero(np.diff(streams[order]) == 0)
    previous: Int64s = np.full(len(streams), -1, np.int64)
    previous[order[same + 1]] = order[same]
    return previous


def as_toml(workload: WorkloadSpec, source: str) -> str:
    """The workload's file. ``source``: what it was fitted to, for its first line.

    Written here, since tomli-w puts every number of a list on a line of its own: thousands of lines instead of 200.
    """
    tables = _without_defaults(workload)
    lines = [f"# Fitted by `ebbench workloads fit {source}`: distributions, no record of the log.", ""]
    _write(tables, (), lines)
    return "\n".join(lines) + "\n"


def _without_defaults(value: Any) -> Any:
    """Structs as tables of the fields that differ from their defaults."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {f.name: _without_defaults(inner) for f in fields if (inner := getattr(value, f.name)) != f.default}
    return [_without_defaults(inner) for inner in value] if isinstance(value, tuple) else value


def _write(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    several = {
        key: value for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, value in table.items():
        if key not in nested and key not in several:
            lines.append(f"{key} = {toml_value(value)}")
    for key, value in nested.items():
        lines += ["", f"[{'.'.join((*path, key))}]"]
        _write(value, (*path, key), lines)
    for key, entries in several.items():
        for entry in entries:
            lines += ["", f"[[{'.'.join((*path, key))}]]"]
            _write(entry, (*path, key), lines)
