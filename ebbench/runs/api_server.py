"""Which simulated cells leave out an API server of vLLM that they would keep busy, and the same cells with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ebbench.analysis.api_server_load import left_out, processes_needed
from ebbench.engines.setup import topology_of
from ebbench.records.warnings import RunWarning
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS, OFF, VIRTUAL_TIME

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
    topology = topology_of(cell.cluster.topology, cell.plan.scenario, cell.cluster.link)
    return left_out(
        processes_needed(requests, total - output, output), 1 if topology is None else topology.pools[-1].units
    )


def as_answered(cells: Iterable[RunSpec], figures: Callable[[RunSpec], Figures | None]) -> dict[RunSpec, RunSpec]:
    """Each cell, with the API server if a cell that it is compared with would keep it busy.

    Cells are compared that differ in policy, seed, and limits of the scheduler. ``figures`` returns those of a finished
    run, None for others.
    """
    chosen = list(dict.fromkeys(cells))
    busy = {_load(cell) for cell in chosen if (found := figures(cell)) is not None and left_out_of(cell, found)}
    return {cell: cell.changed(api_server=DEFAULT_CLASS) if _load(cell) in busy else cell for cell in chosen}


def _load(cell: RunSpec) -> RunSpec:
    return cell.changed(policy="v1", seed=0, max_num_seqs=1, max_num_batched_tokens=1)
