"""Results of a sweep: per policy and setting of the other axes, the best configuration and the sensitivity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ebbench.analysis.compare.policies import TIE
from ebbench.analysis.noise import least_difference
from ebbench.analysis.sensitivity import Sensitivity, sensitivity
from ebbench.runs.settings import plain
from ebbench.spec.run import RunSpec, settings_of
from ebbench.spec.server import is_server
from ebbench.sweep.store import Finished

METRIC, GOODPUT = "request_throughput", "request_goodput"
_BASELINE = "v1"
_CONFIGURATION = ("policy", "max_num_batched_tokens", "max_num_seqs", "seed")
Configuration = tuple[int, int]
"""Token budget B and batch size N."""


@dataclass(frozen=True)
class Finding:
    """One policy in one setting. ``setting``: values of the other axes. Throughputs are means over the seeds.

    ``equal``: other configurations that are not worse than the best one beyond ``noise``, the least relative difference
    that is more than chance; None where no seeds were repeated. ``gain_shown``: the gain goes beyond it.
    """

    setting: tuple[tuple[str, Any], ...]
    policy: str
    sensitivity: Sensitivity
    gain: float | None
    invalid: int
    equal: tuple[Configuration, ...] = ()
    noise: float | None = None
    gain_shown: bool = True


def metric_of(cells: Sequence[RunSpec]) -> str:
    """The figure that ranks if none was chosen: goodput if all cells have limits, else requests/s."""
    return GOODPUT if all(cell.goodput for cell in cells) else METRIC


def findings(entries: Sequence[Finished], axes: Sequence[str], metric: str = METRIC) -> list[Finding]:
    """One entry per setting and policy, in grid order. INVALID cells are counted and left out.

    ``gain``: best throughput over the best of :func:`baseline_of` in the same setting, minus one.
    """
    others = tuple(name for name in axes if name not in _CONFIGURATION)
    settings: dict[tuple[Any, ...], dict[str, list[Finished]]] = {}
    for entry in entries:
        own = settings_of(entry.cell)
        setting = tuple(plain(own[name]) for name in others)
        settings.setdefault(setting, {}).setdefault(entry.cell.policy, []).append(entry)
    found = [
        finding
        for setting, policies in settings.items()
        for finding in _of_setting(tuple(zip(others, setting, strict=True)), policies, metric)
    ]
    baseline = baseline_of(found)
    bests = {one.setting: one.sensitivity.best for one in found if one.policy == baseline}
    return [_with_gain(one, bests.get(one.setting)) if one.policy != baseline else one for one in found]


def _of_setting(
    setting: tuple[tuple[str, Any], ...], policies: Mapping[str, Sequence[Finished]], metric: str
) -> list[Finding]:
    """The findings of one setting, whose policies and configurations share their noise."""
    values = {policy: _values(members, metric) for policy, members in policies.items()}
    noise = least_difference({(policy, each): seeds for policy, own in values.items() for each, seeds in own.items()})
    found = []
    for policy, members in policies.items():
        means = {each: fmean(seeds.values()) for each, seeds in values[policy].items()}
        if not means:
            continue
        best = sensitivity(means)
        equal = _equal(means, noise)
        if any(is_server(entry.cell.engine) for entry in members):
            best, equal = replace(best, best_budget=None, best_size=None), ()
        invalid = len(members) - sum(len(seeds) for seeds in values[policy].values())
        found.append(Finding(setting, policy, best, None, invalid, equal, noise))
    return found


def _values(members: Sequence[Finished], metric: str) -> dict[Configuration, dict[int, float]]:
    """The figure of the valid cells by configuration and seed."""
    found: dict[Configuration, dict[int, float]] = {}
    for entry in members:
        value = entry.measured.figures.get(metric)
        if entry.measured.valid and value is not None:
            found.setdefault(_configuration(entry.cell), {})[entry.cell.plan.seed] = float(value)
    return found


def _equal(means: Mapping[Configuration, float], noise: float | None) -> tuple[Configuration, ...]:
    """The configurations but the best that do not differ from it beyond noise; within TIE where that is unknown."""
    best, *others = sorted(means, key=lambda pair: (-means[pair], pair))
    reach = TIE if noise is None else noise
    return tuple(pair for pair in others if means[best] <= means[pair] * (1 + reach))


def _with_gain(finding: Finding, baseline: float | None) -> Finding:
    if not baseline:
        return finding
    gain = finding.sensitivity.best / baseline - 1
    reach = TIE if finding.noise is None else finding.noise
    return replace(finding, gain=gain, gain_shown=abs(math.log1p(gain)) > math.log1p(reach) if gain > -1 else True)


def baseline_of(found: Sequence[Finding]) -> str:
    """The policy that the others are compared with: v1, else the first one of the grid."""
    policies = [finding.policy for finding in found]
    return policies[0] if policies and _BASELINE not in policies else _BASELINE


def _configuration(cell: RunSpec) -> Configuration:
    return cell.server.max_num_batched_tokens, cell.server.max_num_seqs
