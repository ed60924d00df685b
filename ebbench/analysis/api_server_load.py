"""Whether vLLM's API server is the limit of a simulated run, or what the run lacks where it leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbench.analysis.drafting import Drafted
from ebbench.analysis.metrics import Metrics
from ebbench.devices.apiserver import find_api_server
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.server import DEFAULT_CLASS, OFF, VIRTUAL_TIME, EngineOptions

CODE = "api-server"
"""Code of the warning that it is left out."""
BUSY = 0.8
"""Share of a process's time from which its queue delays answers noticeably."""
LIMITING = 0.9
"""Share of the whole time of a run, its beginning and end included, from which the processes limit it."""


class ApiServerBusyError(Exception):
    """Ends a command's runs without vLLM's API server, one of which would keep it busy. ``warning``: that run's."""

    def __init__(self, warning: RunWarning) -> None:
        self.warning = warning


def processes_needed(
    requests_per_s: float, prompt_tokens_per_s: float, output_tokens_per_s: float, *, name: str = DEFAULT_CLASS
) -> float:
    """Processes of vLLM's API server that a load keeps busy all the time. ``name``: as in find_api_server."""
    costs = find_api_server(name)
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
    token_us = find_api_server(DEFAULT_CLASS).token_us
    return warning(CODE, needed=needed, processes=processes, token_us=token_us, api_server=DEFAULT_CLASS)


def runs_again(busy: RunWarning) -> str:
    """The line that says that all runs are made again with the API server whose absence ``busy`` reports."""
    return (
        f"{busy.sentence} Everything is simulated again with --api-server {DEFAULT_CLASS} (more processes: "
        "--api-server-count; none: --api-server off)."
    )


def api_server_warning(
    engine: str, options: EngineOptions, facts: Mapping[str, Any], metrics: Metrics
) -> RunWarning | None:
    """A warning if the API servers limit a simulated run, or would be busy for most of it where they are left out.

    ``facts``: the engine's; ``answering_units``: API server processes unless their count was set, one per data-parallel
    unit of vLLM; ``answering_instances``: engines, each with as many as were set.
    """
    if engine not in VIRTUAL_TIME or not metrics.duration_s:
        return None
    drafted = Drafted.of(facts)
    messages = metrics.total_output_tokens / (1.0 if drafted is None else drafted.mean_acceptance_length)
    each = metrics.completed, metrics.total_input_tokens, messages  # the tokens of a step leave in one message
    rates = [amount / metrics.duration_s for amount in each]
    units, instances = int(facts.get("answering_units", 1)), int(facts.get("answering_instances", 1))
    if options.api_server == OFF:
        return left_out(processes_needed(*rates), units)
    processes = units if options.api_server_count is None else options.api_server_count * instances
    return _limit(processes_needed(*rates, name=options.api_server) / processes, max(1, processes // instances))


def _limit(busy: float, processes: int) -> RunWarning | None:
    """A warning if the API servers are busy for too large a share of the time. ``processes``: of each engine."""
    if busy < LIMITING:
        return None
    return warning("api-server-limit", busy=busy, processes=processes)
