"""``ebbench gate``: tests whether the candidate is slower than its baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import under
from ebbench.errors import UsageError
from ebbench.runs.stored import runs_meant

judging, measuring, output, other = map(under, ("Judging", "Measuring interleaved", "Output", "Other uses"))
_METRICS = (
    "Figure to gate: throughput, requests, tokens, goodput, tokens-per-step, or ttft, tpot, itl, e2el (medians), or "
    "one of these with -mean, -p90, -p95, -p99. Repeatable. Default throughput, ttft and tpot."
)
_MAX_PAIRS = (
    "Measure pairs until the answer is known, so many at most; default 40. Without commands: judge the runs there by "
    "the rule that holds at every look."
)
_POLICY = "Policy to judge if there are several; twice: the baseline's, then the candidate's."

Sides = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="BASELINE CANDIDATE",
        help="Directories, or --name, of runs; the baseline may be a Parquet file of --save-baseline.",
    ),
]


def gate(
    margin: Annotated[
        list[str] | None, judging(help="Loss that matters in percent: 3, or ttft:10. Repeatable. Default 3.")
    ] = None,
    metric: Annotated[list[str] | None, judging(help=_METRICS)] = None,
    policy: Annotated[list[str] | None, judging("--policy", "-p", help=_POLICY)] = None,
    alpha: Annotated[float, judging(help="Accepted probability of a false alarm.")] = 0.05,
    allow: Annotated[list[str] | None, judging(help="Environment key that may differ, e.g. vllm. Repeatable.")] = None,
    max_pairs: Annotated[int | None, measuring(help=_MAX_PAIRS)] = None,
    pairs: Annotated[int | None, measuring(help="Measure exactly this many pairs.")] = None,
    baseline_command: Annotated[
        str | None, measuring(help="Command with {out} and {seed}; run without a shell.")
    ] = None,
    candidate_command: Annotated[str | None, measuring(help="The same for the candidate.")] = None,
    seed: Annotated[int, measuring(help="Seed of the first pair.")] = 0,
    junit: Annotated[Path | None, output(help="Write JUnit XML.")] = None,
    summary: Annotated[Path | None, output(help="Append Markdown; default: $GITHUB_STEP_SUMMARY, if set.")] = None,
    as_json: Annotated[bool, output("--json", help="One JSON object on stdout.")] = False,
    save_baseline: Annotated[Path | None, other(help="Store the given runs as the baseline.")] = None,
    self_test: Annotated[bool, other("--self-test", help="Measure the gate's own error rates.")] = False,
    trials: Annotated[int, other(help="A/A trials of the self-test.")] = 1_000,
    workers: Annotated[int | None, other(help="Processes of the self-test.")] = None,
    report: Annotated[Path | None, other(help="Write the self-test's result as Markdown.")] = None,
    paths: Sides = None,
) -> None:
    """Compare paired runs: exit code 0 pass, 1 regression, 5 inconclusive, 3 not comparable.

    A pair is one restart of a real engine or one seed of a simulated one; at least six are needed (a one-sided test;
    `compare` is two-sided and needs seven). Measure them with `ebbench run --repeats 6`, or let --baseline-command and
    --candidate-command do it until the verdict is known.
    """
    from ebbench.analysis.units import parse_figures, parse_margins
    from ebbench.analysis.verdict import GATED, Rules
    from ebbench.gate import baselines, interleave, verdicts
    from ebbench.gate.self_test import tried_in_parallel
    from ebbench.render.documents import Console

    messages = Console(stderr=True, highlight=False)
    wanted = interleave.PairsWanted(pairs, max_pairs, baseline_command, candidate_command, seed)
    default, single = parse_margins(margin or ())
    rules = Rules(default, single, alpha, gated=parse_figures(metric or ()) or GATED, sequential=wanted.sequential)
    given = paths or []
    if self_test:
        verdicts.write_self_test(tried_in_parallel(trials, workers, rules, messages.say), report, messages)
        return
    if save_baseline is not None:
        messages.say(baselines.save_runs(runs_meant(given), save_baseline))
        return
    if len(given) != 2:
        raise UsageError(f"gate needs two arguments, BASELINE and CANDIDATE, not {len(given)}")
    policies = interleave.policies_of_sides(policy or ())
    sides = interleave.GateSides(given[0], given[1], rules, tuple(allow or ()), policies, messages.say)
    files = verdicts.VerdictFiles(junit, summary)
    verdict = interleave.measured_and_judged(sides, wanted, files, messages)
    verdicts.show(verdict, as_json=as_json)
    files.write(verdict)
    raise typer.Exit(verdicts.EXIT_CODES[verdict.outcome])
