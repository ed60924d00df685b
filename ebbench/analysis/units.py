"""Units of a paired comparison: one finished run each, reduced to its environment and its figures.

The two sides must agree in the *environment* (:mod:`environment`). They may differ in what is tested: the policy, the
versions of ebbench and the plugin, and the time of day.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from ebbench.analysis.columns import NO_CLASS
from ebbench.analysis.environment import (
    ENVIRONMENT,
    LATER,
    UNKNOWN,
    describe_load,
    differences,
    listed,
    machine_of_run,
    remedy,
)
from ebbench.analysis.metrics import LATENCIES, Metrics
from ebbench.analysis.summary import metrics_dict, summarise
from ebbench.analysis.validity import of_device
from ebbench.config.declare import Setting, split_all_pairs, value_of
from ebbench.errors import DataError, UnknownNameError, UsageError, check_known
from ebbench.records.run import Run, find_runs
from ebbench.records.warnings import ABOUT_SERVER, RunWarning

FIGURES = (
    "output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "request_goodput",
)  # fmt: skip
"""Figures that are always shown; the rules name those that are gated."""
RATES = {
    "throughput": "output_throughput",
    "requests": "request_throughput",
    "tokens": "total_token_throughput",
    "goodput": "request_goodput",
}
DRAFTS = "tokens_per_step"
"""Output tokens per decode step and sequence, which drafts raise."""
STATISTICS = ("mean", "p90", "p95", "p99")
NAMES: Mapping[str, str] = MappingProxyType(
    RATES
    | {latency: f"median_{latency}_ms" for latency in LATENCIES}
    | {f"{latency}-{name}": f"{name}_{latency}_ms" for latency in LATENCIES for name in STATISTICS}
    | {"tokens-per-step": DRAFTS}
)
"""Names of figures on the command line, and their columns."""
MEASURED = tuple(dict.fromkeys([*FIGURES, *NAMES.values()]))
LABELS = {
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "total_token_throughput": "tokens in and out/s",
    "request_goodput": "goodput",
    DRAFTS: "tokens/step",
} | {f"{name}_{latency}_ms": f"{latency.upper()} {name}" for latency in LATENCIES for name in ("median", *STATISTICS)}
LENGTHS = ("session", "turn", "phase", "arrival_ns", "input_tokens", "output_tokens")
"""Columns of a plan that determine arrival times and lengths."""
_HIGHER_IS_BETTER = frozenset({*RATES.values(), DRAFTS})
OF_CLASSES = ("median_ttft_ms", "median_tpot_ms")
"""Figures that are shown of each class of requests, as ``chat:median_ttft_ms``."""


def label_of(figure: str) -> str:
    """What tables call a figure: ``TTFT median``, of a class of requests ``TTFT median of chat``."""
    name, _, plain = figure.rpartition(":")
    return f"{LABELS[plain]} of {name}" if name else LABELS[plain]


def name_of(figure: str) -> str:
    """How a figure is called on the command line: ``ttft``, ``chat:ttft``."""
    of_class, colon, plain = figure.rpartition(":")
    return of_class + colon + next(name for name, column in NAMES.items() if column == plain)


def is_higher_better(figure: str) -> bool:
    """Whether more of a figure is better, as of rates."""
    return figure.rpartition(":")[2] in _HIGHER_IS_BETTER


def classes_among(units: Iterable[GateUnit]) -> list[str]:
    """The classes of requests of which any of the units has figures."""
    return sorted({figure.rpartition(":")[0] for unit in units for figure in unit.figures} - {""})


@dataclass(frozen=True)
class GateUnit:
    """One restart of a real engine, or one seeded simulation. A figure is None if undefined.

    ``figures``: those of MEASURED, and of each class of requests, as ``chat:median_ttft_ms``.
    ``load``: number and rate of sessions in words. ``lengths``: hash of the plan's lengths and arrivals, which alone
    determine a run in virtual time; empty in real time. A stored baseline may have neither. ``conditions``: what the
    figures depend on besides policy and seed, by name; only runs just read have it. ``until_clear``: one of several
    repeats that were tested after each. ``steady_rate``: output tokens/s in the steady window; only of runs just read
    whose requests arrive at fixed times. ``caveats``: those of the device; only runs just read have them.
    ``invalid_tries``: INVALID runs of the same plan and policy beside it, in whose place it was measured.
    ``server``: URL of the server, if ebbench sent the requests to one that it did not start. ``cache_unknown``: nothing
    emptied its prefix cache before the run, and its hits are not known. ``about_server``: warnings that its figures are
    not of what was asked for.
    """

    environment: Mapping[str, str]
    policy: str
    plan_hash: str
    seed: int
    virtual: bool
    anchor_unix_ns: int
    run: str
    figures: Mapping[str, float | None]
    slo: str = ""
    load: str = ""
    lengths: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    until_clear: bool = False
    steady_rate: float | None = None
    caveats: tuple[RunWarning, ...] = ()
    invalid_tries: int = 0
    server: str = ""
    cache_unknown: bool = False
    about_server: tuple[RunWarning, ...] = ()

    @property
    def measurement(self) -> tuple[object, ...]:
        """The identity of a run wherever it is stored: no two of one plan and policy begin in the same nanosecond.

        The directory does not: it may be copied, and a later run may have its name.
        """
        return self.anchor_unix_ns, self.plan_hash, self.seed, self.policy

    @property
    def configuration_hash(self) -> str:
        """Twelve hex digits over the whole environment, the key of stored baselines."""
        known = {name: self.environment.get(name, UNKNOWN) for name in ENVIRONMENT}
        text = json.dumps([[name, value] for name, value in known.items() if value or name not in LATER])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_units(paths: Sequence[Path]) -> list[GateUnit]:
    """:func:`gate_units` of the runs among ``paths`` (run directories or directories of runs).

    Also raises DataError if there is no run.
    """
    units = gate_units([Run.load(path) for path in find_runs(paths)])
    if not units:
        raise DataError("no run to compare")
    return units


def gate_units(runs: Sequence[Run]) -> list[GateUnit]:
    """Units by seed, then oldest first. An INVALID run is left out if the same plan was measured again.

    Raises DataError for a run that is unreadable, or INVALID and not measured again: it is shown, but not compared.
    """
    units, invalid = valid_units(runs)
    if invalid:
        why = "; ".join(map(str, invalid[0].manifest.reasons))
        raise DataError(f"{invalid[0].path}: INVALID run ({why}); measure it again")
    return units


def valid_units(runs: Sequence[Run]) -> tuple[list[GateUnit], list[Run]]:
    """The units of the valid runs, and the INVALID runs that none of them replaces."""
    invalid = [run for run in runs if not run.manifest.valid]
    tries, units = Counter(map(_policy_and_plan, invalid)), []
    for run in runs:
        if run.manifest.valid:
            units.append(replace(_unit_of(run), invalid_tries=tries.pop(_policy_and_plan(run), 0)))
    units.sort(key=lambda unit: (unit.seed, unit.anchor_unix_ns, unit.run))
    return units, [run for run in invalid if _policy_and_plan(run) in tries]


def _policy_and_plan(run: Run) -> tuple[str, str]:
    """The key that a repeated run shares with the first one: policy and plan."""
    return run.manifest.policy, run.manifest.plan_hash


def gate_unit(run: Run) -> GateUnit:
    """Reduce a run to a unit. Raises DataError if it is INVALID or damaged."""
    return gate_units([run])[0]


def _unit_of(run: Run) -> GateUnit:
    manifest, summary = run.manifest, summarise(run)
    steady = summary.metrics.steady
    figures = unit_figures(summary.metrics) | {DRAFTS: summary.tokens_per_step}
    for name, metrics in summary.classes.items():
        if name != NO_CLASS:
            figures |= {f"{name}:{figure}": value for figure, value in unit_figures(metrics).items()}
    return GateUnit(
        environment=summary.environment,
        policy=summary.policy,
        plan_hash=summary.plan_hash,
        seed=summary.seed,
        virtual=summary.virtual,
        anchor_unix_ns=summary.anchor_unix_ns,
        conditions=summary.conditions,
        until_clear=summary.until_clear,
        run=str(run.path),
        figures=figures,
        slo=str(summary.slo),
        load=describe_load(manifest),
        steady_rate=steady.output_throughput if summary.open_loop and steady else None,
        caveats=of_device(manifest.engine, manifest.warnings),
        lengths=lengths_hash(run) if manifest.clock == "virtual" else "",
        server=str(manifest.facts.get("server", "")) if manifest.engine == "endpoint" else "",
        about_server=tuple(warning for warning in manifest.warnings if warning.code in ABOUT_SERVER),
        cache_unknown=machine_of_run(manifest).cache_kept and manifest.facts.get("prefix_hit_rate") is None,
    )


def lengths_hash(run: Run) -> str:
    """Hash of lengths and arrivals: plans with equal hashes differ at most in token content.

    Raises DataError for a damaged plan.
    """
    table = run.table("plan", LENGTHS).replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()[:12]


def unit_figures(metrics: Metrics) -> dict[str, float | None]:
    """The figures of MEASURED in tokens/s, requests/s and ms; None of what is not among the metrics."""
    figures = metrics_dict(metrics)
    return {figure: figures.get(figure) for figure in MEASURED}


def of_policy(units: Sequence[GateUnit], policy: str | None, side: str) -> list[GateUnit]:
    """The units of one policy; None: of all. Raises UnknownNameError, naming the existing ones, if there is none."""
    if policy is None:
        return list(units)
    chosen = [unit for unit in units if unit.policy == policy]
    if not chosen:
        raise UnknownNameError(f"policy of the {side}", policy, dict.fromkeys(unit.policy for unit in units))
    return chosen


def require_one_environment(units: Sequence[GateUnit], allowed: Sequence[str], side: str) -> None:
    """Raise DataError, naming the differing keys, if the units of one side differ in environment or policy."""
    first = units[0]
    for unit in units[1:]:
        if unlike := differences(first.environment, unit.environment, allowed):
            problem = f"{first.run} and {unit.run} are not comparable ({listed(unlike)})"
            raise DataError(f"{side}: {problem}; {remedy(unlike)} allows it")
        if unit.policy != first.policy:
            raise DataError(f"{side} mixes the policies {first.policy} and {unit.policy}; choose one with --policy")


def require_separate_runs(baseline: Sequence[GateUnit], candidate: Sequence[GateUnit]) -> None:
    """Raise UsageError if a run, or its copy, is on both sides: it would never differ from itself."""
    before = {unit.measurement for unit in baseline}
    shared = [unit.run for unit in candidate if unit.measurement in before]
    if shared:
        shared_runs = f"{shared[0]} is" if len(shared) == 1 else f"{len(shared)} runs are"
        first = "" if len(shared) == 1 else f", {shared[0]} first"
        raise UsageError(
            f"{shared_runs} on both sides{first}: a run never differs from itself; give runs of the candidate's own"
        )


# Parses figures and margins in percent: `ttft-p99`; `3` for all figures, `ttft:10` for one.

DEFAULT_PERCENT = 3.0
MARGIN = Setting("loss that still passes", unit="percent", above=0, below=100, example=10)


def parse_figures(names: Iterable[str]) -> tuple[str, ...]:
    """The columns of the named figures (``ttft``, ``chat:ttft``), in that order. Raises UnknownNameError."""
    return tuple(dict.fromkeys(map(_column, split_all_pairs(names))))


def _column(text: str) -> str:
    of_class, colon, name = text.rpartition(":")
    check_known("figure", name, NAMES)
    return f"{of_class}{colon}{NAMES[name]}"


def parse_margins(texts: Iterable[str]) -> tuple[float, dict[str, float]]:
    """The default margin and the margins of single figures, as shares. Raises UsageError, also for one given twice."""
    shares: dict[str, float] = {}
    for pair in split_all_pairs(texts):
        name, colon, text = pair.rpartition(":")
        figure = _column(name) if colon else ""
        if figure in shares:
            raise UsageError(f"--margin: {name or 'the margin of all figures'} is given twice; give it once")
        shares[figure] = value_of(name, text, MARGIN, "--margin", equals=colon) / 100
    return shares.pop("", DEFAULT_PERCENT / 100), shares
