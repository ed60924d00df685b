"""Latencies with percentiles, throughput, limits, goodput and attainment of a set of requests.

Definitions (all times from a monotonic clock, in ns from the start of the run):

- TTFT: first token - intended start; also from the actual send, which shows client lag; undefined for answers without
  tokens (embeddings, rerank)
- TTFAT: first token of the answer, after the thinking - intended start; undefined where no request thought
- TPOT: (last token - first token) / (output tokens after those that came with the first one); undefined where no token
  came later
- ITL: every gap between consecutive tokens, pooled over requests whose TPOT is defined
- E2EL: last token - intended start
- throughput: completed tokens or requests / (last completion - first intended start); also inside the steady window,
  where an input token counts at the first output token and an output token when it is received
- goodput: completed requests that met every limit, or their output tokens, / duration; attainment: those requests /
  all planned ones
- tokens/s per user: 1 / median TPOT
- end-to-end interactivity: output tokens / sum of E2EL (MLPerf Endpoints); its p90 is 1 / p90 of E2EL per output token,
  so that nine tenths of the requests are faster (InferenceX)
- cost of abandoned requests: output tokens made before their clients hung up, and prompt tokens of those whose first
  token was made, or whose prompt a prefill instance had computed
- cost: ``price_per_hour`` of everything that serves, all GPUs together, over the throughput of the whole run, so that
  idle times at its start and end count; energy: that of the GPUs alone, from the start to the last token, of whole runs
- prefix hit rate: prompt tokens that a prefix cache held / prompt tokens, of completed requests that report both
- of a class of requests: the same of its requests alone, its rates over the duration of the whole run, so that those of
  all classes add up to the run's

Only completed requests count elsewhere; partial outputs are excluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.analysis.columns import MISSING, STATUSES, Ints, Mask, RequestColumns
from ebbench.config.declare import named_settings, setting, settings_of, split_all_pairs
from ebbench.errors import UsageError
from ebbench.records.plan import ClosedPhase
from ebbench.records.schema import ABANDONED

LEVEL = 0.95


@dataclass(frozen=True)
class Window:
    """A steady window ``(start_ns, end_ns]`` of one phase; ``target``: the intended number of open sessions."""

    phase: str
    start_ns: int
    end_ns: int
    target: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class _OpenSessions:
    """Open sessions as a step function: ``count[i]`` holds from ``time[i]`` to ``time[i+1]``."""

    time: Ints
    count: Ints

    def mean(self, start: int, end: int) -> float:
        """Time-weighted mean over [start, end]."""
        edges = np.clip(np.append(self.time, end), start, end)
        return float(np.dot(np.diff(edges), self.count) / (end - start))

    def first_and_last_at(self, level: float, start: int, end: int) -> tuple[int, int] | None:
        """First and last time in [start, end] with at least ``level`` open sessions."""
        until = np.append(self.time[1:], self.time[-1])
        at_level = (self.count >= level) & (until > start) & (self.time < end)
        if not at_level.any():
            return None
        first, last = np.flatnonzero(at_level)[[0, -1]]
        return max(int(self.time[first]), start), min(int(until[last]), end)


def steady_windows(columns: RequestColumns, phases: Sequence[ClosedPhase]) -> tuple[Window, ...]:
    """Windows in time order, at most one per phase; none if the load was never reached. No ``phases``: open loop."""
    started = columns.intended != MISSING
    if not started.any():
        return ()
    load = _load(columns)
    if phases:
        sent = ((phase, columns.intended[started & (columns.phase == phase.name)]) for phase in phases)
        known = [(phase, int(intended.min())) for phase, intended in sent if len(intended)]
        ends = [start for _, start in known[1:]] + [int(load.time[-1])]
        windows = []
        for (phase, start), end in zip(known, ends, strict=True):
            target = phase.max_concurrency
            span = load.first_and_last_at(LEVEL * target, start, end)
            if span is not None and span[1] > span[0]:
                windows.append(Window(phase.name, *span, float(target)))
        return tuple(windows)
    return _open_loop(columns, load)


def completed_sessions_per_s(columns: RequestColumns, windows: Sequence[Window]) -> float:
    """Sessions per second whose last request ended in the steady windows."""
    length_s = sum(window.duration_s for window in windows)
    if length_s <= 0:
        return 0.0
    last = session_ends_ns(columns)
    ended = sum(int(((last > window.start_ns) & (last <= window.end_ns)).sum()) for window in windows)
    return ended / length_s


def session_ends_ns(columns: RequestColumns) -> Ints:
    """When the last request of each session ended; the largest integer for sessions that did not end."""
    _, session_number = np.unique(columns.session, return_inverse=True)
    last = np.full(session_number.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, session_number, np.where(columns.end == MISSING, np.iinfo(np.int64).max, columns.end))
    return last


def _load(columns: RequestColumns) -> _OpenSessions:
    started = columns.intended != MISSING
    session, intended, end = columns.session[started], columns.intended[started], columns.end[started]
    last = np.where(end == MISSING, columns.last_token[started], end)
    horizon = max(int(last.max()), int(intended.max()))
    last = np.where(last == MISSING, horizon, last)  # interrupted while open
    _, session_number = np.unique(session, return_inverse=True)
    opened = np.full(session_number.max() + 1, np.iinfo(np.int64).max)
    closed = np.full(session_number.max() + 1, np.iinfo(np.int64).min)
    np.minimum.at(opened, session_number, intended)
    np.maximum.at(closed, session_number, last)
    times, index = np.unique(np.concatenate([opened, closed]), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, index[: len(opened)], 1)
    np.add.at(change, index[len(opened) :], -1)  # a slot that is freed and refilled at the same time is not a dip
    return _OpenSessions(times, np.cumsum(change))


def _open_loop(columns: RequestColumns, load: _OpenSessions) -> tuple[Window, ...]:
    intended = columns.intended[columns.intended != MISSING]
    first, last = int(intended.min()), int(intended.max())
    target = load.mean(first, last) if last > first else 0.0
    span = load.first_and_last_at(LEVEL * target, first, last) if target else None
    return () if span is None or span[0] >= last else (Window("", span[0], last, target),)


# Service-level objectives: limits on request latencies, as in `--goodput ttft:500 tpot:50 e2el:5000`.


@dataclass(frozen=True)
class Slo:
    """Upper limits in ms; None is no limit. Without any limit, goodput is not computed.

    ``classes``: limits of classes of requests by name, each in place of the limit on the same latency for all.
    """

    ttft: float | None = setting(None, "time to first token", unit="ms", above=0, example=500)
    tpot: float | None = setting(None, "mean time per output token after the first", unit="ms", above=0, example=50)
    e2el: float | None = setting(None, "from sending to the last token", unit="ms", above=0, example=5000)
    ttfat: float | None = setting(None, "time to first answer token, after thinking", unit="ms", above=0, example=5000)
    classes: tuple[tuple[str, Slo], ...] = ()

    def limits(self) -> dict[str, float]:
        """The given limits, by metric; those of a class as ``class:metric``."""
        given = ((name, getattr(self, name)) for name in METRICS)
        own = {name: value for name, value in given if value is not None}
        return own | {f"{name}:{metric}": ms for name, slo in self.classes for metric, ms in slo.limits().items()}

    def of_class(self, name: str) -> Slo:
        """The limits in force for a class."""
        return slo_from_limits(replace(self, classes=()).limits() | dict(self.classes).get(name, Slo()).limits())

    def __bool__(self) -> bool:
        return bool(self.limits())

    def __str__(self) -> str:
        return " ".join(f"{name}:{value:g}" for name, value in self.limits().items())


METRICS = settings_of(Slo)


def parse_slo(texts: Iterable[str]) -> Slo:
    """Parse ``metric:milliseconds`` pairs, several per text if separated by spaces or commas.

    ``class:metric:milliseconds`` limits the requests of a class; further pairs after a comma limit the same class.
    Raises UsageError for an unknown or repeated metric, for a percentile (:mod:`ebbench.sizing.limits` has them) and
    for a limit that is not a positive number.
    """
    pairs: dict[str, list[str]] = {}
    for name, pair in pairs_by_class(texts):
        if pair.count(":") > 1:
            raise UsageError(
                f"--goodput: {pair} limits a percentile, which only capacity and plan do; here the requests within a "
                "limit are counted, e.g. ttft:500"
            )
        pairs.setdefault(name, []).append(pair)
    limits_by_name: dict[str, float] = {}
    for name, own in pairs.items():
        limits = named_settings(" ".join(own), METRICS, "--goodput", noun="metric", equals=":")
        limits_by_name |= {f"{name}:{metric}" if name else metric: limit for metric, limit in limits.items()}
    return slo_from_limits(limits_by_name)


def parse_class_slo(goodput: str, classes: Mapping[str, Mapping[str, Any]]) -> Slo:
    """The limits of a run: those of ``--goodput``, and for other latencies those that the plan's classes bring.

    ``classes``: by name, as in a plan's facts. Raises UsageError.
    """
    brought = {name: str(settings["goodput"]) for name, settings in classes.items() if settings.get("goodput")}
    own = [f"{name}:{','.join(split_all_pairs([text]))}" for name, text in brought.items()]
    return slo_from_limits(parse_slo(own).limits() | parse_slo([goodput]).limits())


def pairs_by_class(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The pairs of ``--goodput``, each with the class whose requests it limits; empty for all requests.

    ``chat:ttft:500,tpot:50 e2el:9000`` limits TTFT and TPOT of the class ``chat``, and E2EL of all.
    """
    for word in (word for text in texts for word in text.split()):
        name, _, rest = word.partition(":")
        named = ":" in rest and name not in METRICS and _PERCENTILE.match(rest) is None
        for pair in split_all_pairs([rest if named else word]):
            yield (name if named else ""), pair


_PERCENTILE = re.compile(r"p[0-9.]+:")


def slo_from_limits(limits: Mapping[str, float]) -> Slo:
    """The inverse of :meth:`Slo.limits`."""
    own: dict[str, dict[str, Any]] = {}
    for name, limit in limits.items():
        of_class, _, metric = name.rpartition(":")
        own.setdefault(of_class, {})[metric] = limit
    whole = Slo(**own.pop("", {}))
    return replace(whole, classes=tuple((name, Slo(**limits_of_class)) for name, limits_of_class in own.items()))


# Mean, standard deviation and percentiles of a latency; a percentile is null if there are too few samples for it.
#
# A percentile is sound if, with 99 % confidence, at least two samples lie beyond the true one; with fewer samples the
# estimate is little more than the maximum. The number of samples beyond the q-quantile is Binomial(n, 1-q), so n must
# satisfy `q**n + n*(1-q)*q**(n-1) <= 0.01`: 64 samples for p90, 130 for p95, 662 for p99.

NS_PER_MS = 1e6
QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
"""The upper percentiles in ascending order."""
_STATISTICS = ("mean", "median", "std", *QUANTILES)


@cache
def samples_needed(quantile: float, confidence: float = 0.99) -> int:
    """Smallest n for which at least two of n samples lie beyond ``quantile`` at ``confidence`` (both in (0, 1))."""
    n = 2
    while quantile**n + n * (1 - quantile) * quantile ** (n - 1) > 1 - confidence:
        n += 1
    return n


@dataclass(frozen=True)
class Distribution:
    """Statistics in ms. None without samples, and for a percentile with too few samples. ``std`` is the population's.

    ``estimates``: p90, p95 and p99 even with too few samples.
    """

    count: int
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    estimates: tuple[float, ...] = ()

    @classmethod
    def of_ns(cls, values: npt.NDArray[Any]) -> Distribution:
        """Statistics of values in ns. Percentiles interpolate linearly between order statistics."""
        if not len(values):
            return cls(0)
        shares = QUANTILES.values()
        median, *upper = (float(ms) for ms in np.percentile(values, [50, *(100 * q for q in shares)]) / NS_PER_MS)
        sound = [value if len(values) >= samples_needed(q) else None for q, value in zip(shares, upper, strict=True)]
        mean = float(np.mean(values)) / NS_PER_MS
        p90, p95, p99 = sound
        return cls(len(values), mean, median, float(np.std(values)) / NS_PER_MS, p90, p95, p99, tuple(upper))

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Pairs of statistic and value, without the count."""
        return ((name, getattr(self, name)) for name in _STATISTICS)

    def estimate(self, name: str) -> float | None:
        """The percentile ``name`` (p90, p95 or p99), sound or not; None without samples."""
        return self.estimates[list(QUANTILES).index(name)] if self.estimates else None


PRICE, POWER = "price_per_hour", "gpu_power"
"""Names of the facts in a manifest."""
PER_HOUR_S = 3600.0


@dataclass(frozen=True)
class Economy:
    """Costs in the currency of the price, power in W, energy in J; None is what is not known."""

    price_per_hour: float | None = None
    cost_per_million_output_tokens: float | None = None
    cost_per_million_tokens: float | None = None
    cost_per_1000_requests: float | None = None
    gpu_power_mean_w: float | None = None
    gpu_power_peak_w: float | None = None
    gpu_energy_j: float | None = None
    joules_per_output_token: float | None = None
    joules_per_request: float | None = None


ECONOMY_FIGURES = tuple(Economy.__dataclass_fields__)


def cost_and_energy(facts: Mapping[str, Any], metrics: Metrics, *, whole: bool = True) -> Economy:
    """Cost and energy of a run with these facts; ``whole`` False: of one of its phases."""
    price = facts.get(PRICE)
    power = facts.get(POWER) or {}
    energy_j = power.get("energy_j") if whole else None
    return Economy(
        price,
        _cost(price, metrics.output_throughput, 1e6),
        _cost(price, metrics.total_token_throughput, 1e6),
        _cost(price, metrics.request_throughput, 1e3),
        power.get("mean_w") if whole else None,
        power.get("peak_w") if whole else None,
        energy_j,
        _per_item(energy_j, metrics.total_output_tokens),
        _per_item(energy_j, metrics.completed),
    )


def _cost(price_per_hour: float | None, rate_per_s: float | None, count: float) -> float | None:
    return None if price_per_hour is None or not rate_per_s else price_per_hour / PER_HOUR_S / rate_per_s * count


def _per_item(total: float | None, count: int) -> float | None:
    return None if total is None or not count else total / count


LATENCIES = ("ttft", "tpot", "itl", "e2el")
FURTHER_LATENCIES = ("ttfat", "ttft_from_send", "lag")
"""Latencies that are measured but not gated."""
_GAPS_AT_ONCE = 1 << 20
"""Gaps between tokens whose times are computed at once: those of all requests would take several times their memory."""


@dataclass(frozen=True)
class SteadyRates:
    """Throughput inside the steady windows, per second; ``share``: their part of the run's duration."""

    start_s: float
    end_s: float
    duration_s: float
    share: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float


@dataclass(frozen=True)
class Metrics:
    """Counts, rates per second and latencies in ms. Rates are None if no request completed."""

    planned: int
    completed: int
    counts: dict[str, int]  # by status, with all of STATUSES
    duration_s: float | None
    total_input_tokens: int
    total_output_tokens: int
    cached_tokens: int
    preemptions: int
    bundled_requests: int
    request_throughput: float | None
    output_throughput: float | None
    total_token_throughput: float | None
    request_goodput: float | None
    slo_attainment: float | None
    steady: SteadyRates | None
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    ttft_from_send: Distribution
    lag: Distribution = field(default=Distribution(0))
    input_throughput: float | None = None
    economy: Economy = Economy()
    token_goodput: float | None = None
    prefix_hit_rate: float | None = None
    abandoned_input_tokens: int = 0
    abandoned_output_tokens: int = 0
    ttfat: Distribution = field(default=Distribution(0))
    thinking_tokens: int = 0
    mean_acceptance_length: float | None = None
    interactivity: float | None = None  # end to end, output tokens/s, as its p90
    p90_interactivity: float | None = None

    @property
    def tokens_per_s_per_user(self) -> float | None:
        """Output tokens/s that a user with the median TPOT sees; None where TPOT is undefined."""
        return 1000 / self.tpot.median if self.tpot.median else None


def measure(
    columns: RequestColumns,
    *,
    rows: Mask | None = None,
    slo: Slo = Slo(),
    windows: Sequence[Window] = (),
    duration_s: float | None = None,
) -> Metrics:
    """Metrics of the requests in ``rows`` (default: all). Steady rates are those of the whole system.

    ``duration_s``: of the rates; by default from the first intended start of these requests to their last completion.
    """
    chosen = np.ones(len(columns.status), np.bool_) if rows is None else rows
    ok, generated = chosen & columns.ok, chosen & columns.generated
    duration_s = duration_s or _duration_s(columns, chosen, ok)
    tokens_in, tokens_out = int(columns.input_tokens[ok].sum()), int(columns.output_tokens[ok].sum())
    good = meets(columns, ok, slo) if slo else None
    met = None if good is None else int(good.sum())
    planned = int(chosen.sum())
    abandoned = chosen & (columns.status == ABANDONED)
    answer_began = columns.answer_began
    e2el_ns, outputs = (columns.last_token - columns.intended)[ok], columns.output_tokens[ok]
    slow_ms = Distribution.of_ns(e2el_ns / np.maximum(outputs, 1)).p90
    sent = chosen & (columns.sent != MISSING) & (columns.intended != MISSING)
    reported = ok & (columns.cached_tokens != MISSING)
    cached = int(columns.cached_tokens[reported].sum())
    return Metrics(
        planned=planned,
        completed=int(ok.sum()),
        counts={status: int((columns.status[chosen] == status).sum()) for status in STATUSES},
        duration_s=duration_s,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        cached_tokens=cached,
        preemptions=int(columns.preemptions[chosen].sum()),
        bundled_requests=int(columns.bundled[ok].sum()),
        request_throughput=_rate(int(ok.sum()), duration_s),
        output_throughput=_rate(tokens_out, duration_s),
        total_token_throughput=_rate(tokens_in + tokens_out, duration_s),
        request_goodput=None if met is None else _rate(met, duration_s),
        slo_attainment=None if met is None or not planned else met / planned,
        steady=_steady(columns, windows, duration_s),
        ttft=Distribution.of_ns((columns.first_token - columns.intended)[generated]),
        tpot=Distribution.of_ns(tpot_ns(columns, ok)),
        itl=Distribution.of_ns(itl_ns(columns, ok)),
        e2el=Distribution.of_ns(e2el_ns),
        ttft_from_send=Distribution.of_ns((columns.first_token - columns.sent)[generated & sent]),
        lag=Distribution.of_ns((columns.sent - columns.intended)[sent]),
        input_throughput=_rate(tokens_in, duration_s),
        token_goodput=None if good is None else _rate(int(columns.output_tokens[good].sum()), duration_s),
        prefix_hit_rate=_rate(cached, float(columns.input_tokens[reported].sum())),
        abandoned_input_tokens=int(columns.input_tokens[abandoned & columns.prompt_computed].sum()),
        abandoned_output_tokens=int(columns.output_tokens[abandoned].sum()),
        ttfat=Distribution.of_ns((answer_began - columns.intended)[ok & (answer_began != MISSING)]),
        thinking_tokens=int(columns.thinking_tokens[ok].sum()),
        interactivity=_rate(tokens_out, float(e2el_ns.sum()) / 1e9),
        p90_interactivity=1e3 / slow_ms if slow_ms else None,
    )


def measure_classes(columns: RequestColumns, slo: Slo, duration_s: float | None) -> dict[str, Metrics]:
    """Metrics of each class of requests by name, with rates over ``duration_s``; empty if no request has a class."""
    return {
        name: measure(columns, rows=columns.request_class == name, slo=slo, duration_s=duration_s)
        for name in columns.classes
    }


def refuse_unknown_classes(limited: Iterable[str], classes: Iterable[str]) -> None:
    """Raise UsageError for a class that has limits and is not among the ``classes`` of a run."""
    known = sorted(filter(None, classes))
    if unknown := [name for name in limited if name not in known]:
        remedy = f"; its classes are {', '.join(known)}" if known else ""
        raise UsageError(f"--goodput limits class {unknown[0]!r}, and no request of the run has this class{remedy}")


def _duration_s(columns: RequestColumns, chosen: Mask, ok: Mask) -> float | None:
    if not ok.any():
        return None
    start = columns.intended[chosen & (columns.intended != MISSING)].min()
    return float(columns.last_token[ok].max() - start) / 1e9


def _rate(amount: float, duration_s: float | None) -> float | None:
    return amount / duration_s if duration_s else None


def tpot_ns(columns: RequestColumns, rows: Mask) -> npt.NDArray[np.float64]:
    """Time per output token (ns) of the completed requests in ``rows`` in which it is defined."""
    later = rows & (columns.tokens_after_first > 0)
    span = (columns.last_token - columns.first_token)[later]
    return np.asarray(span / columns.tokens_after_first[later], np.float64)


def latency_columns(columns: RequestColumns, slo: Slo) -> dict[str, pa.Array]:
    """The columns of REQUEST_LATENCIES: one value per planned request, null where it is undefined."""
    ok = columns.ok
    known = {"ttft": columns.generated, "tpot": ok & (columns.tokens_after_first > 0), "e2el": ok}
    latencies = {
        f"{name}_ms": pa.array(limited_ns(columns, name) / NS_PER_MS, mask=~rows) for name, rows in known.items()
    }
    met = meets(columns, ok, slo) if slo else np.zeros(len(ok), np.bool_)
    return latencies | {"in_limits": pa.array(met, mask=None if slo else np.ones(len(ok), np.bool_))}


def itl_ns(columns: RequestColumns, rows: Mask) -> Ints:
    """Gaps between consecutive tokens (ns) of the requests in ``rows``, without those whose tokens all share a time."""
    return columns.gaps_of(rows & ~(columns.bundled & (columns.tokens_after_first == 0)))


def meets(columns: RequestColumns, ok: Mask, slo: Slo) -> Mask:
    """Requests that completed and met every limit."""
    met = ok.copy()
    for metric in METRICS:
        limit_ms: npt.NDArray[np.float64] = np.full(len(ok), getattr(slo, metric) or np.inf)
        for name, own in slo.classes:
            if (limit := getattr(own, metric)) is not None:
                limit_ms[columns.request_class == name] = limit
        if np.isfinite(limit_ms).any():
            met &= ~np.isfinite(limit_ms) | (limited_ns(columns, metric) <= limit_ms * NS_PER_MS)
    return met


def limited_ns(columns: RequestColumns, metric: str) -> npt.NDArray[np.float64]:
    """What a limit on ``metric`` is compared with, for every completed request (ns).

    Infinite where the figure is unknown, so that no limit is met: TPOT of several tokens that all came at one time,
    TTFT of an answer without tokens, and TTFAT without an answer. 0 for TPOT of a single token: no later token can be
    too slow.
    """
    if metric == "tpot":
        span, later = columns.last_token - columns.first_token, columns.tokens_after_first
        unknown = np.where(columns.sent_tokens > 1, np.inf, 0.0)
        return np.where(later > 0, span / np.maximum(later, 1), unknown)
    first = np.where(columns.output_tokens > 0, columns.first_token, MISSING)
    ends = {"ttft": first, "ttfat": columns.answer_began, "e2el": columns.last_token}[metric]
    return np.where(ends == MISSING, np.inf, np.asarray(ends - columns.intended, np.float64))


def _steady(columns: RequestColumns, windows: Sequence[Window], duration_s: float | None) -> SteadyRates | None:
    length_s = sum(window.duration_s for window in windows)
    if not windows or not duration_s or length_s <= 0:
        return None
    ok = columns.ok
    requests = _sum_in_windows(columns.last_token[ok], None, windows)
    prompts = _sum_in_windows(columns.first_token[ok], columns.input_tokens[ok], windows)
    outputs = _tokens_inside(columns, windows)
    return SteadyRates(
        start_s=windows[0].start_ns / 1e9,
        end_s=windows[-1].end_ns / 1e9,
        duration_s=length_s,
        share=length_s / duration_s,
        request_throughput=requests / length_s,
        output_throughput=outputs / length_s,
        total_token_throughput=(prompts + outputs) / length_s,
    )


def _tokens_inside(columns: RequestColumns, windows: Sequence[Window]) -> float:
    """Number of output tokens received inside the windows.

    If a stream had fewer messages than tokens, each message counts as an equal part of them.
    """
    ok = columns.ok
    gaps, counts = columns.gaps_of(ok), columns.gap_counts[ok]
    if not len(counts):
        return 0.0
    stops, first_ns = np.cumsum(counts), columns.first_token[ok]
    weight = columns.output_tokens[ok] / (counts + 1)
    whole = None if (weight == 1).all() else weight
    later = 0.0
    cuts = np.searchsorted(stops, np.arange(_GAPS_AT_ONCE, int(stops[-1]), _GAPS_AT_ONCE)) + 1
    edges = np.unique([0, *cuts.tolist(), len(stops)])
    for rows in (slice(int(first), int(end)) for first, end in pairwise(edges.tolist())):
        own, part = counts[rows], gaps[stops[rows.start] - counts[rows.start] : stops[rows.stop - 1]]
        running = np.concatenate([[0], np.cumsum(part)])
        base = np.repeat(first_ns[rows] - running[np.cumsum(own) - own], own)
        later += _sum_in_windows(running[1:] + base, None if whole is None else np.repeat(whole[rows], own), windows)
    return later + _sum_in_windows(first_ns, whole, windows)


def _sum_in_windows(
    times: npt.NDArray[np.int64], weight: npt.NDArray[np.float64 | np.int64] | None, windows: Sequence[Window]
) -> float:
    total = 0.0
    for window in windows:
        inside = (times > window.start_ns) & (times <= window.end_ns)
        total += float(np.count_nonzero(inside) if weight is None else weight[inside].sum())
    return total
