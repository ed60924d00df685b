"""Summary of a run: identity, load, figures and validity.

:meth:`Summary.to_dict` has the keys of ``vllm bench serve`` and ebbench's own; null means undefined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import pyarrow as pa

from ebbench.analysis.columns import NEEDED, NO_CLASS, RequestColumns
from ebbench.analysis.environment import (
    LoadFacts,
    Machine,
    comparison_conditions,
    flat_load,
    load_of_run,
    machine_of_run,
    run_environment,
)
from ebbench.analysis.explain import FIGURES as KV_FIGURES
from ebbench.analysis.metrics import (
    ECONOMY_FIGURES,
    FURTHER_LATENCIES,
    LATENCIES,
    QUANTILES,
    Distribution,
    Metrics,
    Slo,
    Window,
    cost_and_energy,
    measure,
    measure_classes,
    refuse_unknown_classes,
    slo_from_limits,
    steady_windows,
)
from ebbench.analysis.sessions import SESSIONS, SessionFigures, figures_by_class, sessions_table
from ebbench.analysis.validity import FAILURE_COLUMNS, Failure, failures_by_cause, merge_failures
from ebbench.errors import UsageError
from ebbench.records.run import Run
from ebbench.records.schema import REQUESTS_EXTRAS
from ebbench.records.warnings import ESTIMATED, RunWarning, counted, shown_text, told_columns
from vllm_eb.policy import PolicyError, parse_policy

FACT = "speculative"
"""Name of the counts among the facts of a run."""


@dataclass(frozen=True)
class Drafted:
    """Drafts of speculative decoding.

    ``steps``: decode steps that verified drafts, counted per sequence; None: not known. ``drafted`` and ``accepted``:
    tokens per position, as vLLM counts them; empty where only ``accepted_tokens`` is known.
    """

    steps: int | None
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    accepted_tokens: int

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Drafted | None:
        """From the facts of a run; None without speculative decoding, or where no draft was verified."""
        counts = facts.get(FACT)
        if not counts or not (counts["steps"] or sum(counts["drafted"])):
            return None
        drafted, accepted = tuple(counts["drafted"]), tuple(counts["accepted"])
        tokens = counts.get("accepted_tokens", sum(accepted))
        if not drafted and not tokens:  # every step made one token, as without drafts
            return None
        return Drafted(counts["steps"], drafted, accepted, tokens)

    @staticmethod
    def over(runs: Sequence[Drafted]) -> Drafted:
        """Sums over several runs; None where a run has no value."""
        known = [run.steps for run in runs if run.steps is not None]
        steps = sum(known) if len(known) == len(runs) else None
        drafted, accepted = (
            tuple(map(sum, zip(*by_run, strict=False)))
            for by_run in ([run.drafted for run in runs], [run.accepted for run in runs])
        )
        return Drafted(steps, drafted, accepted, sum(run.accepted_tokens for run in runs))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step and sequence: the accepted ones and one more. vLLM's name and definition."""
        return None if not self.steps else 1.0 + self.accepted_tokens / self.steps

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted at least up to each position; empty if not known."""
        return tuple(accepted / self.steps for accepted in self.accepted) if self.steps else ()

    @property
    def rate(self) -> float | None:
        """Share of the drafted tokens that were accepted."""
        drafted = sum(self.drafted)
        return self.accepted_tokens / drafted if drafted else None

    def figures(self) -> dict[str, Any]:
        """Figures by name, for JSON and tables."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance": [round(rate, 6) for rate in self.acceptance],
            "draft_acceptance_rate": self.rate,
            "drafted_tokens": sum(self.drafted) if self.drafted else None,
            "accepted_tokens": self.accepted_tokens,
        }


ACCEPTED_ALIKE = 0.02
"""Share by which tokens per step may differ between runs before their speeds are doubted: gains of less are noise."""


def sets_drafts(policy: str) -> bool:
    """Whether a policy sets how many tokens are drafted, so that tokens per step are its own doing."""
    try:
        return parse_policy(policy).varies_drafts
    except PolicyError:  # the label of a server's policy
        return False


@dataclass(frozen=True)
class ClientNodes:
    """Nodes of a Ray cluster that sent a run's requests; ``count`` 0: the machine that reports it sent them itself.

    ``alignment_error_ms``: the largest error of a node's times on the reporting machine's clock. ``lost``: nodes lost
    during the run. ``connections`` is the most connections to the server at a time, ``connections_used`` the most with
    an open request, both summed over the client's processes; None for a run without requests to a server.
    """

    count: int = 0
    workers: int = 0
    lost: int = 0
    alignment_error_ms: float | None = None
    connections: int | None = None
    connections_used: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ClientNodes:
        """From the facts of a manifest."""
        nodes, connected = facts.get("client_nodes") or (), facts.get("client_connections") or {}
        most_open, used = connected.get("most_held") or None, connected.get("most_used")
        if not nodes:
            return cls(connections=most_open, connections_used=used)
        workers, lost = sum(node["workers"] for node in nodes), sum(node["lost"] for node in nodes)
        return cls(len(nodes), workers, lost, facts.get("clock_alignment_error_ms"), most_open, used)

    def to_dict(self) -> dict[str, Any]:
        """Flat values for JSON and SQL; None without several machines."""
        return {
            "client_nodes": self.count or None,
            "client_nodes_lost": self.lost if self.count else None,
            "clock_alignment_error_ms": self.alignment_error_ms,
            "client_connections": self.connections,
            "client_connections_used": self.connections_used,
        }

    def __str__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        aligned = "" if self.alignment_error_ms is None else f", clocks aligned to {self.alignment_error_ms:.2g} ms"
        parts = [f"{counted(self.count, 'client node')} with {self.workers} processes{lost}{aligned}"] * bool(
            self.count
        )
        if self.connections:
            parts.append(f"{counted(self.connections, 'connection')} at most, {self.connections_used:,} in use")
        return ", ".join(parts)


@dataclass(frozen=True)
class Summary:
    """One run, or one phase of it (``phase`` empty: the whole run)."""

    policy: str
    engine: str
    device: str
    model: str
    workload: str
    scenario: str
    source: str
    seed: int
    run_dir: str
    valid: bool
    reasons: tuple[RunWarning, ...]
    interrupted: bool
    warnings: tuple[RunWarning, ...]
    slo: Slo
    metrics: Metrics
    open_loop: bool = False  # requests arrive at fixed times, independent of the completion of earlier ones
    phase: str = ""
    plan_hash: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    load: LoadFacts = LoadFacts(0)  # noqa: RUF009 - frozen
    machine: Machine = Machine()  # noqa: RUF009 - frozen
    clients: ClientNodes = ClientNodes()
    until_clear: bool = False  # one of several repeats that were tested after each
    virtual: bool = False  # simulated time: repeating the run gives a copy
    anchor_unix_ns: int = 0  # wall-clock time of the run's time 0
    kv: Mapping[str, float | None] = field(default_factory=dict)  # what a full KV cache cost the whole run
    drafted: Drafted | None = None  # of the whole run
    estimated_answers: int = 0  # of the whole run: whose output tokens the client counted
    classes: Mapping[str, Metrics] = field(default_factory=dict)  # of each class of requests, NO_CLASS for the others
    sessions: Mapping[str, SessionFigures] = field(default_factory=dict)  # all under "", and of each class

    def of_class(self, name: str) -> Summary:
        """The summary of the requests of a class alone. Raises KeyError."""
        sessions = {"": self.sessions[name]} if name and name in self.sessions else {}
        slo = self.slo.of_class(name)
        return replace(self, metrics=self.classes[name], slo=slo, classes={}, sessions=sessions, drafted=None)

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens over those that the same decode steps would have made without drafts; None without drafts."""
        tokens, accepted = self.metrics.total_output_tokens, self.drafted.accepted_tokens if self.drafted else 0
        return tokens / (tokens - accepted) if self.drafted is not None and accepted < tokens else None

    @property
    def worst_class(self) -> str | None:
        """The class of which the smallest share met its limits; None without limits or classes."""
        met = {name: metrics.slo_attainment for name, metrics in self.classes.items()}
        known = {name: share for name, share in met.items() if share is not None}
        return min(known, key=lambda name: known[name]) if known else None

    @property
    def conditions(self) -> dict[str, str]:
        """What the figures depend on besides policy and seed, as text by name."""
        return comparison_conditions(self.environment, self.load)

    def to_dict(self, *, all_percentiles: bool = False) -> dict[str, Any]:
        """Flat JSON object: identity, counts, rates, ``{mean,median,std,p90,p95,p99}_{ttft,tpot,itl,e2el}_ms``.

        ``all_percentiles`` adds ``unsound_percentiles``: those with too few samples, which are otherwise null.
        """
        identity = {name: getattr(self, name) for name in (*_IDENTITY, "run_dir")}
        verdict = {
            "valid": self.valid,
            "reasons": [reason.to_dict(str(reason)) for reason in self.reasons],
            "interrupted": self.interrupted,
            "warnings": [warning.to_dict(str(warning)) for warning in self.warnings],
            "failures": [asdict(failure) for failure in self.failures],
            "goodput_slo_ms": self.slo.limits() or None,
        }
        phase = {"phase": self.phase} if self.phase else {}
        unsound = {"unsound_percentiles": unsound_percentiles(self.metrics)} if all_percentiles else {}
        return (
            identity
            | phase
            | flat_load(self.load, self.machine, self.policy)
            | self.clients.to_dict()
            | metrics_dict(self.metrics)
            | ({} if self.phase else {name: self.kv.get(name) for name in KV_FIGURES})
            | (self.drafted.figures() if self.drafted is not None and not self.phase else {})
            | ({"estimated_answers": self.estimated_answers} if self.estimated_answers else {})
            | self._parts()
            | unsound
            | verdict
        )

    def _parts(self) -> dict[str, Any]:
        """What there is of each class of requests, and of the sessions."""
        parts: dict[str, Any] = {}
        if self.classes:
            parts["classes"] = {named(name): self._of_class(name) for name in self.classes}
        if (worst := self.worst_class) is not None:
            parts |= {"worst_class": named(worst), "worst_class_attainment": self.classes[worst].slo_attainment}
        return parts | ({"per_session": self.sessions[""].to_dict()} if self.sessions else {})

    def _of_class(self, name: str) -> dict[str, Any]:
        priority = {"priority": self.load.priorities.get(name, 0)} if self.load.priorities else {}
        own = self.of_class(name)
        limits = {"goodput_slo_ms": own.slo.limits() or None}
        return priority | metrics_dict(own.metrics) | limits | own._parts()

    def to_table(self) -> pa.Table:
        """One row with the figures of :meth:`to_dict` under its keys, for Parquet: those of a steady window as
        ``steady_...``, limits as ``limit_..._ms``, lists of texts as lists, also the codes and values (JSON) of
        warnings and reasons; undefined figures are null doubles."""
        return _one_row(self.to_dict())

    def classes_table(self) -> pa.Table:
        """As :meth:`to_table`, one row per class of requests; without a column of the run's own."""
        rows = [_one_row({"class": named(name), **self._of_class(name)}) for name in self.classes]
        return pa.concat_tables(rows or [pa.table({"class": pa.nulls(0, pa.string())})], promote_options="permissive")


def named(name: str) -> str:
    """A class's name as it is shown."""
    return "no class" if name == NO_CLASS else name


def _one_row(row: dict[str, Any]) -> pa.Table:
    told: dict[str, Any] = {name: row[name] for name in ("reasons", "warnings") if name in row}
    row |= {name: [shown_text(text) for text in texts] for name, texts in told.items()} | told_columns(told)
    nested = {"steady": row.pop("steady"), "limit": row.pop("goodput_slo_ms"), "session": row.pop("per_session", None)}
    for prefix, figures in nested.items():
        tail = "_ms" if prefix == "limit" else ""
        row |= {f"{prefix}_{name.replace(':', '_')}{tail}": value for name, value in (figures or {}).items()}
    cells = {name: value for name, value in row.items() if not isinstance(value, dict) and name != "failures"}
    return pa.table({name: pa.array([value], _column_type(value)) for name, value in cells.items()})


def _column_type(value: Any) -> pa.DataType:
    if isinstance(value, list | tuple):
        return pa.list_(pa.float64() if value and isinstance(value[0], float) else pa.string())
    kinds = {bool: pa.bool_(), int: pa.int64(), str: pa.string()}
    return kinds.get(type(value), pa.float64())


def summarise(run: Run, slo: Slo | None = None) -> Summary:
    """Summarise a whole run. ``slo`` None uses the limits of the run.

    Raises DataError for damaged files, UsageError if ``slo`` limits a class that no request has, or tokens of
    answers without any.
    """
    slo, columns, windows = _measured_by(run, slo)
    return make_summary(run, measure(columns, slo=slo, windows=windows), slo, columns)


def make_summary(run: Run, metrics: Metrics, slo: Slo, columns: RequestColumns) -> Summary:
    """The summary of a whole run from known ``metrics``, whose goodput is by ``slo``; ``columns``: of all requests."""
    classes = measure_classes(columns, slo, metrics.duration_s)
    return replace(_summary(run, metrics, slo), classes=classes, sessions=figures_by_class(sessions_table(columns)))


def summarise_phases(run: Run, slo: Slo | None = None) -> tuple[Summary, ...]:
    """One summary per phase, in order of their first request."""
    slo, columns, windows = _measured_by(run, slo)
    summaries = []
    for name in dict.fromkeys(columns.phase.tolist()):
        own = [window for window in windows if window.phase == name]
        metrics = measure(columns, rows=columns.phase == name, slo=slo, windows=own)
        summaries.append(_summary(run, metrics, slo, name))
    return tuple(summaries)


def several_phases(run: Run, slo: Slo | None = None) -> tuple[Summary, ...]:
    """:func:`summarise_phases` of a run that has several; empty for one phase."""
    several = len(run.table("requests", ["phase"])["phase"].unique()) > 1
    return summarise_phases(run, slo) if several else ()


def _measured_by(run: Run, slo: Slo | None) -> tuple[Slo, RequestColumns, tuple[Window, ...]]:
    """The limits in force, the columns of all requests, and the steady windows. Raises UsageError."""
    columns = RequestColumns.of(metric_columns(run))
    if slo is not None:
        refuse_unknown_classes([name for name, _ in slo.classes], columns.classes)
        of_tokens = [name for name in slo.limits() if name.rpartition(":")[2] != "e2el"]
        if of_tokens and columns.ok.any() and not columns.generated.any():
            raise UsageError(f"{of_tokens[0]}: answers of {run.path} have no tokens; limit e2el")
    limits = slo_from_limits(run.manifest.slo) if slo is None else slo
    return limits, columns, steady_windows(columns, run.manifest.phases)


def metric_columns(run: Run) -> pa.Table:
    """The columns of a run's requests that the metrics read."""
    stored = run.column_names("requests")
    return run.table("requests", [*NEEDED, *(name for name in REQUESTS_EXTRAS.names if name in stored)])


def _summary(run: Run, metrics: Metrics, slo: Slo, phase: str = "") -> Summary:
    manifest = run.manifest
    metrics = replace(metrics, economy=cost_and_energy(manifest.facts, metrics, whole=not phase))
    if metrics.prefix_hit_rate is None and not phase:  # of the whole server, by its own counters
        metrics = replace(metrics, prefix_hit_rate=manifest.facts.get("prefix_hit_rate"))
    drafted = Drafted.of(manifest.facts)
    if drafted is not None and not phase:
        metrics = replace(metrics, mean_acceptance_length=drafted.mean_acceptance_length)
    return Summary(
        policy=manifest.policy,
        engine=manifest.engine,
        device=manifest.device,
        model=manifest.model,
        workload=manifest.workload,
        scenario=manifest.scenario,
        source=manifest.source,
        seed=manifest.seed,
        valid=manifest.valid,
        interrupted=manifest.interrupted,
        warnings=manifest.warnings,
        plan_hash=manifest.plan_hash,
        anchor_unix_ns=manifest.anchor_unix_ns,
        run_dir=str(run.path),
        reasons=tuple(manifest.reasons),
        slo=slo,
        metrics=metrics,
        open_loop=not manifest.phases,
        phase=phase,
        environment=run_environment(manifest),
        failures=failures_by_cause(run.table("requests", FAILURE_COLUMNS), phase),
        load=load_of_run(manifest),
        machine=machine_of_run(manifest),
        clients=ClientNodes.of(manifest.facts),
        until_clear=bool(manifest.facts.get("until_clear")),
        virtual=manifest.clock == "virtual",
        kv={name: manifest.facts.get(name) for name in KV_FIGURES},
        drafted=drafted,
        estimated_answers=(manifest.facts.get(ESTIMATED) or {}).get("answers", 0),
    )


_IDENTITY = ("policy", "engine", "device", "model", "workload", "scenario", "source", "seed")
"""What a summary has as its run's manifest does."""


def unsound_percentiles(metrics: Metrics) -> dict[str, float]:
    """Percentiles with too few samples, in ms, by their names in :func:`metrics_dict`."""
    unsound = {}
    for latency, name in product((*LATENCIES, *FURTHER_LATENCIES), QUANTILES):
        distribution: Distribution = getattr(metrics, latency)
        estimate = distribution.estimate(name)
        if estimate is not None and getattr(distribution, name) is None:
            unsound[f"{name}_{latency}_ms"] = estimate
    return unsound


_RATES = (
    "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "input_throughput",
    "total_token_throughput", "request_goodput", "token_goodput", "slo_attainment",
)  # fmt: skip
_FURTHER = (
    "cached_tokens", "prefix_hit_rate", "preemptions", "bundled_requests", "thinking_tokens", "abandoned_input_tokens",
    "abandoned_output_tokens",
)  # fmt: skip


def metrics_dict(metrics: Metrics) -> dict[str, Any]:
    """Metrics under the key names of ``vllm bench serve`` where it has them."""
    counts = {status: count for status, count in metrics.counts.items() if status != "ok"}
    rates = {"duration": metrics.duration_s} | {name: getattr(metrics, name) for name in _RATES}
    latencies = {
        f"{statistic}_{name}_ms": value
        for name in (*LATENCIES, *FURTHER_LATENCIES)
        for statistic, value in getattr(metrics, name).items()
    }
    extra = {
        "tokens_per_s_per_user": metrics.tokens_per_s_per_user,
        "interactivity_tokens_per_s": metrics.interactivity,
        "p90_interactivity_tokens_per_s": metrics.p90_interactivity,
        **{name: getattr(metrics, name) for name in _FURTHER},
        "steady": asdict(metrics.steady) if metrics.steady else None,
    }
    counted = {"planned": metrics.planned, "completed": metrics.completed} | counts
    return counted | rates | latencies | extra | asdict(metrics.economy)


def mean_over_repeats(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of several runs of a policy: means of rates and latencies, sums of counts.

    ``repeats`` holds the single summaries, ``spread`` the sample standard deviation of every mean. A figure that is
    null in one run is null in the mean. ``valid`` only if all runs are.
    """
    first = summaries[0]
    merged, spread = _averaged(summaries)
    if "classes" in first:
        merged["classes"] = {
            name: _averaged([summary["classes"][name] for summary in summaries])[0]
            for name in first["classes"]
            if all(name in summary.get("classes", {}) for summary in summaries)
        }
    if "acceptance" in first:
        positions = zip(*(summary.get("acceptance", ()) for summary in summaries), strict=False)
        merged["acceptance"] = [sum(position) / len(position) for position in positions]
    failures = [[Failure(**failure) for failure in summary.get("failures", ())] for summary in summaries]
    merged |= {
        "valid": all(summary["valid"] for summary in summaries),
        "interrupted": any(summary["interrupted"] for summary in summaries),
        **{
            name: list({shown_text(text): text for summary in summaries for text in summary[name]}.values())
            for name in ("warnings", "reasons")
        },
        "failures": [asdict(failure) for failure in merge_failures(failures)],
        "steady": None,
        "seeds": [summary["seed"] for summary in summaries],
        "spread": spread,
        "repeats": [dict(summary) for summary in summaries],
    }
    return merged


def _averaged(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The first row with means of rates and latencies and sums of counts, and the means' standard deviations."""
    first = rows[0]
    merged, spread = dict(first), dict[str, float | None]()
    for key in filter(_AVERAGED.__contains__, first):
        merged[key], spread[key] = _mean_and_spread([row.get(key) for row in rows])
    for key in _COUNTS:
        if key not in first:  # a summary stored before this count existed
            continue
        counts = [row.get(key) for row in rows]
        merged[key] = None if None in counts else sum(counts)
    if all("per_session" in row for row in rows):
        merged["per_session"] = _averaged([row["per_session"] for row in rows])[0]
    return merged, spread


_COUNTS = (
    "planned", "completed", "failed", "timed_out", "cancelled", "abandoned", "never_sent",
    "total_input_tokens", "total_output_tokens", "cached_tokens", "preemptions", "bundled_requests",
    "thinking_tokens", "abandoned_input_tokens", "abandoned_output_tokens", "repeated_tokens",
    "drafted_tokens", "accepted_tokens", "complete",
)  # fmt: skip
_AVERAGED = frozenset(
    {
        "duration", "tokens_per_s_per_user", "interactivity_tokens_per_s", "p90_interactivity_tokens_per_s",
        "mean_acceptance_length", "draft_acceptance_rate", "kv_full_share", "repeated_share", "worst_class_attainment",
        *_RATES, *_FURTHER, *ECONOMY_FIGURES, *SessionFigures.of(SESSIONS.empty_table()).to_dict(),
        *(f"{s}_{name}_ms" for s, _ in Distribution(0).items() for name in (*LATENCIES, *FURTHER_LATENCIES)),
    }
).difference(_COUNTS)  # fmt: skip


def _mean_and_spread(values: list[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None, None
    mean = sum(known) / len(known)
    return mean, (sum((value - mean) ** 2 for value in known) / (len(known) - 1)) ** 0.5 if len(known) > 1 else None
