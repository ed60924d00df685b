"""Default scenario, the same for all commands that take a load."""

from __future__ import annotations

from math import inf

from ebbench.workloads.options import is_recorded


def scenario_meant(
    workload: str, scenario: str | None, request_rate: float | None, burstiness: float | None
) -> str | None:
    """The given scenario, or the one implied by the other options, by the rules of `vllm bench serve`.

    An infinite rate releases all requests at once, up to the concurrency cap: ``saturated``.
    """
    if scenario is None and request_rate == inf and not is_recorded(workload):
        return "saturated"
    if scenario is None and request_rate is not None and not is_recorded(workload):
        return "poisson" if burstiness is None else "gamma"
    return scenario
