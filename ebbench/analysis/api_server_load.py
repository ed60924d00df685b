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


def api_server_warning(
    engine: str, options: EngineOptions, facts: Mapping[str, Any], metrics: Metrics
) -> RunWarning | None:
    """A warning if the API server of a data-centre host would be busy for most of the run, or overloaded.

    ``facts``: the engine's; ``answering_units``: API server processes, one per data-parallel unit of vLLM.
    """
    if engine not in VIRTUAL_TIME or options.api_server != OFF or not metrics.duration_s:
        return None
    costs, processes = find_api_server(CLASS), int(facts.get("answering_units", 1))
    busy_us = (
        costs.token_us * metrics.total_output_tokens
        + costs.request_us * metrics.completed
        + costs.prompt_token_us * metrics.total_input_tokens
    )
    needed = busy_us * 1e-6 / metrics.duration_s
    if needed < BUSY * processes:
        return None
    return RunWarning(
        "api-server",
        f"These requests and answers keep {needed:.1f} processes of vLLM's API server busy on a data-centre host "
        f"({costs.token_us:g} us per token); vLLM starts {processes}. This run leaves them out: a real server answers "
        "later, or fewer requests.",
        f"Add --api-server {CLASS}.",
    )
