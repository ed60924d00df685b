"""``ebbench gate``: has the candidate become slower than its baseline?"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import grouped, opt
from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.analysis.gate.verdict import Rules, Verdict

_JUDGE, _MEASURE, _OUTPUT, _OTHER = "Judging", "Measuring interleaved", "Output", "Other uses"


@dataclass(frozen=True)
class JudgeFlags:
    """What counts as a regression."""

    margin: Annotated[
        list[str] | None,
        opt("--margin", help="Loss that matters, percent: 3, or ttft:10. Repeatable. Default 3.", panel=_JUDGE),
    ] = None
    alpha: Annotated[float, opt("--alpha", help="False alarms accepted, as a share.", panel=_JUDGE)] = 0.05
    allow: Annotated[
        list[str] | None,
        opt("--allow", help="Environment key that may differ, e.g. vllm. Repeatable.", panel=_JUDGE),
    ] = None

    def rules(self) -> Rules:
        """Raises UsageError."""
        from ebbench.analysis.gate.margins import parse_margins
        from ebbench.analysis.gate.verdict import Rules

        default, single = parse_margins(self.margin or ())
        return Rules(default_margin=default, margin=single, alpha=self.alpha)


@dataclass(frozen=True)
class MeasureFlags:
    """Pairs to measure first."""

    pairs: Annotated[int | None, opt("--pairs", help="Measure so many pairs first, in ABBA order.", panel=_MEASURE)] = (
        None
    )
    baseline_command: Annotated[
        str | None,
        opt("--baseline-command", help="Command with {out} and {seed}; run without a shell.", panel=_MEASURE),
    ] = None
    candidate_command: Annotated[
        str | None, opt("--candidate-command", help="Likewise, for the candidate.", panel=_MEASURE)
    ] = None
    seed: Annotated[int, opt("--seed", help="Seed of the first pair.", panel=_MEASURE)] = 0

    @property
    def given(self) -> bool:
        """Whether anything is to be measured."""
        return self.pairs is not None or bool(self.baseline_command or self.candidate_command)


@dataclass(frozen=True)
class OutputFlags:
    """Where the verdict goes besides the console."""

    junit: Annotated[Path | None, opt("--junit", help="Write JUnit XML.", panel=_OUTPUT)] = None
    summary: Annotated[
        Path | None,
        opt("--summary", help="Append Markdown; default: $GITHUB_STEP_SUMMARY where set.", panel=_OUTPUT),
    ] = None
    as_json: Annotated[bool, opt("--json", help="One JSON object on stdout.", panel=_OUTPUT)] = False


@dataclass(frozen=True)
class OtherFlags:
    """What is done instead of judging."""

    save_baseline: Annotated[
        Path | None, opt("--save-baseline", help="Store the runs named as the baseline.", panel=_OTHER)
    ] = None
    self_test: Annotated[
        bool, opt("--self-test", help="Measure the gate's own false alarms and power.", panel=_OTHER)
    ] = False
    trials: Annotated[int, opt("--trials", help="A/A trials of the self-test.", panel=_OTHER)] = 1_000
    workers: Annotated[int | None, opt("--workers", help="Processes of the self-test.", panel=_OTHER)] = None
    report: Annotated[Path | None, opt("--report", help="Write the self-test as Markdown.", panel=_OTHER)] = None


@grouped
def gate(
    judging: JudgeFlags,
    measuring: MeasureFlags,
    output: OutputFlags,
    other: OtherFlags,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="BASELINE CANDIDATE",
            help="Directories of runs; the baseline may be a Parquet file of --save-baseline.",
        ),
    ] = None,
) -> None:
    """Judge paired runs: exit 0 pass, 1 regression, 5 inconclusive, 3 not comparable.

    A pair is one restart of a real engine or one seed of a simulated one; at least six are needed. Measure them
    with `ebbench run --repeats 6`, or let --pairs do it.
    """
    rules = judging.rules()
    if other.self_test:
        _self_test(rules, other)
        return
    given = paths or []
    if other.save_baseline is not None:
        _save(given, other.save_baseline)
        return
    if len(given) != 2:
        raise UsageError(f"gate needs two arguments, BASELINE and CANDIDATE, not {len(given)}")
    baseline, candidate = given
    if measuring.given:
        _measure(baseline, candidate, measuring)
    verdict = _judge(baseline, candidate, rules, judging.allow or [])
    raise typer.Exit(_tell(verdict, output))


def _judge(baseline: Path, candidate: Path, rules: Rules, allow: list[str]) -> Verdict:
    from ebbench.analysis.environment import check_allowed
    from ebbench.analysis.gate.baselines import stored_units
    from ebbench.analysis.gate.units import load_units
    from ebbench.analysis.gate.verdict import judge, pair_units

    allowed = check_allowed(allow)
    after = load_units([candidate])
    stored = baseline.is_file() or baseline.suffix == ".parquet"
    before = stored_units(baseline, after, allowed) if stored else load_units([baseline])
    return judge(pair_units(before, after, allowed), rules)


def _measure(baseline: Path, candidate: Path, wanted: MeasureFlags) -> None:
    from ebbench.analysis.gate.interleave import Side, measure_pairs

    if wanted.pairs is None or wanted.baseline_command is None or wanted.candidate_command is None:
        raise UsageError("measuring needs all of --pairs, --baseline-command and --candidate-command")
    sides = Side(baseline, wanted.baseline_command), Side(candidate, wanted.candidate_command)
    measure_pairs(*sides, pairs=wanted.pairs, first_seed=wanted.seed, say=_say)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _tell(verdict: Verdict, wanted: OutputFlags) -> int:
    from rich.console import Console

    from ebbench.records import files
    from ebbench.report import verdicts

    if wanted.as_json:
        sys.stdout.write(json.dumps(verdicts.to_json(verdict), indent=2, allow_nan=False) + "\n")
    else:
        Console(highlight=False).print(verdicts.console(verdict))
    if wanted.junit is not None:
        files.write_bytes(verdicts.junit(verdict), wanted.junit)
    target = wanted.summary or (Path(given) if (given := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if target is not None:
        with target.open("a", encoding="utf-8") as file:
            file.write(verdicts.markdown(verdict))
    return verdicts.EXIT_CODES[verdict.outcome]


def _save(runs: list[Path], path: Path) -> None:
    from ebbench.analysis.gate.baselines import save_baseline
    from ebbench.analysis.gate.units import load_units

    if not runs:
        raise UsageError("--save-baseline needs the runs to store")
    units = load_units(runs)
    rows = save_baseline(units, path)
    _say(f"{path}: stored {len(units)} run(s) as baseline, {rows} row(s) in all")


def _self_test(rules: Rules, wanted: OtherFlags) -> None:
    from ebbench.analysis.gate.self_test import run_self_test
    from ebbench.report.selftest import markdown

    trials, report = wanted.trials, wanted.report
    if trials < 20:
        raise UsageError(f"--trials must be at least 20, not {trials}")
    workers = wanted.workers or os.cpu_count() or 1
    text = markdown(run_self_test(trials=trials, power_trials=max(trials // 5, 4), rules=rules, workers=workers))
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text, encoding="utf-8")
        _say(f"wrote {report}")
    else:
        typer.echo(text)
