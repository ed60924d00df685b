"""One run by the definitions of other benchmarking tools, as they are in the versions named here.

Each definition was read in the tool's source, and compared with the tool on the fake server (reports/other-tools.md).
A run stores when tokens came, so what a tool does with messages that carry none is not reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbench.analysis.columns import MISSING, Ints, Mask, RequestColumns
from ebbench.analysis.metrics import NS_PER_MS, Distribution, Slo
from ebbench.analysis.summary import metric_columns, summarise
from ebbench.errors import DataError, UnknownNameError
from ebbench.records.run import Run

Floats = npt.NDArray[np.float64]
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
STATISTICS = ("median", "mean", "p99")
RATES = {
    "output_throughput": "output tokens/s", "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s", "duration_s": "duration, s",
}  # fmt: skip


class Answers(NamedTuple):
    """Complete answers in plan order, times in ns of the run.

    ``gaps`` are those between tokens, ``counts`` how many each answer has; a gap of 0 lies within a message.
    ``began`` and ``ended``: first send and last end of all requests, complete or not.
    """

    sent: Ints
    first: Ints
    last: Ints
    end: Ints
    tokens: Ints
    gaps: Ints
    counts: Ints
    began: int
    ended: int


class Samples(NamedTuple):
    """Values in ns; ``weights``: how much each counts, None for equally."""

    values: Floats
    weights: Floats | None = None


class Reading(NamedTuple):
    """What a tool makes of the answers: latencies (None: it has no such figure), the duration of its rates in ns.

    ``judged``: what a limit is compared with, per answer; infinite where an answer cannot meet it, NaN where the tool
    leaves the answer out.
    """

    latencies: Mapping[str, Samples | None]
    duration_ns: float
    judged: Mapping[str, Floats]


@dataclass(frozen=True)
class Tool:
    """A tool with the version and the file that has its definitions. ``steps``: percentiles are not interpolated."""

    name: str
    version: str
    source: str
    read: Callable[[Answers], Reading]
    steps: bool = False


Figures = Mapping[str, float | None]
"""The figures of a run by one tool's definitions; None where it has none. Latencies in ms, rates per second."""


def _per_token(span: Ints, tokens: Ints) -> Floats:
    """``span`` over all tokens but one; infinite for a single token."""
    return np.where(tokens > 1, span / np.maximum(tokens - 1, 1), np.inf)


def _finite_samples(values: Floats, weights: Floats | None = None) -> Samples:
    known = np.isfinite(values)
    return Samples(values[known], None if weights is None else weights[known])


def _reading(
    answers: Answers, end: Ints, tpot: Floats, single: float, itl: Samples, shown: Samples | None, duration_ns: float
) -> Reading:
    """A reading from the send to ``end``.

    ``tpot`` is what a limit on it is compared with, ``single`` instead for an answer of one token; ``shown`` is the
    figure.
    """
    ttft, e2el = (answers.first - answers.sent).astype(np.float64), (end - answers.sent).astype(np.float64)
    latencies = {"ttft": Samples(ttft), "tpot": shown, "itl": itl, "e2el": Samples(e2el)}
    judged = {"ttft": ttft, "tpot": np.where(np.isfinite(tpot), tpot, single), "e2el": e2el}
    return Reading(latencies, duration_ns, judged)


def _of_messages(end: Callable[[Answers], Ints], answers: Answers) -> Reading:
    """ITL is that of messages: tokens of one message came at one time."""
    tpot, messages = _per_token(end(answers) - answers.first, answers.tokens), answers.gaps[answers.gaps > 0]
    itl = Samples(messages.astype(np.float64))
    return _reading(answers, end(answers), tpot, 0.0, itl, _finite_samples(tpot), answers.ended)


def _guidellm(answers: Answers) -> Reading:
    gap, tokens = _per_token(answers.last - answers.first, answers.tokens), answers.tokens.astype(np.float64)
    whole = Samples((answers.last - answers.sent) / tokens, tokens)
    duration_ns = answers.ended - answers.began
    return _reading(answers, answers.end, gap, np.nan, _finite_samples(gap, tokens - 1), whole, duration_ns)


def _aiperf(answers: Answers) -> Reading:
    gap = _per_token(answers.last - answers.first, answers.tokens)
    duration_ns = float(answers.last.max() - answers.sent.min())
    return _reading(answers, answers.last, gap, np.inf, _finite_samples(gap), None, duration_ns)


def _inference_perf(answers: Answers) -> Reading:
    several = answers.counts > 0
    tpot = np.where(several, _per_token(answers.last - answers.first, answers.tokens), np.inf)
    gaps, duration_ns = Samples(answers.gaps.astype(np.float64)), answers.ended - answers.began
    reading = _reading(answers, answers.end, tpot, np.inf, gaps, _finite_samples(tpot), duration_ns)
    ttft = np.where(several, answers.first - answers.sent, np.inf)
    return reading._replace(
        latencies={**reading.latencies, "ttft": _finite_samples(ttft)}, judged={**reading.judged, "ttft": ttft}
    )


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("vllm", "0.32.0", "vllm/benchmarks/serve.py, lib/endpoint_request_func.py",
             partial(_of_messages, lambda answers: answers.last)),
        Tool("guidellm", "0.8.1", "guidellm/schemas/base/request_stats.py, statistics.py", _guidellm, steps=True),
        Tool("aiperf", "0.13.0", "aiperf/metrics/types", _aiperf),
        Tool("inference-perf", "0.7.0", "inference_perf/reportgen/base.py", _inference_perf),
        Tool("sglang", "0.5.23", "sglang/benchmark/serving.py, goodput.py",
             partial(_of_messages, lambda answers: answers.end)),
    )
}  # fmt: skip
"""The tools by name."""


def chosen_tools(text: str) -> tuple[Tool, ...]:
    """The tools of ``vllm,guidellm`` or ``all``, in the order given. Raises UnknownNameError."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if "all" in names:
        return tuple(TOOLS.values())
    if unknown := [name for name in names if name not in TOOLS]:
        raise UnknownNameError("tool of --as", unknown[0], [*TOOLS, "all"])
    return tuple(TOOLS[name] for name in dict.fromkeys(names))


def figures_as(columns: RequestColumns, slo: Slo, tools: Iterable[Tool]) -> dict[str, Figures]:
    """The figures of a run's requests by the definitions of ``tools``; empty if no answer has a token."""
    generated = columns.generated
    answers = _answers(columns, generated) if generated.any() else None
    return {tool.name: {} if answers is None else _figures(answers, slo, tool) for tool in tools}


def _answers(columns: RequestColumns, rows: Mask) -> Answers:
    sent, end = columns.sent, columns.end
    begun, over = sent[sent != MISSING], end[end != MISSING]
    ends = np.where(end[rows] == MISSING, columns.last_token[rows], end[rows])  # a simulated run has no last byte
    return Answers(
        sent=np.where(sent[rows] == MISSING, columns.intended[rows], sent[rows]),
        first=columns.first_token[rows],
        last=columns.last_token[rows],
        end=ends,
        tokens=columns.output_tokens[rows],
        gaps=columns.gaps_of(rows),
        counts=columns.gap_counts[rows],
        began=int(begun.min()) if len(begun) else int(columns.intended[rows].min()),
        ended=int(max(ends.max(), over.max() if len(over) else 0)),
    )


def _figures(answers: Answers, slo: Slo, tool: Tool) -> dict[str, float | None]:
    reading = tool.read(answers)
    figures: dict[str, float | None] = {}
    for name in LATENCIES:
        for statistic, value in zip(STATISTICS, _statistics(reading.latencies[name], tool.steps), strict=True):
            figures[f"{statistic}_{name}_ms"] = None if value is None else value / NS_PER_MS
    duration_s = reading.duration_ns / 1e9
    limits = slo.limits()
    goodput = None
    if limits and limits.keys() <= reading.judged.keys():  # else a limit that the tools do not have
        met = [reading.judged[name] <= limit * NS_PER_MS for name, limit in limits.items()]
        goodput = int(np.logical_and.reduce(met).sum()) / duration_s
    rates = int(answers.tokens.sum()) / duration_s, len(answers.tokens) / duration_s, goodput, duration_s
    return figures | dict(zip(RATES, rates, strict=True))


def _statistics(samples: Samples | None, steps: bool) -> Sequence[float | None]:
    if samples is None or not len(samples.values):
        return (None, None, None)
    values, weights = samples
    mean = float(np.average(values, weights=weights))
    if not steps:
        return float(np.median(values)), mean, float(np.percentile(values, 99))
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    places = np.searchsorted(shares / shares[-1], (0.5, 0.99), side="left")
    median, p99 = (float(values[order][place]) for place in places)
    return median, mean, p99


@dataclass(frozen=True)
class RunAs:
    """A run by ebbench's own definitions and by those of other tools."""

    run_dir: str
    policy: str
    seed: int
    own: Figures
    tools: Mapping[str, Figures]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: figures by tool, ebbench's first."""
        by_tool = {
            name: {"version": TOOLS[name].version, "source": TOOLS[name].source, **figures}
            for name, figures in self.tools.items()
        }
        identity = {"run_dir": self.run_dir, "policy": self.policy, "seed": self.seed}
        return {**identity, "figures": {"ebbench": dict(self.own), **by_tool}}


def read_as(run: Run, tools: Sequence[Tool], slo: Slo | None = None) -> RunAs:
    """A stored run by the definitions of ``tools``; ``slo`` None uses the limits of the run.

    Raises DataError for answers without tokens (embeddings).
    """
    summary = summarise(run, slo)
    columns = RequestColumns.of(metric_columns(run))
    if columns.ok.any() and not columns.generated.any():
        raise DataError(f"{run.path}: its answers have no tokens, which all other tools' figures are of")
    readings = figures_as(columns, summary.slo, tools)
    own: dict[str, float | None] = {}
    for name in LATENCIES:
        distribution: Distribution = getattr(summary.metrics, name)
        own |= {f"median_{name}_ms": distribution.median, f"mean_{name}_ms": distribution.mean}
        own[f"p99_{name}_ms"] = distribution.estimate("p99")  # also of few samples, as tools do
    own |= {name: getattr(summary.metrics, name) for name in RATES}
    return RunAs(str(run.path), summary.policy, summary.seed, own, readings)
