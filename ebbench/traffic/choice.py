"""The scenario that is used when none is named; one rule for all commands that take a load."""

from __future__ import annotations

from math import inf


def scenario_meant(
    workload: str, scenario: str | None, request_rate: float | None, burstiness: float | None
) -> str | None:
    """The given scenario, or the one that the other options imply by the rules of `vllm bench serve`.

    A rate of infinity releases everything at once, or as much as the cap on concurrency lets in: ``saturated``.
    """
    if scenario is None and request_rate == inf and not workload.startswith("trace:"):
        return "saturated"
    if scenario is None and request_rate is not None and not workload.startswith("trace:"):
        return "poisson" if burstiness is None else "gamma"
    return scenario
