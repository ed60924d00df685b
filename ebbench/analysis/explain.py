"""Explains a run: how its time divides among phases and modes, the decisions, and the cost of a full KV cache.

Reads the step and decision tables. Without recorded steps nothing is said of phases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.grouping import by_key
from ebbench.records.run import Run
from ebbench.records.warnings import KV_CACHE, RunWarning, warning

WORTH_SAYING = 0.02
"""Share of the time, or of the requests, from which on a full cache is said."""
STEP_COLUMNS = (
    "start_ns", "end_ns", "prefill_tokens", "decode_seqs", "kv_blocks_used", "kv_blocks_total", "waiting", "running",
    "preemptions",
)  # fmt: skip
FIGURES = ("kv_full_share", "repeated_tokens", "repeated_share")
"""Names of :attr:`KvPressure.figures`."""
FULL = 0.9
"""Share of a server's KV cache in use from which on requests that wait are taken to wait for memory."""
_USAGE = re.compile(r"(kv_cache_usage_perc|gpu_cache_usage_perc|sglang:token_usage)$")
_WAITING = re.compile(r"(num_requests_waiting|sglang:num_queue_reqs)$")
_RUNNING = re.compile(r"(num_requests_running|sglang:num_running_reqs)$")
_PREEMPTIONS = re.compile(r"num_preemptions(_total)?$")

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KvPressure:
    """Costs of a full KV cache in one run.

    ``full_share``: share of the time in which requests waited for memory, not for a slot; ``running``: mean number of
    running sequences per engine meanwhile, ``slots``: of how many, None if not known. ``repeated_tokens``: prompt and
    output tokens of preempted requests that were computed again, ``repeated_share``: share of the time that this took;
    None if not known.
    """

    full_share: float
    running: float
    slots: int | None
    preemptions: int
    preempted_share: float
    repeated_tokens: int | None = None
    repeated_share: float | None = None

    @property
    def matters(self) -> bool:
        """Whether the full KV cache took more than ``WORTH_SAYING`` of the time."""
        repeated = self.preempted_share if self.repeated_share is None else self.repeated_share
        return max(self.full_share, repeated) > WORTH_SAYING

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """What a full KV cache cost, with remedies; empty if that was little."""
        if not self.matters:
            return ()
        full_share = self.full_share if self.full_share > WORTH_SAYING else None
        of_memory = {"full_share": full_share, "running": self.running, "slots": self.slots}
        repeats = {"repeated_tokens": self.repeated_tokens, "repeated_share": self.repeated_share}
        return (warning(KV_CACHE, **of_memory, preemptions=self.preemptions, **repeats),)

    @property
    def figures(self) -> dict[str, float | None]:
        """Shares of the time and repeated tokens, by their names in JSON."""
        return dict(zip(FIGURES, (self.full_share, self.repeated_tokens, self.repeated_share), strict=True))


def kv_pressure(steps: pa.Table, requests: pa.Table, options: Mapping[str, Any]) -> KvPressure | None:
    """The costs by the recorded steps of a run, with ``options`` as in its manifest; None without steps."""
    if not steps.num_rows:
        return None
    columns = {name: steps.column(name).to_numpy() for name in STEP_COLUMNS}
    prompts = requests.filter(pc.equal(requests["status"], "ok"))["input_tokens"]
    spent = (columns["end_ns"] - columns["start_ns"]).astype(np.float64)
    slots = options.get("max_num_active_seqs") or options.get("max_num_seqs")
    free_tokens = (columns["kv_blocks_total"] - columns["kv_blocks_used"]) * int(options.get("block_size") or 1)
    prompt_tokens = pc.quantile(prompts, 0.5)[0].as_py() or 0
    # Requests waited, slots were free, and the free blocks held no prompt of the median length.
    full = (columns["waiting"] > 0) & (columns["running"] < (slots or np.inf)) & (free_tokens < prompt_tokens)
    preemptions = int(columns["preemptions"].sum())
    computed = int(columns["prefill_tokens"].sum())
    repeated = 0
    if preemptions:
        # What steps computed in prefill beyond every prompt once, less what the prefix cache held: a resumed request
        # computes its prompt and the outputs so far again, and these count as prefill.
        started = requests.filter(pc.not_equal(requests["status"], "never_sent"))
        held = (pc.sum(started["input_tokens"]).as_py() or 0) - (pc.sum(started["cached_tokens"]).as_py() or 0)
        repeated = max(computed - held, 0)
    tokens = np.maximum(columns["prefill_tokens"] + columns["decode_seqs"], 1)
    prefilling = float((spent * columns["prefill_tokens"] / tokens).sum()) / (float(spent.sum()) or 1.0)
    pressure = _pressure(spent, full, columns["running"], slots, preemptions, requests.num_rows)
    share = prefilling * repeated / computed if computed else 0.0
    return replace(pressure, repeated_tokens=repeated, repeated_share=share)


def kv_pressure_by_metrics(metrics: pa.Table, requests: int, slots: int | None) -> KvPressure | None:
    """The costs by a server's own metrics during a run; None if they do not include its KV cache."""
    series = _series(metrics)
    usage = [values for name, values in series if _USAGE.search(name)]
    preempted = [values for name, values in series if _PREEMPTIONS.search(name)]
    if not usage and not preempted:
        return None
    preemptions = int(sum(values[-1][1] - values[0][1] for values in preempted))
    times = np.array(sorted({time_ns for _, values in series for time_ns, _ in values}), float)
    lasting = np.diff(times, append=times[-1:])
    waiting = _sum_over_time([values for name, values in series if _WAITING.search(name)], times)
    running = _sum_over_time([values for name, values in series if _RUNNING.search(name)], times)
    usage_over_time = np.max([_over_time(values, times) for values in usage], axis=0) if usage else np.zeros(len(times))
    full = (usage_over_time >= FULL) & (waiting > 0)
    return _pressure(lasting, full, running, slots, preemptions, requests)


def _pressure(
    lasting: Floats, full: Mask, running: Floats, slots: int | None, preemptions: int, requests: int
) -> KvPressure:
    """The costs of the times with a full cache; ``lasting``: how long each time lasted."""
    waited = float(lasting[full].sum())
    return KvPressure(
        full_share=waited / (float(lasting.sum()) or 1.0),
        running=float(np.average(running[full], weights=lasting[full])) if waited else 0.0,
        slots=slots,
        preemptions=preemptions,
        preempted_share=preemptions / max(requests, 1),
    )


_Values = list[tuple[int, float]]


def _series(metrics: pa.Table) -> list[tuple[str, _Values]]:
    """Samples during the run by name and labels, in order of time; a metric is stored when it changes."""
    rows = metrics.to_pylist()
    series = by_key(((row["name"], row["labels"]), (max(row["time_ns"], 0), row["value"])) for row in rows)
    return [(name, values) for (name, _), values in series.items()]


def _over_time(values: _Values, times: Floats) -> Floats:
    place = np.searchsorted([time_ns for time_ns, _ in values], times, side="right") - 1
    numbers = np.array([value for _, value in values], float)
    return np.where(place >= 0, numbers[np.maximum(place, 0)], 0.0)


def _sum_over_time(several: list[_Values], times: Floats) -> Floats:
    return np.sum([_over_time(values, times) for values in several], axis=0) if several else np.zeros(len(times))


TIMELINE_BINS = 20
_STEP_COLUMNS = ("start_ns", "end_ns", "phase", "mode", "prefill_tokens", "decode_seqs")


@dataclass(frozen=True)
class StepKind:
    """Steps of one phase: share of all step time, mean prompt tokens and mean sequences per step."""

    share: float
    mean_s: float
    mean_prefill_tokens: float
    mean_decode_seqs: float


@dataclass(frozen=True)
class StepFacts:
    """Time by phase and mode. ``eb_timeline``: share of exclusive mode in equal parts of the run."""

    steps: int
    kinds: dict[str, StepKind]
    eb_share: float
    eb_timeline: tuple[float, ...]


@dataclass(frozen=True)
class Spread:
    """Median and range of a value over the run."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class CrossoverFacts:
    """Inputs of Eq. 8 over the run: medians of both sides and of the margin in s/token."""

    evaluations: int
    eb_ahead: int
    lhs: float
    rhs: float
    margin: float
    r: float
    n_obs: float


@dataclass(frozen=True)
class Switch:
    """A change of mode."""

    time_s: float
    mode: str
    reason: str


@dataclass(frozen=True)
class DecisionFacts:
    """Values that the controller used; a Spread is None if the policy does not have the value."""

    updates: int
    k: Spread | None
    n_limit: Spread | None
    theta: Spread | None
    theta0: Spread | None
    p0: Spread | None
    eta: Spread | None
    crossover: CrossoverFacts | None
    evaluations: int
    last_reason: str
    switches: tuple[Switch, ...]


@dataclass(frozen=True)
class Explanation:
    """Explanation of one run; parts without recorded data are None."""

    policy: str
    steps: StepFacts | None
    decisions: DecisionFacts | None


def explain(run: Run) -> Explanation:
    """Compute the explanation of a run. Raises DataError for a damaged table."""
    steps = run.table("steps", _STEP_COLUMNS)
    return Explanation(
        policy=run.manifest.policy,
        steps=_step_facts(steps) if steps.num_rows else None,
        decisions=_decision_facts(run.decisions) if run.table("decisions", ["kind"]).num_rows else None,
    )


def _step_facts(steps: pa.Table) -> StepFacts:
    # Texts are compared in Arrow: as numpy arrays they would be one Python object per step.
    values = {name: steps.column(name).to_numpy() for name in _STEP_COLUMNS if name not in ("phase", "mode")}
    phases = steps.column("phase")
    start, end = values["start_ns"], values["end_ns"]
    spent = (end - start).astype(np.float64)
    total = float(spent.sum()) or 1.0
    eb = pc.equal(steps.column("mode"), "eb").to_numpy()
    # Share of exclusive mode per bin; a bin without steps repeats the bin before.
    origin, length = int(start.min()), max(int(start.max() - start.min()), 1)
    place = np.minimum((start - origin) * TIMELINE_BINS // length, TIMELINE_BINS - 1).astype(np.int64)
    busy = np.bincount(place, spent, TIMELINE_BINS)
    exclusive = np.bincount(place, spent * eb, TIMELINE_BINS)
    shares: list[float] = []
    for time_eb, time_all in zip(exclusive, busy, strict=True):
        shares.append(float(time_eb / time_all) if time_all else (shares[-1] if shares else 0.0))
    kinds = {}
    for kind in phases.unique().to_pylist():
        rows = pc.equal(phases, kind).to_numpy()
        prefill, decode = (float(values[name][rows].mean()) for name in ("prefill_tokens", "decode_seqs"))
        kinds[kind] = StepKind(float(spent[rows].sum()) / total, float(spent[rows].mean()) / 1e9, prefill, decode)
    return StepFacts(len(spent), kinds, float(spent[eb].sum()) / total, tuple(shares))


def _decision_facts(decisions: pa.Table) -> DecisionFacts:
    updates = decisions.filter(pc.equal(decisions.column("kind"), "update"))
    modes = decisions.filter(pc.equal(decisions.column("kind"), "mode"))
    settings = updates if updates.num_rows else decisions
    # Changes of mode of all instances; EB+ starts in mixed mode.
    switches, before = [], dict[int, str]()
    for row in modes.select(["time_ns", "instance", "mode", "reason"]).to_pylist():
        if row["mode"] != before.get(row["instance"], "mb"):
            switches.append(Switch(row["time_ns"] / 1e9, row["mode"], row["reason"]))
        before[row["instance"]] = row["mode"]
    return DecisionFacts(
        updates=updates.num_rows,
        **{name: _spread(settings, name) for name in ("k", "n_limit", "theta", "theta0", "p0", "eta")},
        crossover=_crossover(modes),
        evaluations=modes.num_rows,
        last_reason=modes.column("reason")[-1].as_py() if modes.num_rows else "",
        switches=tuple(sorted(switches, key=lambda switch: switch.time_s)),
    )


def _spread(table: pa.Table, name: str) -> Spread | None:
    values = table.column(name).drop_null().to_numpy()
    if not len(values):
        return None
    return Spread(float(np.median(values)), float(values.min()), float(values.max()))


def _crossover(modes: pa.Table) -> CrossoverFacts | None:
    known = modes.filter(pc.is_valid(modes.column("lhs")))
    if not known.num_rows:
        return None
    values = {name: known.column(name).to_numpy() for name in ("lhs", "rhs", "margin", "r", "n_obs")}
    ahead = values["lhs"] > values["rhs"] + values["margin"]
    medians = {name: float(np.median(column)) for name, column in values.items()}
    return CrossoverFacts(known.num_rows, int(ahead.sum()), **medians)
