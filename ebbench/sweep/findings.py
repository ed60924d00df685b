"""Results of a sweep: per policy and setting of the other axes, the best configuration and the sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ebbench.analysis.sensitivity import Sensitivity, sensitivity
from ebbench.engines.setup import is_server
from ebbench.runs.cell import Cell
from ebbench.runs.settings import plain, settings_of
from ebbench.sweep.store import Finished

METRIC = "request_throughput"
_BASELINE = "v1"
_CONFIGURATION = ("policy", "max_num_batched_tokens", "max_num_seqs", "seed")


@dataclass(frozen=True)
class Finding:
    """One policy in one setting. ``setting``: values of the other axes. Throughputs are means over the seeds."""

    setting: tuple[tuple[str, Any], ...]
    policy: str
    sensitivity: Sensitivity
    gain: float | None
    invalid: int


def findings(entries: Sequence[Finished], axes: Sequence[str], metric: str = METRIC) -> list[Finding]:
    """One entry per setting and policy, in grid order. INVALID cells are counted and left out.

    ``gain``: best throughput over the best of :func:`baseline_of` in the same setting, minus one.
    """
    others = tuple(name for name in axes if name not in _CONFIGURATION)
    groups: dict[tuple[tuple[Any, ...], str], list[Finished]] = {}
    for entry in entries:
        settings = settings_of(entry.cell)
        setting = tuple(plain(settings[name]) for name in others)
        groups.setdefault((setting, entry.cell.policy), []).append(entry)
    found = [
        Finding(tuple(zip(others, setting, strict=True)), policy, best, None, invalid)
        for (setting, policy), members in groups.items()
        for best, invalid in [_sensitivity(members, metric)]
        if best is not None
    ]
    baseline = baseline_of(found)
    bests = {one.setting: one.sensitivity.best for one in found if one.policy == baseline}
    return [
        replace(one, gain=one.sensitivity.best / bests[one.setting] - 1)
        if one.setting in bests and one.policy != baseline
        else one
        for one in found
    ]


def baseline_of(found: Sequence[Finding]) -> str:
    """The policy that the others are compared with: v1, else the first one of the grid."""
    policies = [finding.policy for finding in found]
    return policies[0] if policies and _BASELINE not in policies else _BASELINE


def _sensitivity(members: Sequence[Finished], metric: str) -> tuple[Sensitivity | None, int]:
    cells: dict[tuple[int, int], list[float]] = {}
    invalid = 0
    for entry in members:
        value = entry.measured.figures.get(metric)
        if not entry.measured.valid or value is None:
            invalid += 1
            continue
        cells.setdefault(_configuration(entry.cell), []).append(float(value))
    if not cells:
        return None, invalid
    found = sensitivity({pair: fmean(values) for pair, values in cells.items()})
    if any(is_server(entry.cell.engine) for entry in members):
        found = replace(found, best_budget=None, best_size=None)
    return found, invalid


def _configuration(cell: Cell) -> tuple[int, int]:
    return cell.options.max_num_batched_tokens, cell.options.max_num_seqs
