"""``ebbench gate``: has the candidate become slower than its baseline?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import opt
from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.analysis.gate import Rules, Verdict

_JUDGE, _MEASURE, _OUTPUT, _OTHER = "Judging", "Measuring interleaved", "Output", "Other uses"


def gate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="BASELINE CANDIDATE",
            help="Directories of runs; the baseline may be a Parquet file of --save-baseline.",
        ),
    ] = None,
    margin: Annotated[
        list[str] | None,
        opt("--margin", help="Loss that matters, percent: 3, or ttft:10. Repeatable. Default 3.", panel=_JUDGE),
    ] = None,
    alpha: Annotated[float, opt("--alpha", help="False alarms accepted, as a share.", panel=_JUDGE)] = 0.05,
    allow: Annotated[
        list[str] | None,
        opt("--allow", help="Environment key that may differ, e.g. vllm. Repeatable.", panel=_JUDGE),
    ] = None,
    pairs: Annotated[
        int | None, opt("--pairs", help="Measure so many pairs first, in ABBA order.", panel=_MEASURE)
    ] = None,
    baseline_command: Annotated[
        str | None,
        opt("--baseline-command", help="Command with {out} and {seed}; run without a shell.", panel=_MEASURE),
    ] = None,
    candidate_command: Annotated[
        str | None, opt("--candidate-command", help="Likewise, for the candidate.", panel=_MEASURE)
    ] = None,
    seed: Annotated[int, opt("--seed", help="Seed of the first pair.", panel=_MEASURE)] = 0,
    junit: Annotated[Path | None, opt("--junit", help="Write JUnit XML.", panel=_OUTPUT)] = None,
    summary: Annotated[
        Path | None,
        opt("--summary", help="Append Markdown; default: $GITHUB_STEP_SUMMARY where set.", panel=_OUTPUT),
    ] = None,
    as_json: Annotated[bool, opt("--json", help="One JSON object on stdout.", panel=_OUTPUT)] = False,
    save_baseline: Annotated[
        Path | None, opt("--save-baseline", help="Store the runs named as the baseline.", panel=_OTHER)
    ] = None,
    self_test: Annotated[
        bool, opt("--self-test", help="Measure the gate's own false alarms and power.", panel=_OTHER)
    ] = False,
    trials: Annotated[int, opt("--trials", help="A/A trials of the self-test.", panel=_OTHER)] = 1_000,
    workers: Annotated[int | None, opt("--workers", help="Processes of the self-test.", panel=_OTHER)] = None,
    report: Annotated[Path | None, opt("--report", help="Write the self-test as Markdown.", panel=_OTHER)] = None,
) -> None:
    """Judge paired runs: exit 0 pass, 1 regression, 5 inconclusive, 3 not comparable.

    A pair is one restart of a real engine or one seed of a simulated one; at least six are needed. Measure them
    with `ebbench run --repeats 6`, or let --pairs do it.
    """
    rules = _rules(margin or (), alpha)
    if self_test:
        _self_test(rules, trials, workers, report)
        return
    given = paths or []
    if save_baseline is not None:
        _save(given, save_baseline)
        return
    if len(given) != 2:
        raise UsageError(f"gate needs two arguments, BASELINE and CANDIDATE, not {len(given)}")
    baseline, candidate = given
    if pairs is not None or baseline_command or candidate_command:
        _measure(baseline, candidate, pairs, baseline_command, candidate_command, seed)
    verdict = _judge(baseline, candidate, rules, allow or ())
    raise typer.Exit(_tell(verdict, junit, summary, as_json=as_json))


def _judge(baseline: Path, candidate: Path, rules: Rules, allow: tuple[str, ...] | list[str]) -> Verdict:
    from ebbench.analysis.gate import judge, pair_units
    from ebbench.analysis.gate_store import stored_units
    from ebbench.analysis.gate_units import check_allowed, load_units

    allowed = check_allowed(allow)
    after = load_units([candidate])
    before = stored_units(baseline, after[0], allowed) if baseline.suffix == ".parquet" else load_units([baseline])
    return judge(pair_units(before, after, allowed), rules)


def _rules(margins: list[str] | tuple[()], alpha: float) -> Rules:
    from ebbench.analysis.gate import Rules
    from ebbench.analysis.gate_margins import parse_margins

    default, single = parse_margins(margins)
    return Rules(default_margin=default, margin=single, alpha=alpha)


def _measure(
    baseline: Path, candidate: Path, pairs: int | None, before: str | None, after: str | None, seed: int
) -> None:
    from ebbench.sweep.interleave import Side, measure_pairs

    if pairs is None or before is None or after is None:
        raise UsageError("measuring needs all of --pairs, --baseline-command and --candidate-command")
    measure_pairs(Side(baseline, before), Side(candidate, after), pairs=pairs, first_seed=seed, say=_say)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _tell(verdict: Verdict, junit: Path | None, summary: Path | None, *, as_json: bool) -> int:
    from rich.console import Console

    from ebbench.records import files
    from ebbench.report import verdicts

    if as_json:
        sys.stdout.write(json.dumps(verdicts.to_json(verdict), indent=2, allow_nan=False) + "\n")
    else:
        Console(highlight=False).print(verdicts.console(verdict))
    if junit is not None:
        files.write_bytes(verdicts.junit(verdict), junit)
    target = summary or (Path(given) if (given := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if target is not None:
        with target.open("a", encoding="utf-8") as file:
            file.write(verdicts.markdown(verdict))
    return verdicts.EXIT_CODES[verdict.outcome]


def _save(runs: list[Path], path: Path) -> None:
    from ebbench.analysis.gate_store import save_baseline
    from ebbench.analysis.gate_units import load_units

    if not runs:
        raise UsageError("--save-baseline needs the runs to store")
    units = load_units(runs)
    rows = save_baseline(units, path)
    _say(f"{path}: stored {len(units)} run(s) as baseline, {rows} row(s) in all")


def _self_test(rules: Rules, trials: int, workers: int | None, report: Path | None) -> None:
    from ebbench.analysis.gate_trials import run_self_test
    from ebbench.report.selftest import markdown

    if trials < 20:
        raise UsageError(f"--trials must be at least 20, not {trials}")
    done = run_self_test(
        trials=trials, power_trials=max(trials // 5, 4), rules=rules, workers=workers or os.cpu_count() or 1
    )
    text = markdown(done)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text, encoding="utf-8")
        _say(f"wrote {report}")
    else:
        typer.echo(text)
