"""``ebbench gate``: tests whether the candidate is slower than its baseline."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import grouped, opt
from ebbench.errors import DataError, EbbenchError, RunError, UsageError
from ebbench.foreign.documents import visible

if TYPE_CHECKING:
    from ebbench.analysis.units import GateUnit
    from ebbench.analysis.verdict import Rules, Verdict

_JUDGE, _MEASURE, _OUTPUT, _OTHER = "Judging", "Measuring interleaved", "Output", "Other uses"


@dataclass(frozen=True)
class JudgeFlags:
    """What counts as a regression."""

    margin: Annotated[
        list[str] | None,
        opt("--margin", help="Loss that matters in percent: 3, or ttft:10. Repeatable. Default 3.", panel=_JUDGE),
    ] = None
    metric: Annotated[
        list[str] | None,
        opt(
            "--metric",
            help="Figure to gate: throughput, requests, tokens, goodput, or ttft, tpot, itl, e2el (medians), "
            "or one of these with -mean, -p90, -p95, -p99. Repeatable. Default throughput, ttft and tpot.",
            panel=_JUDGE,
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        opt(
            "--policy",
            "-p",
            help="Policy to judge if there are several; twice: the baseline's, then the candidate's.",
            panel=_JUDGE,
        ),
    ] = None
    alpha: Annotated[float, opt("--alpha", help="Accepted probability of a false alarm.", panel=_JUDGE)] = 0.05
    allow: Annotated[
        list[str] | None,
        opt("--allow", help="Environment key that may differ, e.g. vllm. Repeatable.", panel=_JUDGE),
    ] = None

    def rules(self, *, sequential: bool) -> Rules:
        """The rules of these options. Raises UsageError."""
        from ebbench.analysis.units import parse_figures, parse_margins
        from ebbench.analysis.verdict import GATED, Rules

        default, single = parse_margins(self.margin or ())
        gated = parse_figures(self.metric or ()) or GATED
        return Rules(default_margin=default, margin=single, alpha=self.alpha, gated=gated, sequential=sequential)

    def policies(self) -> tuple[str | None, str | None]:
        """The baseline's and the candidate's policy; None: the only one there is. Raises UsageError."""
        names = self.policy or []
        if len(names) > 2:
            raise UsageError(f"--policy may be given twice, for the baseline and for the candidate, not {len(names)}x")
        return (names[0], names[-1]) if names else (None, None)


@dataclass(frozen=True)
class MeasureFlags:
    """Pairs to measure first."""

    max_pairs: Annotated[
        int | None,
        opt(
            "--max-pairs",
            help="Measure pairs until the answer is known, so many at most; default 40. Without commands: judge the "
            "runs there by the rule that holds at every look.",
            panel=_MEASURE,
        ),
    ] = None
    pairs: Annotated[int | None, opt("--pairs", help="Measure exactly this many pairs.", panel=_MEASURE)] = None
    baseline_command: Annotated[
        str | None,
        opt("--baseline-command", help="Command with {out} and {seed}; run without a shell.", panel=_MEASURE),
    ] = None
    candidate_command: Annotated[
        str | None, opt("--candidate-command", help="The same for the candidate.", panel=_MEASURE)
    ] = None
    seed: Annotated[int, opt("--seed", help="Seed of the first pair.", panel=_MEASURE)] = 0

    @property
    def given(self) -> bool:
        """Whether pairs are to be measured."""
        return self.pairs is not None or bool(self.baseline_command or self.candidate_command)

    @property
    def sequential(self) -> bool:
        """Whether pairs are judged after each of them, which is the case unless their number is fixed."""
        return self.max_pairs is not None or (self.given and self.pairs is None)

    def check(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        if self.pairs is not None and self.max_pairs is not None:
            raise UsageError("give --pairs (exactly so many) or --max-pairs (until the answer is known), not both")
        for name, given in (("--pairs", self.pairs), ("--max-pairs", self.max_pairs)):
            if given is not None and given < 1:
                raise UsageError(f"{name} must be at least 1, not {given}")
        if self.given and (self.baseline_command is None or self.candidate_command is None):
            raise UsageError("measuring needs both --baseline-command and --candidate-command")


@dataclass(frozen=True)
class VerdictFlags:
    """Where the verdict is written in addition to the console."""

    junit: Annotated[Path | None, opt("--junit", help="Write JUnit XML.", panel=_OUTPUT)] = None
    summary: Annotated[
        Path | None,
        opt("--summary", help="Append Markdown; default: $GITHUB_STEP_SUMMARY, if set.", panel=_OUTPUT),
    ] = None
    as_json: Annotated[bool, opt("--json", help="One JSON object on stdout.", panel=_OUTPUT)] = False


@dataclass(frozen=True)
class OtherFlags:
    """Actions instead of a verdict."""

    save_baseline: Annotated[
        Path | None, opt("--save-baseline", help="Store the given runs as the baseline.", panel=_OTHER)
    ] = None
    self_test: Annotated[bool, opt("--self-test", help="Measure the gate's own error rates.", panel=_OTHER)] = False
    trials: Annotated[int, opt("--trials", help="A/A trials of the self-test.", panel=_OTHER)] = 1_000
    workers: Annotated[int | None, opt("--workers", help="Processes of the self-test.", panel=_OTHER)] = None
    report: Annotated[Path | None, opt("--report", help="Write the self-test's result as Markdown.", panel=_OTHER)] = (
        None
    )


@grouped
def gate(
    judging: JudgeFlags,
    measuring: MeasureFlags,
    output: VerdictFlags,
    other: OtherFlags,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="BASELINE CANDIDATE",
            help="Directories of runs; the baseline may be a Parquet file of --save-baseline.",
        ),
    ] = None,
) -> None:
    """Compare paired runs: exit code 0 pass, 1 regression, 5 inconclusive, 3 not comparable.

    A pair is one restart of a real engine or one seed of a simulated one; at least six are needed (a one-sided test;
    `compare` is two-sided and needs seven). Measure them with `ebbench run --repeats 6`, or let --baseline-command and
    --candidate-command do it until the verdict is known.
    """
    measuring.check()
    rules = judging.rules(sequential=measuring.sequential)
    if other.self_test:
        _self_test(rules, other)
        return
    given = paths or []
    if other.save_baseline is not None:
        _save(given, other.save_baseline)
        return
    if len(given) != 2:
        raise UsageError(f"gate needs two arguments, BASELINE and CANDIDATE, not {len(given)}")
    question = GateQuestion(given[0], given[1], rules, tuple(judging.allow or ()), judging.policies())
    try:
        if measuring.given:
            _measure(question, measuring)
        verdict = question.judged()
    except (DataError, RunError) as error:
        _tell_error(error, output)
        raise
    raise typer.Exit(_tell(verdict, output))


@dataclass(frozen=True)
class GateQuestion:
    """The two sides, what may differ between them, and the rules."""

    baseline: Path
    candidate: Path
    rules: Rules
    allow: tuple[str, ...] = ()
    policies: tuple[str | None, str | None] = (None, None)

    def judged(self, *, with_detectable: bool = True) -> Verdict:
        """The verdict on the existing runs. Raises DataError, UsageError."""
        from ebbench.analysis.environment import check_allowed
        from ebbench.analysis.units import load_units, require_separate_runs
        from ebbench.analysis.verdict import judge, left_out, pair_units
        from ebbench.gate.baselines import stored_units

        allowed = check_allowed(self.allow)
        ours, _ = self.policies
        stored = self.baseline.is_file() or self.baseline.suffix == ".parquet"
        after = load_units([self.candidate])
        before, after = self._of_policies(
            stored_units(self.baseline, after, allowed, ours) if stored else load_units([self.baseline]), after
        )
        pairs = pair_units(before, after, allowed)
        require_separate_runs(before, after)
        return judge(pairs, self.rules, with_detectable=with_detectable, further_notes=left_out(before, after))

    def check_stored(self) -> None:
        """Check the valid runs that both sides have so far. Raises DataError, UsageError if they are not comparable."""
        from ebbench.analysis.environment import check_allowed
        from ebbench.analysis.units import require_separate_runs, valid_units
        from ebbench.analysis.verdict import require_comparable
        from ebbench.records.run import MANIFEST, Run, find_runs

        allowed = check_allowed(self.allow)
        found = [find_runs([side]) if side.exists() else [] for side in (self.baseline, self.candidate)]
        sides = [valid_units([Run.load(path) for path in runs if (path / MANIFEST).exists()])[0] for runs in found]
        if all(sides):
            before, after = self._of_policies(*sides)
            require_comparable(before, after, allowed)
            require_separate_runs(before, after)

    def _of_policies(self, before: list[GateUnit], after: list[GateUnit]) -> tuple[list[GateUnit], list[GateUnit]]:
        """The units of both sides that have the policies asked for. Raises UnknownNameError if a side has none."""
        from ebbench.analysis.units import of_policy

        ours, theirs = self.policies
        return (
            before if ours is None else of_policy(before, ours, "baseline"),
            after if theirs is None else of_policy(after, theirs, "candidate"),
        )


def _measure(question: GateQuestion, wanted: MeasureFlags) -> None:
    """Measure pairs with the commands of both sides, until the verdict is known unless their number is fixed."""
    from ebbench.analysis.verdict import MAX_PAIRS, pairs_needed
    from ebbench.gate.interleave import Side, measure_pairs
    from ebbench.records.files import sole_use
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown

    rules = question.rules
    if question.baseline.resolve() == question.candidate.resolve():
        raise UsageError(f"both sides would store their runs in {question.baseline}; give each a directory of its own")
    least = pairs_needed(rules, len(rules.gated))

    most = wanted.pairs or wanted.max_pairs or MAX_PAIRS
    work = Work("gate", most, "pairs", at_most=rules.sequential)

    def tell(line: str) -> None:
        if not work.doing:
            _say(f"measuring {'at most ' * rules.sequential}{most} pairs")
        work.doing = line
        _say(line)

    def decided(pairs: int) -> bool:
        work.done = pairs
        if not rules.sequential or pairs < least:
            return False
        verdict = question.judged(with_detectable=False)
        cause = f": {verdict.cause}" if verdict.cause else ""
        goes_on = f", continuing{cause}" if verdict.outcome == "inconclusive" and pairs < most else ""
        _say(f"after {pairs} pairs: {verdict.outcome}{goes_on}")
        return verdict.outcome != "inconclusive"

    sides = (
        Side(question.baseline, wanted.baseline_command or ""),
        Side(question.candidate, wanted.candidate_command or ""),
    )
    check = question.check_stored
    with sole_use(question.baseline), sole_use(question.candidate), shown(Console(stderr=True), work):
        measure_pairs(*sides, pairs=most, first_seed=wanted.seed, say=tell, check=check, decided=decided)


def _say(line: str) -> None:
    typer.echo(visible(line), err=True)


def _tell(verdict: Verdict, wanted: VerdictFlags) -> int:
    from ebbench.gate import verdicts
    from ebbench.render.documents import Console

    if wanted.as_json:
        sys.stdout.write(json.dumps(verdicts.to_json(verdict), indent=2, allow_nan=False) + "\n")
    else:
        Console(highlight=False).print(verdicts.console(verdict))
    _write(verdicts.junit(verdict), verdicts.summary(verdict), wanted)
    return verdicts.EXIT_CODES[verdict.outcome]


def _tell_error(error: EbbenchError, wanted: VerdictFlags) -> None:
    """Write the error that prevented a verdict to the files that a CI service reads."""
    from ebbench.gate import verdicts

    _write(verdicts.junit_of_error(str(error)), verdicts.summary_of_error(str(error), error.exit_code), wanted)


def _write(junit: bytes, markdown: str, wanted: VerdictFlags) -> None:
    from ebbench.records import files

    if wanted.junit is not None:
        files.write_text(junit.decode(), wanted.junit)
    target = wanted.summary or (Path(given) if (given := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(markdown)


def _save(runs: list[Path], path: Path) -> None:
    from ebbench.analysis.units import load_units
    from ebbench.gate.baselines import save_baseline

    if not runs:
        raise UsageError("--save-baseline needs run directories")
    units = load_units(runs)
    rows = save_baseline(units, path)
    _say(f"{path}: stored {len(units)} run(s) as baseline, {rows} row(s) in all")


def _self_test(rules: Rules, wanted: OtherFlags) -> None:
    from ebbench.gate.self_test import run_self_test, run_trial
    from ebbench.gate.verdicts import self_test_page
    from ebbench.records import files
    from ebbench.runs.pool import pool_of, values

    trials, report = wanted.trials, wanted.report
    if trials < 20:
        raise UsageError(f"--trials must be at least 20, not {trials}")
    pool = pool_of(wanted.workers, trials)
    found = run_self_test(
        trials=trials,
        power_trials=max(trials // 5, 4),
        rules=rules,
        tried=lambda tasks: values(pool, run_trial, tasks),
        say=_say,
    )
    text = self_test_page(found)
    if report is not None:
        files.write_text(text, report)
        _say(f"wrote {report}")
    else:
        typer.echo(text)
