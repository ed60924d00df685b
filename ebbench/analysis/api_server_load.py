"""Whether an API server, where it was left out of a simulated run, could have streamed the run's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbench.analysis.metrics import Metrics
from ebbench.devices.apiserver import OFF, find_api_server
from ebbench.engines.base import VIRTUAL_TIME, EngineOptions
from ebbench.records.manifest import RunWarning

CLASS = "datacenter"
BUSY = 0.8
"""Share of a process's time from which its queue delays answers noticeably."""


def processes_needed(requests_per_s: float, prompt_tokens_per_s: float, output_tokens_per_s: float) -> float:
    """Processes of vLLM's API server on a data-centre host that a load keeps busy all the time."""
    costs = find_api_server(CLASS)
    busy_us = (
        costs.request_us * requests_per_s
        + costs.prompt_token_us * prompt_tokens_per_s
        + costs.token_us * output_tokens_per_s
    )
    return busy_us * 1e-6


def left_out(needed: float, processes: int) -> RunWarning | None:
    """A warning if ``needed`` processes are too many for those that vLLM starts, which were not simulated."""
    if needed < BUSY * processes:
        return None
    return RunWarning(
        "api-server",
        f"These requests and answers keep {needed:.1f} processes of vLLM's API server busy on a data-centre host "
        f"({find_api_server(CLASS).token_us:g} us per token); vLLM starts {processes}. They are left out here: a real "
        "server answers later, or fewer requests.",
        f"Add --api-server {CLASS}, with --api-server-count for several processes.",
    )


def api_server_warning(
    engine: str, options: EngineOptions, facts: Mapping[str, Any], metrics: Metrics
) -> RunWarning | None:
    """A warning if the API server of a data-centre host would be busy for most of the run, or overloaded.

    ``facts``: the engine's; ``answering_units``: API server processes, one per data-parallel unit of vLLM.
    """
    if engine not in VIRTUAL_TIME or options.api_server != OFF or not metrics.duration_s:
        return None
    each = metrics.completed, metrics.total_input_tokens, metrics.total_output_tokens
    needed = processes_needed(*(amount / metrics.duration_s for amount in each))
    return left_out(needed, int(facts.get("answering_units", 1)))
