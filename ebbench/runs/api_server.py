"""Which simulated cells leave out an API server of vLLM that they would keep busy, and the same cells with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ebbench.analysis.metrics import Metrics
from ebbench.analysis.summary import Drafted
from ebbench.engines.setup import resolve_topology
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS, OFF, VIRTUAL_TIME, EngineOptions

Made = TypeVar("Made")
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
    from ebbench.devices.profiles import find_api_server

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
    from ebbench.devices.profiles import find_api_server

    token_us = find_api_server(DEFAULT_CLASS).token_us
    return warning(CODE, needed=needed, processes=processes, token_us=token_us, api_server=DEFAULT_CLASS)


def again_if_busy(make: Callable[[bool], Made], say: Callable[[str], None]) -> Made:
    """``make(False)``: runs without vLLM's API server. If it raises ApiServerBusyError: say why, and ``make(True)``.

    Every command that makes runs without knowing whether the API server matters goes through here.
    """
    try:
        return make(False)
    except ApiServerBusyError as busy:
        say(_runs_again(busy.warning))
    return make(True)


def _runs_again(busy: RunWarning) -> str:
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
    accepted = 0 if drafted is None else drafted.accepted_tokens  # which leave in the message of another token
    amounts = metrics.completed, metrics.total_input_tokens, max(metrics.total_output_tokens - accepted, 0)
    rates = [amount / metrics.duration_s for amount in amounts]
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


Figures = Mapping[str, Any]
_RATES = ("request_throughput", "total_token_throughput", "output_throughput")


def left_out_of(cell: RunSpec, figures: Figures) -> RunWarning | None:
    """A warning if the run of ``cell`` leaves out API servers that it would keep busy.

    ``figures``: the run's, under the keys of a summary.
    """
    requests, total, output = (figures.get(key) for key in _RATES)
    simulated = cell.engine in VIRTUAL_TIME and cell.server.api_server == OFF and not figures.get("dead")
    if not simulated or requests is None or total is None or output is None:
        return None
    topology = resolve_topology(cell.cluster.topology, cell.plan.scenario, cell.cluster.link)
    return left_out(
        processes_needed(requests, total - output, output), 1 if topology is None else topology.pools[-1].units
    )


def as_answered(cells: Iterable[RunSpec], figures: Callable[[RunSpec], Figures | None]) -> dict[RunSpec, RunSpec]:
    """Each cell, with the API server if a cell that it is compared with would keep it busy.

    Cells are compared that differ in policy, seed, and limits of the scheduler. ``figures`` returns those of a finished
    run, None for others.
    """
    chosen = list(dict.fromkeys(cells))
    busy = {_load(cell) for cell in chosen if (known := figures(cell)) is not None and left_out_of(cell, known)}
    return {cell: cell.changed(api_server=DEFAULT_CLASS) if _load(cell) in busy else cell for cell in chosen}


def _load(cell: RunSpec) -> RunSpec:
    return cell.changed(policy="v1", seed=0, max_num_seqs=1, max_num_batched_tokens=1)
