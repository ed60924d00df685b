"""What a run cost: money by the price of what serves, energy by the power that was measured.

``price_per_hour`` is the price of everything that serves, all its GPUs together. Cost per million tokens is that price
over the throughput of the whole run, so idle times at its start and end count. Energy is that of the GPUs alone, from
the run's start to its last token, and of the whole run, so that single phases have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbench.analysis.metrics import Metrics

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


FIGURES = tuple(Economy.__dataclass_fields__)


def economy_of(facts: Mapping[str, Any], metrics: Metrics, *, whole: bool = True) -> Economy:
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
        _each(energy_j, metrics.total_output_tokens),
        _each(energy_j, metrics.completed),
    )


def _cost(price_per_hour: float | None, rate_per_s: float | None, count: float) -> float | None:
    """Price of ``count`` at a rate; None where either is unknown."""
    return None if price_per_hour is None or not rate_per_s else price_per_hour / PER_HOUR_S / rate_per_s * count


def _each(total: float | None, count: int) -> float | None:
    return None if total is None or not count else total / count
