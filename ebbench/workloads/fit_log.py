"""Fits a workload to a log: see :mod:`ebbench.workloads.fitted` for what is learned."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ebbench.errors import UsageError
from ebbench.workloads.fitted import GROUP, Arrivals, Fitted, Lengths, Points, Prefixes, Repeated, Sessions
from ebbench.workloads.lengths import LengthSpec
from ebbench.workloads.prefix_tree import Repeats, repeats_of
from ebbench.workloads.requests import Floats, Requests
from ebbench.workloads.spec import Profile, WorkloadSpec
from ebbench.workloads.trace import Trace

_BIN, _MOST_BINS = 200, 32
"""Fewest requests per range of prompt lengths, and most ranges."""
_MOST_POINTS, _MOST_GAPS = 48, 400
_STEP, _MOST_STEPS = 50, 120
"""Requests per step of the rate curve in the mean, at least, and most steps."""
_BURSTY, _FINE_STEP, _MOST_FINE_STEPS = 0.5, 10, 800
"""Burstiness below which the rate curve is finer, and its limits then."""
_MOST_RANGES = 16
_FEWEST = 40
_TICK_JITTER = 0.01


def fit_workload(trace: Trace, name: str, time_unit: str | None = None) -> WorkloadSpec:
    """The workload fitted to a log. Raises UsageError for a log of too few requests or ambiguous times."""
    if len(trace.requests) < _FEWEST:
        count = len(trace.requests)
        raise UsageError(f"{trace.path}: {count} requests are too few to fit a workload, which takes {_FEWEST}")
    requests = trace.requests if trace.stamps is None else trace.timed(time_unit)
    several = bool(requests.turn.any())
    repeats = None if requests.hash_ids is None or several else repeats_of(requests.hash_ids)
    first = requests.turn == 0
    fitted = Fitted(
        lengths=_lengths(requests, first if several else np.ones(len(requests), bool), repeats),
        arrivals=None if requests.arrival_s is None else _arrivals(requests.arrival_s),
        sessions=_sessions(requests) if several else None,
        prefixes=None if repeats is None else _prefixes(requests, repeats),
    )
    profile = Profile(input=_summary(requests.input_tokens), output=_summary(requests.output_tokens))
    return WorkloadSpec(
        name=name,
        description=f"Fitted to {len(requests):,} requests of a log",
        num_prompts=requests.sessions,
        profile=profile,
        fitted=fitted,
    )


def _summary(tokens: Any) -> LengthSpec:
    mean, std = float(tokens.mean()), float(tokens.std())
    if std < 1e-9:
        return LengthSpec(family="fixed", mean=mean)
    return LengthSpec(family="lognormal", mean=round(max(1.0, mean), 3), std=round(max(std, 1e-3), 3))


def _points(values: Any, digits: int = 2, most: int = _MOST_POINTS) -> tuple[float, ...]:
    """Means of groups of sorted values, moved so that draws have the values' mean."""
    ordered = np.sort(np.asarray(values, np.float64))
    count = max(1, min(most, len(ordered) // GROUP))
    means = np.array([group.mean() for group in np.array_split(ordered, count)])
    drawn = Points(means=tuple(means)).at((np.arange(4096) + 0.5) / 4096).mean()
    if drawn > 0 and (ordered >= 0).all():
        means = means * (ordered.mean() / drawn)
    return tuple(round(float(one), digits) for one in means)


def _lengths(requests: Requests, of_output: Any, repeats: Repeats | None) -> tuple[Lengths, ...]:
    """Ranges of prompt lengths with the lengths of their requests; of sessions the first prompts and all outputs."""
    inputs, outputs = requests.input_tokens[of_output], requests.output_tokens
    shared = np.zeros(len(requests)) if repeats is None else _repeated(requests, repeats)
    order = np.argsort(inputs, kind="stable")
    count = max(1, min(_MOST_BINS, len(order) // _BIN))
    found = []
    for rows in np.array_split(order, count):
        own = np.flatnonzero(of_output)[rows]
        made = outputs if not of_output.all() else outputs[own]
        found.append(
            Lengths(
                share=round(len(rows) / len(order), 6),
                input=_points(inputs[rows]),
                output=_points(made),
                repeated=() if repeats is None else _points(shared[own], 4),
            )
        )
    return tuple(found)


def _repeated(requests: Requests, repeats: Repeats) -> Floats:
    size = requests.block_tokens or 512
    shares: Floats = np.minimum(1.0, repeats.blocks * size / requests.input_tokens)
    return shares


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
            ranges.append(Repeated(blocks=float(mean), lag=_points(lags[rows]), depth=_points(depths[rows], 4)))
            low = top
    return Prefixes(block_tokens=requests.block_tokens or 512, ranges=tuple(ranges)) if ranges else None


def _arrivals(times: Floats) -> Arrivals | None:
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
    if burstiness < _BURSTY and tick is None:  # bursts that last longer than a gap belong to the curve
        finer = max(steps, min(_MOST_FINE_STEPS, count // _FINE_STEP))
        counts = np.histogram(starts, bins=finer, range=(0.0, period))[0]
        burstiness, gaps = _residual(starts, counts, period, tick)
    return Arrivals(
        rate=round(count / period, 6),
        period_s=round(period, 6),
        burstiness=round(burstiness, 4),
        gaps=gaps,
        levels=_levels(counts, burstiness),
        tick_s=tick,
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
        found = np.bincount(np.rint(times / tick).astype(int))
        expected = np.diff(np.interp(np.arange(len(found) + 1) * tick, places, curve))
        variation = float(((found - expected) ** 2).sum() / max(expected.sum(), 1e-12))
        return _shape(variation), ()
    gaps = np.diff(np.interp(times, places, curve))  # mean gap of 1
    gaps /= max(gaps.mean(), 1e-12)
    return _shape(float(gaps.var())), _points(gaps, 6, _MOST_GAPS)


def _shape(variation: float) -> float:
    return float(np.clip(1.0 / max(variation, 1e-3), 0.02, 50.0))


def _sessions(requests: Requests) -> Sessions:
    later = requests.turn > 0
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    added = (requests.input_tokens[1:] - total[:-1])[later[1:]]
    pauses = () if requests.pause_s is None else requests.pause_s[later & ~np.isnan(requests.pause_s)]
    grown = added[added >= 0]
    return Sessions(
        turns=_points(np.bincount(requests.session)),
        added=_points(grown) if len(grown) else (1.0,),
        pause_s=_points(np.maximum(pauses, 0.0), 4) if len(pauses) else (),
        fresh=round(float((added < 0).mean()), 4),
    )


def as_toml(workload: WorkloadSpec, source: str) -> str:
    """The workload's file. ``source``: what it was fitted to, for its first line.

    Written here, since tomli-w puts every number of a list on a line of its own: thousands of lines instead of 200.
    """
    found = _given(workload)
    lines = [f"# Fitted by `ebbench workloads fit {source}`: distributions, no record of the log.", ""]
    _write(found, (), lines)
    return "\n".join(lines) + "\n"


def _given(value: Any) -> Any:
    """Structs as tables of the fields that differ from their defaults."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {f.name: _given(inner) for f in fields if (inner := getattr(value, f.name)) != f.default}
    return [_given(inner) for inner in value] if isinstance(value, tuple) else value


def _write(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    several = {
        key: value for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, value in table.items():
        if key not in nested and key not in several:
            lines.append(f"{key} = {_literal(value)}")
    for key, value in nested.items():
        lines += ["", f"[{'.'.join((*path, key))}]"]
        _write(value, (*path, key), lines)
    for key, entries in several.items():
        for entry in entries:
            lines += ["", f"[[{'.'.join((*path, key))}]]"]
            _write(entry, (*path, key), lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list):
        return f"[{', '.join(_literal(one) for one in value)}]"
    return repr(value)
