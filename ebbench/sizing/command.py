"""The steps of ``ebbench capacity``: check, search for each policy, store probes, show."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ebbench.analysis.metrics import refuse_unknown_classes
from ebbench.engines.base import Engine, check_counts, refuse_undecided
from ebbench.engines.setup import make_engine, refuse_limits_on_tokens
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.records import files
from ebbench.records.files import sole_use
from ebbench.records.run import MANIFEST, SEARCH, Run, default_run_dir
from ebbench.render import figures
from ebbench.render.documents import Console, section_tables
from ebbench.render.report import notes
from ebbench.runs.prepare import Series, device_of, parse_series
from ebbench.runs.stored import shrink
from ebbench.sizing import chart, sentences
from ebbench.sizing.drive import SearchBudget, SearchConfig, SearchOutcome, search_capacity
from ebbench.sizing.limits import LatencyLimits, limits_of
from ebbench.sizing.probe import MEMORY_FULL, memory_full
from ebbench.sizing.prober import Pace, RunProber, one_server
from ebbench.spec.commands import SearchCommand, asked_of
from ebbench.spec.run import stored_form
from ebbench.spec.server import VIRTUAL_TIME
from ebbench.workloads.log_report import poisson_instead
from ebbench.workloads.mixture import check_workload, class_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbench.devices.base import Device
    from ebbench.sizing.estimate import Estimate
    from ebbench.sizing.probe import ProbeReading

_LONGEST = {"virtual": 16, "real": 4}
"""A probe gets at most this many times its least number of sessions."""
_FEWEST = {"virtual": 4000, "real": 300}
_PROBE_S = {"virtual": 0.0, "real": 30.0}
"""Least sessions per probe, and least duration of their arrivals: a server in real time costs minutes."""
_COARSE = {"virtual": 1.0, "real": 1 / 3}
"""Share of both for probes that only have to tell on which side of the capacity their load is."""


@dataclass(frozen=True)
class CapacitySearch:
    """The highest load of each policy of ``series`` within ``limits``. ``arrivals_given``: they were asked for."""

    series: Series
    limits: LatencyLimits
    by_concurrency: bool = False
    precision: float = 0.02
    max_probes: int = 40
    max_time_s: float | None = None
    arrivals_given: bool = False

    @property
    def scenario(self) -> str:
        """Arrivals of an open loop."""
        return self.series.spec.plan.scenario or "poisson"

    @property
    def notes(self) -> list[str]:
        """A note for all probes if their arrivals are not the workload's own although no others were asked for."""
        if self.by_concurrency or self.arrivals_given:
            return []
        plan = self.series.spec.plan
        return [note for note in [poisson_instead(plan.workload, vars(plan))] if note]

    def check(self) -> None:
        """Raise UsageError for settings that contradict each other, before anything is announced."""
        if self.by_concurrency and self.arrivals_given:
            raise UsageError("--by concurrency is a closed loop: leave out --scenario and --burstiness")
        check_counts(max_probes=self.max_probes)
        if not 0 < self.precision < 0.5:
            raise UsageError(f"--precision is a share between 0 and 0.5, such as 0.02, not {self.precision:g}")
        if self.max_time_s is not None and not self.max_time_s > 0:
            raise UsageError(f"--max-time must be positive, not {self.max_time_s:g}")
        check_workload(self.series.spec.plan.workload)
        if self.limits.named:
            refuse_unknown_classes(self.limits.named, class_names(self.series.spec.plan))
        self.series.check()


@dataclass
class Searched:
    """What a search has found so far, by policy; kept if an error or a signal ends it.

    ``folder``: of its results, "." before it is made.
    """

    search: CapacitySearch
    outcomes: dict[str, SearchOutcome] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One object per policy, as ``--json`` gives them."""
        return sentences.outcome_rows(self.outcomes, self.search.by_concurrency, self.search.limits, self.search.notes)

    def store(self) -> None:
        """Write the results into the directory of the search."""
        if self.outcomes:
            sentences.store(self.rows, self.folder)


def capacity_search(asked: Mapping[str, Any]) -> CapacitySearch:
    """The search with these settings of a run and of :class:`SearchCommand`, by name. Raises UsageError."""
    own, settings = asked_of(SearchCommand, asked)
    if own.by not in ("rate", "concurrency"):
        raise UsageError(f"--by is rate or concurrency, not {own.by!r}")
    limits = limits_of(own, str(settings["workload"]))
    arrivals = own.scenario or ("gamma" if "burstiness" in settings else "poisson")
    series = parse_series({**settings, "scenario": arrivals})
    limits_ms = " ".join(f"{metric}:{limit_ms!r}" for metric, limit_ms in limits.slo.limits().items())
    return CapacitySearch(
        replace(series, spec=series.spec.changed(redraw=True, goodput=limits_ms)),
        limits,
        by_concurrency=own.by == "concurrency",
        precision=own.precision,
        max_probes=own.max_probes,
        max_time_s=own.max_time,
        arrivals_given=own.scenario is not None or "burstiness" in settings,
    )


def search_all(
    search: CapacitySearch, directory: Path | None, plot: Path | None = None, *, as_json: bool, quiet: bool
) -> None:
    """Search for every policy, store and show the results. Raises UsageError, RunError, InterruptedRunError."""
    if plot is not None:
        figures.check_plot(plot)
    done = Searched(search)
    try:
        find_capacity(done, directory, Console(stderr=True, highlight=False), quiet=quiet)
    except InterruptedRunError:
        _show(done, plot, as_json=as_json)
        raise
    except EbbenchError:
        done.outcomes = {name: outcome for name, outcome in done.outcomes.items() if outcome.readings}
        if done.outcomes:
            _show(done, plot, as_json=False)
        raise
    refuse_nothing(done.outcomes)
    _show(done, plot, as_json=as_json)


def find_capacity(done: Searched, directory: Path | None, messages: Console, *, quiet: bool) -> None:
    """Search for every policy, with the probes in ``directory``; ``done`` gets the results one by one.

    Raises UsageError, RunError, InterruptedRunError.
    """
    search, spec = done.search, done.search.series.spec
    search.check()
    engine, sentence = make_engine(spec)
    named = (name for requirement in search.limits.requirements() for name in requirement.name.split())
    refuse_limits_on_tokens(spec.client, named)
    refuse_undecided(getattr(engine, "topology", None), search.series.policies)
    search.series.check_prompts(engine)
    device, labelled = device_of(spec, search.series.policies), search.series.labelled(engine)
    done.folder = _folder(search, directory)
    with sole_use(done.folder):
        messages.say(sentence, quiet=quiet)
        messages.say(sentences.announce(search.limits, search.by_concurrency), quiet=quiet)
        _search_all(done, labelled, engine, device, messages, quiet=quiet)
        shrink_probes(done.folder, [outcome.nearest.run_dir for outcome in done.outcomes.values()])


def shrink_probes(folder: Path, nearest: Sequence[str]) -> int:
    """Keep of a search's simulated probes what it reads of them, and those nearest to capacity whole.

    Returns the bytes that this frees.
    """
    whole = {Path(run_dir).name for run_dir in nearest}
    probes = [path.parent for path in folder.rglob(f"*-seed*/{MANIFEST}")] if whole else []
    return sum(
        shrink(probe, {MEMORY_FULL: memory_full(Run.load(probe))}) for probe in probes if probe.name not in whole
    )


def prune_probes(folders: Sequence[Path]) -> str:
    """:func:`shrink_probes` of stored searches, not of unfinished ones; says what that freed.

    Raises UsageError if a command works on one.
    """
    freed = 0
    for folder in folders:
        with sole_use(folder):
            freed += shrink_probes(folder, [str(row["nearest_run_dir"]) for row in sentences.load(folder)])
    return f"freed {freed / 1e6:.1f} MB of the probes of {len(folders)} searches"


def _search_all(
    done: Searched, series: Series, engine: Engine, device: Device, messages: Console, *, quiet: bool
) -> None:
    search, begun = done.search, time.monotonic()
    try:
        pace = Pace()
        for index, policy in enumerate(series.policies):
            pace.policies_left, pace.left = len(series.policies) - index - 1, 0
            prober = RunProber(
                replace(series, policies=(policy,)), search.scenario, search.by_concurrency, device, engine, messages,
                done.folder, quiet=quiet, pace=pace,
            )  # fmt: skip
            budget = _budget(search, begun, len(series.policies) - index)
            with one_server(prober) as kept:
                done.outcomes[policy.name] = _search(search, kept, budget, messages)
    except KeyboardInterrupt:
        where = f"probes are kept in {done.folder}, continue with the same command and --output-dir {done.folder}"
        raise InterruptedRunError(f"interrupted; {where}") from None


def _budget(search: CapacitySearch, begun: float, policies_left: int) -> SearchBudget:
    """An equal share of the remaining time for each policy that is still to be searched."""
    if search.max_time_s is None:
        return SearchBudget(search.max_probes)
    now = time.monotonic()
    left_s = max(0.0, search.max_time_s - (now - begun))
    return SearchBudget(search.max_probes, left_s / policies_left, named_s=search.max_time_s, begun=now)


def refuse_nothing(outcome_by_policy: Mapping[str, SearchOutcome]) -> None:
    """Raise UsageError if no policy can meet the limits, RunError if no probe of any policy was usable."""
    outcomes = list(outcome_by_policy.values())
    refused = [outcome.refused for outcome in outcomes if outcome.refused is not None]
    if len(refused) == len(outcomes):
        raise UsageError("; ".join(dict.fromkeys(reason.worded(sentences.ENDS) for reason in refused)))
    if not any(outcome.decided for outcome in outcomes):
        stopped = next((outcome.stopped for outcome in outcomes if outcome.stopped), None)
        raise RunError(sentences.nothing_usable(stopped, probed=any(outcome.readings for outcome in outcomes)))


def _folder(search: CapacitySearch, directory: Path | None) -> Path:
    """Directory of the probes: a new one, or that of an earlier search with the same settings."""
    spec = search.series.spec
    settings = {
        "limits": str(search.limits), "by": "concurrency" if search.by_concurrency else "rate",
        "run": {name: value for name, value in stored_form(spec).items() if name not in ("policy", "weight")},
    }  # fmt: skip
    text = json.dumps(settings, indent=1, sort_keys=True, default=str).encode() + b"\n"
    folder = directory or default_run_dir(spec.plan.workload, "capacity")
    stored = folder / SEARCH
    if stored.exists():
        if stored.read_bytes() != text:
            raise UsageError(f"{folder} holds a search with other settings; give another --output-dir")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"output directory {folder} exists and holds no search; give another --output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_bytes(text, stored)
    return folder


def _search(search: CapacitySearch, prober: RunProber, budget: SearchBudget, messages: Console) -> SearchOutcome:
    kind = "virtual" if prober.engine.name in VIRTUAL_TIME else "real"
    plan = search.series.spec.plan
    config = SearchConfig(
        limits=search.limits,
        by_concurrency=search.by_concurrency,
        sessions=plan.num_prompts or _FEWEST[kind],
        seconds=0.0 if plan.num_prompts else _PROBE_S[kind],
        precision=search.precision,
        seed=plan.seed,
        real_time=kind == "real",
        longest=_LONGEST[kind],
        coarse=1.0 if plan.num_prompts else _COARSE[kind],
    )

    def seen(reading: ProbeReading, estimate: Estimate) -> None:
        if not prober.quiet:
            line = sentences.progress(prober.spec.name, reading, estimate, search.by_concurrency)
            messages.say(line)

    if kind == "real" and not prober.quiet:
        line = f"{prober.spec.name}: first {config.alone} sessions one at a time, which shows what can be had at best"
        messages.say(line)
    return search_capacity(config, prober, budget, prober.earlier(), seen, prober.pace.ahead)


def _show(done: Searched, plot: Path | None, *, as_json: bool) -> None:
    """Store the results beside the probes, then print or draw them."""
    rows = done.rows
    done.store()
    if plot is not None and rows:
        figures.save_plot(chart.curves(rows), plot)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, allow_nan=False) + "\n")
    elif done.outcomes:
        console = Console(highlight=False)
        for part in parts(done, console.width):
            console.print(part, markup=False, soft_wrap=isinstance(part, str))


def parts(done: Searched, width: int) -> list[RenderableType]:
    """The results for a terminal of ``width`` characters: table, curves, remarks, caveats."""
    search, outcomes = done.search, done.outcomes
    caveats = [*search.notes, *sentences.caveats(outcomes, search.by_concurrency)]
    by_class = sentences.classes(outcomes, search.by_concurrency)
    return [
        *section_tables(sentences.table(outcomes, search.by_concurrency), width),
        *([Text(), *section_tables(by_class, width)] if by_class is not None else ()),
        *sentences.remarks(outcomes, search.limits, search.by_concurrency),
        *notes("Keep in mind", caveats),
    ]
