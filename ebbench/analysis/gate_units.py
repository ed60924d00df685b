"""The units of a paired comparison: one finished run each, reduced to its environment and its figures.

What must agree between the two sides is the *environment* (where it ran and what was asked of it); what may differ
is the thing under test: the policy, ebbench and the plugin themselves, and the time of day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbench.analysis.metrics import Metrics
from ebbench.analysis.summary import summarise
from ebbench.errors import DataError, UnknownNameError
from ebbench.records.manifest import Manifest
from ebbench.records.run import Run, find_runs

ENVIRONMENT = (
    "engine", "device", "driver", "vllm", "model", "workload", "scenario", "source", "options",
)  # fmt: skip
"""Names of what must agree. ``options`` are the scheduler settings; they decide the configuration hash."""

LATER_OPTIONS = {"enforce_eager": False, "warmup": 0}
"""Options that older runs did not record, and what they ran with: at that value they are no part of a comparison."""

FIGURES = (
    "output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "request_goodput",
)  # fmt: skip
LABELS = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT median",
    "median_tpot_ms": "TPOT median",
    "p99_ttft_ms": "TTFT p99",
    "p99_tpot_ms": "TPOT p99",
    "request_goodput": "goodput",
}
HIGHER_IS_BETTER = frozenset({"output_throughput", "request_goodput"})
UNKNOWN = ""


@dataclass(frozen=True)
class Unit:
    """One restart of a real engine, or one seeded simulation. A figure is None where undefined."""

    environment: Mapping[str, str]
    policy: str
    plan_hash: str
    seed: int
    virtual: bool
    anchor_unix_ns: int
    run: str
    figures: Mapping[str, float | None]
    slo: str = ""

    @property
    def configuration_hash(self) -> str:
        """Twelve hex digits over the whole environment: what a stored baseline is looked up by."""
        text = json.dumps([[name, self.environment.get(name, UNKNOWN)] for name in ENVIRONMENT])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_units(paths: Sequence[Path]) -> list[Unit]:
    """Units of the runs among ``paths`` (run directories, or directories that hold some), oldest first.

    Raises DataError when there is none, when one cannot be read, and when one is INVALID.
    """
    units = [unit_of(Run.load(path)) for path in find_runs(paths)]
    if not units:
        raise DataError("no run to compare")
    return sorted(units, key=lambda unit: (unit.seed, unit.anchor_unix_ns, unit.run))


def unit_of(run: Run) -> Unit:
    """Reduce a run. Raises DataError when it is INVALID: such a run is shown, never compared or gated."""
    manifest = run.manifest
    if not manifest.valid:
        raise DataError(f"{run.path}: INVALID run ({'; '.join(manifest.reasons)}); measure it again")
    summary = summarise(run)
    return Unit(
        environment=environment_of(manifest),
        policy=manifest.policy,
        plan_hash=manifest.plan_hash,
        seed=manifest.seed,
        virtual=manifest.clock == "virtual",
        anchor_unix_ns=manifest.anchor_unix_ns,
        run=str(run.path),
        figures=figures_of(summary.metrics),
        slo=str(summary.slo),
    )


def figures_of(metrics: Metrics) -> dict[str, float | None]:
    """The figures of FIGURES: tokens/s, ms and requests/s."""
    return {
        "output_throughput": metrics.output_throughput,
        "median_ttft_ms": metrics.ttft.median,
        "median_tpot_ms": metrics.tpot.median,
        "p99_ttft_ms": metrics.ttft.p99,
        "p99_tpot_ms": metrics.tpot.p99,
        "request_goodput": metrics.request_goodput,
    }


def environment_of(manifest: Manifest) -> dict[str, str]:
    """What must agree, as text; what a run does not record is empty and agrees only with empty."""
    return {
        "engine": manifest.engine,
        "device": manifest.device,
        "driver": _recorded(manifest, "driver"),
        "vllm": _recorded(manifest, "vllm"),
        "model": manifest.model,
        "workload": manifest.workload,
        "scenario": manifest.scenario,
        "source": manifest.source,
        "options": json.dumps(_compared(manifest.options), sort_keys=True),
    }


def _compared(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if LATER_OPTIONS.get(name, UNKNOWN) != value}


def _recorded(manifest: Manifest, name: str) -> str:
    """A version the engine recorded, among the versions or the facts."""
    found: Any = manifest.versions.get(name) or manifest.facts.get(name) or manifest.facts.get(f"{name}_version")
    return str(found) if found else UNKNOWN


def differences(one: Mapping[str, str], other: Mapping[str, str], allowed: Sequence[str] = ()) -> list[str]:
    """Every key in which two environments differ, as ``device: h200 against l40s``; options one by one."""
    found = []
    for name in ENVIRONMENT:
        ours, theirs = one.get(name, UNKNOWN), other.get(name, UNKNOWN)
        if ours == theirs or name in allowed:
            continue
        found += _options(ours, theirs) if name == "options" else [f"{name}: {_shown(ours)} against {_shown(theirs)}"]
    return found


def _options(ours: str, theirs: str) -> list[str]:
    one, other = (json.loads(text) if text else {} for text in (ours, theirs))
    names = sorted(set(one) | set(other))
    return [
        f"options.{name}: {one.get(name)} against {other.get(name)}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _shown(value: str) -> str:
    return value or "not recorded"


def check_allowed(names: Sequence[str]) -> tuple[str, ...]:
    """Raise UnknownNameError for a name that is not of ENVIRONMENT."""
    for name in names:
        if name not in ENVIRONMENT:
            raise UnknownNameError("environment key", name, ENVIRONMENT)
    return tuple(names)


def require_one_environment(units: Sequence[Unit], allowed: Sequence[str], side: str) -> None:
    """Raise DataError naming the differing keys when the units of one side do not belong together."""
    first = units[0]
    for unit in units[1:]:
        found = differences(first.environment, unit.environment, allowed)
        if found:
            raise DataError(f"{side}: {first.run} and {unit.run} are not comparable ({'; '.join(found)})")
        if unit.policy != first.policy:
            raise DataError(
                f"{side} mixes the policies {first.policy} and {unit.policy}; name the runs of one policy only"
            )
