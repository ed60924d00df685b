"""The steps of ``ebbench run``: check, run each policy on each plan, store, show, set the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbench.analysis.cases import (
    TESTED,
    RunResult,
    cases_of_results,
    group_by_policy,
    pairs_needed,
    result_of,
    stop_reason,
)
from ebbench.engines.base import refuse_undecided
from ebbench.engines.setup import make_engine
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.grouping import alternating
from ebbench.process.termination import held
from ebbench.records.run import NotStoredError, default_run_dir, new_directory, slug, unused
from ebbench.records.warnings import counted
from ebbench.runs import prepare
from ebbench.runs.execute import measured, planned
from ebbench.runs.file import FURTHER, as_toml
from ebbench.runs.prepare import Series, needs_saturation, parse_series
from ebbench.spec.run import stored_form
from ebbench.spec.server import VIRTUAL_TIME, is_server

if TYPE_CHECKING:
    from ebbench.analysis.summary import Summary
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine
    from ebbench.records.plan import Plan
    from ebbench.render.documents import Console
    from ebbench.runs.execute import Executed
    from ebbench.runs.prepare import Prepared
    from vllm_eb.policy import PolicySpec


UNTIL_CERTAIN = "auto"
# `--repeats`: their number, a note before the first run about what they can show, and when `auto` stops.

FEWEST, MOST = 2, 10_000
"""Least number of repeats before a decision, and the most that are run: beyond some hundred, nothing changes."""


def parse_repeats(text: str, most: int, *, policies: int) -> tuple[int, bool]:
    """Most repeats, and whether to stop when it is clear which policy is better. Raises UsageError."""
    if text.strip() == UNTIL_CERTAIN:
        if policies < 2:
            raise UsageError("--repeats auto stops when it is clear which policy is better; give two --policy or more")
        if not FEWEST <= most <= MOST:
            raise UsageError(f"--max-repeats must be at least {FEWEST} and at most {MOST:,}, not {most:,}")
        return most, True
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"--repeats takes a number or {UNTIL_CERTAIN}, not {text!r}") from None
    if not 1 <= count <= MOST:
        raise UsageError(f"--repeats must be at least 1 and at most {MOST:,}, not {count:,}")
    return count, False


def beforehand(facts: Mapping[str, Any], repeats: int, *, policies: int, until_clear: bool, virtual: bool) -> str:
    """A note before the first run about what this many repeats can show; empty if there is nothing to note.

    ``facts``: those of the plan. ``virtual``: simulated time, in which equal plans give equal figures.
    """
    if repeats < 2 or policies < 2:
        return ""
    if virtual and facts.get("loop") == "trace":
        return "A replayed trace in virtual time: every repeat gives the same figures, so one is enough."
    needed = pairs_needed(len(TESTED) * (policies - 1))
    if until_clear:
        return (
            f"Repeating until it is clear which policy is better: {needed} repeats are the fewest that can show a "
            f"difference, {repeats} the most (--max-repeats)."
        )
    if repeats < needed:
        return (
            f"{repeats} repeats cannot show a difference between {policies} policies; {needed} are the fewest that can."
        )
    return ""


def why_stop(summaries: Sequence[Summary]) -> str:
    """Why more repeats would not help; empty if they may. All policies have run each plan so far."""
    if any(not summary.valid for summary in summaries):
        return "Stopped: a run is INVALID, and more repeats do not change that."
    if all(summary.virtual and summary.load.replayed for summary in summaries):
        return "Stopped after one repeat: a replayed trace in virtual time gives the same figures every time."
    groups = group_by_policy(summaries)
    count = len(groups[0].summaries)
    if count < FEWEST:
        return ""
    return {
        "": "",
        "shown": f"Stopped after {count} repeats: it is clear.",
        "equal": f"Stopped after {count} repeats: the policies are equal to within 0.5 %.",
        "copies": f"Stopped after {count} repeats: they give the same figures, so no randomness is left.",
    }[stop_reason(groups)]


# What `ebbench run` says before its first run: the engine, the load, the repeats, whose power is measured.


def announce(series: Series, engine: Engine, sentence: str, plan: Plan, messages: Console) -> None:
    """Print these lines."""
    from ebbench.analysis.environment import time_note

    messages.say(sentence)
    for note in filter(None, (time_note(plan.facts), _at_once(plan))):
        messages.say(note)
    virtual = engine.name in VIRTUAL_TIME
    repeats_note = beforehand(
        plan.facts, series.repeats, policies=len(series.policies), until_clear=series.until_clear, virtual=virtual
    )
    if repeats_note:
        messages.say(repeats_note)
    if note := _power_note(engine):
        messages.say(note)
    if not series.policies_stated and not is_server(series.spec.engine):
        messages.say("No --policy given: running ebplus, and v1 as its baseline.")


def _power_note(engine: Engine) -> str:
    """Whose GPU power is measured, or why none is; empty for an engine in virtual time."""
    if engine.name in VIRTUAL_TIME:
        return ""
    import os

    from ebbench.client.power import announcement
    from ebbench.engines.endpoint import EndpointEngine, SendingEngine

    if not isinstance(engine, SendingEngine):
        return ""
    url = engine.url if isinstance(engine, EndpointEngine) else "http://127.0.0.1"
    return announcement(url, engine.client.power, os.environ)


def _at_once(plan: Plan) -> str:
    """A note about the effect of an infinite request rate; empty for a finite rate."""
    if not plan.facts.get("all_at_once"):
        return ""
    sessions, open_at_most = int(plan.facts["sessions"]), max(phase.max_concurrency for phase in plan.phases)
    if open_at_most < sessions:
        return f"--request-rate inf: all {sessions:,} sessions wait for one of the {open_at_most:,} open at a time"
    return (
        f"--request-rate inf: all {sessions:,} sessions are released at once, as by `vllm bench serve`; TTFT counts "
        "the wait in the server's queue (--max-concurrency limits how many are open)"
    )


@dataclass(frozen=True)
class Output:
    """Where the results of a series go, and in which form."""

    directory: Path | None = None
    save_as_vllm: Path | None = None
    all_percentiles: bool = False
    as_json: bool = False
    quiet: bool = False

    def check(self, series: Series) -> None:
        """Raise UsageError for files that exist, or that hold one run and would get several."""
        target = self.save_as_vllm
        if target is not None and series.runs > 1:
            raise UsageError("--save-as-vllm writes one run; give one --policy and no --repeats")
        if target is not None and (target.is_dir() or not target.parent.is_dir()):
            raise UsageError(f"--save-as-vllm {target}: give a file in a directory that exists")
        if target is not None and target.exists():
            raise UsageError(f"--save-as-vllm {target} exists; give another file or remove it")
        if self.directory is not None and self.directory.exists():
            raise UsageError(f"output directory {self.directory} exists; give another --output-dir or remove it")

    def run_dir(self, series: Series, spec: PolicySpec, seed: int) -> Path:
        """The directory of one run."""
        name = spec.name if series.repeats == 1 else f"{spec.name}-seed{seed}"
        if self.directory is None:
            return default_run_dir(series.spec.plan.workload, name)
        return self.directory if series.runs == 1 else unused(self.directory / slug(name))


def series_and_output(asked: Mapping[str, Any]) -> tuple[Series, Output]:
    """The series, and where it is stored, by settings of a run and the keys of FURTHER. Raises UsageError."""
    series = parse_series({name: value for name, value in asked.items() if name not in FURTHER})
    words, most = str(asked.get("repeats", "1")), int(asked.get("max_repeats", 30))
    repeats, until_clear = parse_repeats(words, most, policies=len(series.policies))
    directory, target = (asked.get(name) for name in ("output_dir", "save_as_vllm"))
    return (
        replace(series, repeats=repeats, until_clear=until_clear, price_per_hour=asked.get("price_per_hour")),
        Output(None if directory is None else Path(directory), None if target is None else Path(target)),
    )


@dataclass
class MadeRuns:
    """The runs so far, which are kept if an error or a signal ends the series. ``begun``: nothing refused the first."""

    results: list[RunResult] = field(default_factory=list)
    begun: bool = False
    interrupted: bool = False

    @property
    def summaries(self) -> list[Summary]:
        """Summaries of the runs made so far, in order."""
        return [result.summary for result in self.results]


def dry_run(series: Series, output: Output, further: Mapping[str, Any]) -> None:
    """Print what would run, and all settings as a file for ``ebbench run``; check both, and run nothing."""
    series.check()
    output.check(series)
    _, sentence = make_engine(series.spec)
    names = [spec.name for spec in series.policies]
    runs = f"{'at most ' * series.until_clear}{series.runs} run{'s' * (series.runs > 1)}: {', '.join(names)}"
    if output.as_json:
        labels = asdict(series.spec.labels)
        settings = stored_form(series.spec) | {"labels": labels, "policy": names, "repeats": series.repeats}
        sys.stdout.write(json.dumps({"engine": sentence, "settings": settings}, indent=2, default=str) + "\n")
        return
    sys.stdout.write(f"# {runs}\n# {sentence}\n" + as_toml(series.spec, {"policy": names, **further}))


def run_policies(series: Series, output: Output) -> None:
    """Check, run, store and show. Raises UsageError, RunError, InterruptedRunError."""
    from ebbench.render.documents import Console

    done = MadeRuns()
    try:
        make_runs(series, output, Console(stderr=True, highlight=False), done)
    except EbbenchError:
        if done.begun:
            _show(series, output, done)  # show the measurements before the error
        raise
    _show(series, output, done)
    _verdict(done)


def make_runs(series: Series, output: Output, messages: Console, done: MadeRuns) -> None:
    """Check, run every policy on every plan, and store: ``done`` gets the runs one by one. A signal ends it early.

    Raises UsageError, RunError; KeyboardInterrupt before the first run.
    """
    series.check()
    output.check(series)
    engine, sentence = make_engine(series.spec)
    refuse_undecided(getattr(engine, "topology", None), series.policies)
    series.check_prompts(engine)
    device = prepare.device_of(series.spec, series.policies)
    series = _saturated(series, output, engine, device, messages)
    plan = planned(series, series.spec.plan.seed, device, messages, quiet=output.quiet)
    series = series.labelled(engine)
    if not output.quiet:
        announce(series, engine, sentence, plan, messages)
    done.begun = True
    try:
        with new_directory(output.directory) if output.directory and series.runs > 1 else nullcontext():
            _repeat(series, output, plan, device, engine, messages, done)
    except KeyboardInterrupt:
        done.interrupted = True


def _repeat(
    series: Series, output: Output, plan: Plan, device: Device, engine: Engine, messages: Console, done: MadeRuns
) -> None:
    """Run every policy on the plan of each seed. Raises KeyboardInterrupt, once what was measured is in ``done``."""
    for repeat in range(series.repeats):
        if repeat:
            plan = planned(series, series.spec.plan.seed + repeat, device, messages, quiet=output.quiet)
        for spec in alternating(series.policies, repeat):
            _run_one(series, output, series.prepared(spec, plan, device, engine), messages, done)
            if done.interrupted:
                raise KeyboardInterrupt
        if series.until_clear and (reason := why_stop(done.summaries)):
            messages.say(reason, quiet=output.quiet)
            break


def _saturated(series: Series, output: Output, engine: Engine, device: Device, messages: Console) -> Series:
    """The series with the saturated rate, measured here if the scenario needs it and it was not given."""
    if not needs_saturation(series.spec.plan):
        return series
    from ebbench.sizing.saturation import with_saturation

    return with_saturation(
        series.labelled(engine), engine, device, messages, beside=output.directory, quiet=output.quiet
    )


def _run_one(series: Series, output: Output, ready: Prepared, messages: Console, done: MadeRuns) -> None:
    seed = int(ready.plan.facts.get("seed", series.spec.plan.seed))
    name = ready.policy.name
    label = name if series.repeats == 1 else f"{name} seed {seed}"
    if series.runs > 1:
        label += f", run {len(done.summaries) + 1} of {'at most ' * series.until_clear}{series.runs}"
    with held():  # what was measured is in ``done`` before a signal ends the command
        try:
            where = output.run_dir(series, ready.policy, seed)
            stored = measured(ready, where, label, messages, quiet=output.quiet)
        except NotStoredError as error:
            if error.run is not None:
                done.results.append(result_of(error.run))  # shown although it could not be stored
            raise
        _take_up(output, stored, done)


def _take_up(output: Output, stored: Executed, done: MadeRuns) -> None:
    """Keep a stored run in ``done``, and export it if that was asked for."""
    run = stored.run
    result = result_of(run, summary=stored.summary)
    done.results.append(replace(result, run=replace(run, tables={})))  # in memory only while they are needed
    if output.save_as_vllm is not None:
        from ebbench.export import save_vllm_result

        save_vllm_result(run, stored.summary, output.save_as_vllm)
    done.interrupted = run.manifest.interrupted


def in_order(series: Series, results: Sequence[RunResult]) -> list[RunResult]:
    """The runs by policy and seed: they were made in alternating order. The policy of a server is what it reports."""
    names = [spec.name for spec in series.policies]
    names += [result.summary.policy for result in results if result.summary.policy not in names]
    return sorted(results, key=lambda result: (names.index(result.summary.policy), result.summary.seed))


def _show(series: Series, output: Output, done: MadeRuns) -> None:
    results = in_order(series, done.results)
    cases = cases_of_results(results)
    if output.as_json:
        from ebbench.analysis.summary import mean_over_repeats

        names = [result.summary.policy for result in results]
        groups = sorted(
            (group for case in cases for group in case.groups),
            key=lambda group_of_case: names.index(group_of_case.policy),
        )
        rows = [
            [summary.to_dict(all_percentiles=output.all_percentiles) for summary in group.summaries] for group in groups
        ]
        merged = [row[0] if series.repeats == 1 else mean_over_repeats(row) for row in rows]
        sys.stdout.write(json.dumps(merged, indent=2, allow_nan=False) + "\n")
    elif cases:
        from ebbench.render.documents import Console
        from ebbench.render.report import print_report

        print_report(Console(highlight=False), cases, all_percentiles=output.all_percentiles)


def _verdict(done: MadeRuns) -> None:
    if done.interrupted:
        kept = f"kept {counted(len(done.summaries), 'run')}" if done.summaries else "nothing was measured yet"
        raise InterruptedRunError(f"interrupted; {kept}")
    invalid = [summary for summary in done.summaries if not summary.valid]
    if invalid:
        reasons = "; ".join(f"{summary.policy}: {', '.join(map(str, summary.reasons))}" for summary in invalid)
        raise RunError(f"INVALID run ({reasons})")
