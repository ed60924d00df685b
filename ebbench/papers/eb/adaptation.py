"""How policies adapt to shifts inside one run: throughput, TTFT, time to adapt and regret in each phase.

The EB paper has no such table: the distribution shift of its table 3 is one shuffled mixture, the concurrency shift
five separate runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ebbench.analysis.documents import Column, Document, Section, Value, labels, relative
from ebbench.analysis.phases import Recovery, recoveries
from ebbench.analysis.summary import summarise_phases
from ebbench.errors import UsageError
from ebbench.papers.published import GPUS, MAIN_MODEL, gpu_title
from ebbench.papers.table import PaperOptions, PaperTable, Published, pending
from ebbench.records.run import Run
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

SCENARIOS: Mapping[str, str] = {
    "load-falls": "1,024 open requests, then 16",
    "load-rises": "16 open requests, then 1,024",
    "prompts-to-answers": "512 open; long prompts, long answers, long prompts",
    "day-and-night": "open loop with a quiet night and a noon at 110 %",
}
OPEN_LOOP = ("day-and-night",)
"""Here the arrivals set the throughput, so that latency tells the policies apart."""
COMPARED = ("v1", "eb", "ebplus", "marginal")
FIXED = ("v1", "v0", "eb:theta=0.1", "eb:theta=0.2", "eb:theta=0.4", "eb:theta=0.6")
"""Policies whose rule never changes: the best of them in a phase is what regret is measured against."""
RATES_PER_S: Mapping[str, float] = {"rtx-pro-6000": 17.0, "h200": 33.0}
"""100 % of the day: sessions/s of 512/256 tokens that the better of v1 and eb carries (steady, 1,024 open)."""
BUDGET, SEQS = 8192, 1024
MEAN_OUTPUT = 256
_WORKLOAD = "balanced"
_NOTES = (
    "Not a table of the paper. Engine sim, asynchronous scheduling as in vLLM 0.32, balanced lengths of 512 in and 256 "
    "out where the scenario brings none, B = 8192, N = 1024, settings of every policy at their defaults.",
    "A phase lasts from its first token to that of the next. Its throughput is tokens processed per second over all of "
    "it, the time to adapt included; prompts and answers count. In the open loop arrivals set the throughput; E2EL is "
    "the mean time from a request's arrival to its end, in the phase of its arrival. TTFT is the median.",
    f"Best fixed: the best of {', '.join(FIXED)} in this phase. Regret: throughput lost, or time added, against it; "
    "below zero is better than each of them.",
    "Adapted: from the start of the phase to the last change of mode in it; in brackets the answers that ended "
    "meanwhile (EB+ decides every 100) and the number of changes.",
)


class Phase(NamedTuple):
    """One phase of one run: its recovery, and the median TTFT (ms) and mean E2EL (s) of its requests."""

    recovery: Recovery
    ttft_ms: float | None
    e2el_s: float | None

    def figure(self, scenario: str) -> float | None:
        """What a policy is judged by: tokens/s, or E2EL in s in an open loop."""
        return self.e2el_s if scenario in OPEN_LOOP else self.recovery.mean_tokens_per_s


def _cell(options: PaperOptions, device: str, model: str, scenario: str, policy: str) -> RunSpec:
    output_len = None if scenario == "prompts-to-answers" else MEAN_OUTPUT
    rate = RATES_PER_S[device] if scenario == "day-and-night" else None
    return simulated(_WORKLOAD, policy, device, model, SEQS, BUDGET, scenario, request_rate=rate, output_len=output_len)


def _devices(options: PaperOptions) -> tuple[str, ...]:
    for device in options.devices:
        if device not in RATES_PER_S:
            raise UsageError(f"adaptation knows the load of a day on {' and '.join(RATES_PER_S)}, not on {device}")
    return options.devices or tuple(GPUS)


def _compared(options: PaperOptions) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*COMPARED, *options.policies)))


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        _cell(options, device, options.model(), scenario, policy)
        for device in _devices(options)
        for scenario in SCENARIOS
        for policy in dict.fromkeys((*_compared(options), *FIXED))
    ]


def _phases(run: Run) -> Mapping[str, Phase]:
    metrics = {summary.phase: summary.metrics for summary in summarise_phases(run)}
    phases = {}
    for recovery in recoveries(run):
        own = metrics[recovery.phase]
        e2el_s = None if own.e2el.mean is None else own.e2el.mean / 1e3
        phases[recovery.phase] = Phase(recovery, own.ttft.median, e2el_s)
    return phases


def _runs(options: PaperOptions, store: RunStore, device: str, scenario: str) -> dict[str, Mapping[str, Phase]]:
    policies = dict.fromkeys((*_compared(options), *FIXED))
    measured = {policy: store.get(_cell(options, device, options.model(), scenario, policy)) for policy in policies}
    return {policy: _phases(cell.run) for policy, cell in measured.items() if cell is not None}


def _section(options: PaperOptions, store: RunStore, device: str, scenario: str) -> Section:
    policies = _compared(options)
    unit = "E2EL s" if scenario in OPEN_LOOP else "tokens/s"
    columns = (*labels("phase"), *(Column(policy, group=unit, ours=True) for policy in policies))
    columns += (Column("policy", "label", "best fixed"), Column(unit, group="best fixed"))
    columns += tuple(Column(policy, "change", "regret", ours=True) for policy in policies)
    columns += (Column("better of v1, eb", "change", "ebplus against the", ours=True),)
    columns += tuple(Column(policy, group="TTFT ms", ours=True) for policy in policies)
    columns += (Column("ebplus", "label", "adapted", ours=True),)
    runs = _runs(options, store, device, scenario)
    rows = [_row(runs, policies, scenario, phase) for phase in runs.get("v1", {})]
    return Section(f"{scenario} on {gpu_title(device)}: {SCENARIOS[scenario]}", columns, tuple(rows))


def _row(
    runs: Mapping[str, Mapping[str, Phase]], policies: tuple[str, ...], scenario: str, phase: str
) -> tuple[Value, ...]:
    figures = {policy: phases[phase].figure(scenario) if phase in phases else None for policy, phases in runs.items()}

    def best_of(candidates: tuple[str, ...]) -> str | None:
        known = {policy: value for policy in candidates if (value := figures.get(policy)) is not None}
        return (min if scenario in OPEN_LOOP else max)(known, key=lambda policy: known[policy]) if known else None

    def regret(policy: str, than: str | None) -> float | None:
        change = relative(figures.get(policy), figures.get(than or ""))
        return change if change is None or scenario in OPEN_LOOP else 0.0 - change

    best = best_of(FIXED)
    row: list[Value] = [phase, *(figures.get(policy) for policy in policies), best, figures.get(best or "")]
    row += [regret(policy, best) for policy in policies]
    row.append(relative(figures.get("ebplus"), figures.get(best_of(("v1", "eb")) or "")))
    row += [runs[policy][phase].ttft_ms if phase in runs.get(policy, {}) else None for policy in policies]
    return (*row, _adapted(runs.get("ebplus", {}).get(phase)))


def _adapted(phase: Phase | None) -> str | None:
    if phase is None:
        return None
    controller = phase.recovery
    if not controller.switches:
        return "–"
    return f"{controller.controller_s:.1f} s ({controller.controller_requests:,}; {controller.switches})"


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = tuple(_section(options, store, device, name) for device in _devices(options) for name in SCENARIOS)
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("adaptation", "Adaptation to shifts inside a run", sections, notes)


ADAPTATION = PaperTable(
    "adaptation", "adaptation to shifts inside a run (ours)", _cells, _document, ("device", "model", "policy"),
    published_on=Published(tuple(RATES_PER_S), (MAIN_MODEL,)),
)  # fmt: skip
