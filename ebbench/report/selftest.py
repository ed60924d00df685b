"""The gate's self-test as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ebbench import __version__
from ebbench.analysis.gate import self_test as gate_trials
from ebbench.analysis.gate.self_test import SelfTest, TrialTally


def markdown(done: SelfTest) -> str:
    """False alarms by noise and power by slow-down, both with fixed and with sequential pairs, and the method."""
    design = done.equal[0].design
    rules = design.rules
    worst = gate_trials.false_alarms(done.equal)
    lines = [
        "# The gate tried on itself",
        "",
        f"ebbench {__version__}; made by `ebbench gate --self-test --trials {done.equal[0].trials} --report FILE`.",
        "",
        f"A trial is a whole comparison: {design.pairs} pairs of simulated server restarts in ABBA order, a new plan "
        f"of {gate_trials.REQUESTS} requests in every pair, run on the simulator (rtx-pro-6000, qwen3-8b, policy v1) "
        "with disturbed step times, reduced and judged by the same code as measured runs. "
        f"Rules: margin {100 * rules.default_margin:g} %, alpha {rules.alpha:g}, Holm over the three gated figures.",
        "",
        "## False alarms: two equal sides",
        "",
        *_table("noise", [(tally.design.noise.name, tally) for tally in done.equal]),
        "",
        f"Highest share of failures: {worst:.1%} (aim: at most 5 %). The numbers in brackets are 95 % Wilson bounds.",
        "",
        "## Power: the candidate's steps made slower",
        "",
        *_table("slow-down", [(f"{tally.design.slowdown:.0%}", tally) for tally in done.slowed]),
        "",
        f"A slow-down below the margin of {100 * rules.default_margin:g} % is allowed, so a failure there is no "
        "detection that was asked for; one above it that does not fail is inconclusive far more often than passed.",
        "",
        *_sequential(done),
        *_spreads(rules.default_margin),
    ]
    return "\n".join(lines)


def _sequential(done: SelfTest) -> list[str]:
    """The same tables for pairs measured until the verdict is known."""
    most = done.equal_sequential[0].design.pairs
    worst = gate_trials.false_alarms(done.equal_sequential)
    return [
        "## Pairs until the answer is known",
        "",
        f"As `--max-pairs {most}` measures them: judged after every pair from the sixth on, by p-values and bounds "
        "that hold at every look (ebbench/analysis/sequential.py). Pairs: median, in brackets the 90th percentile.",
        "",
        *_table("two equal sides", [(t.design.noise.name, t) for t in done.equal_sequential], pairs=True),
        "",
        f"Highest share of failures: {worst:.1%} (aim: at most 5 %).",
        "",
        *_table("slow-down", [(f"{t.design.slowdown:.0%}", t) for t in done.slowed_sequential], pairs=True),
        "",
    ]


RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def _spreads(margin: float) -> list[str]:
    """Number of pairs by the spread between pairs, for machines with other noise."""
    rows = [
        f"| {ratio:g} | {_count(median)} | {_count(upper)} |"
        for ratio, median, upper in gate_trials.pairs_by_spread(RATIOS, margin=margin)
    ]
    return [
        "## Pairs by the spread between them",
        "",
        f"How many pairs equal sides take to pass for one figure, by the standard deviation of the pairs' losses over "
        f"the margin (drawn from a normal distribution; margin {100 * margin:g} %).",
        "",
        "| spread over margin | pairs, median | pairs, 90th percentile |",
        "|---:|---:|---:|",
        *rows,
        "",
    ]


def _count(pairs: float) -> str:
    return "more than 200" if math.isinf(pairs) else f"{pairs:g}"


def _table(head: str, rows: Sequence[tuple[str, TrialTally]], *, pairs: bool = False) -> list[str]:
    lines = [
        f"| {head} | trials | failed | passed | inconclusive |" + (" pairs |" if pairs else ""),
        "|---|---:|---:|---:|---:|" + ("---:|" if pairs else ""),
    ]
    for name, tally in rows:
        shares = " | ".join(_share(count, tally.trials) for count in (tally.failed, tally.passed, tally.inconclusive))
        taken = [int(count) for count in np.quantile(tally.pairs, (0.5, 0.9), method="higher")] if pairs else []
        lines.append(f"| {name} | {tally.trials} | {shares} |" + (f" {taken[0]} ({taken[1]}) |" if pairs else ""))
    return lines


def _share(count: int, trials: int) -> str:
    low, high = wilson(count, trials)
    return f"{count / trials:.1%} ({low:.1%}–{high:.1%})"


def wilson(count: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % confidence bounds of a share (Wilson's score interval)."""
    share = count / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return max(0.0, centre - reach), min(1.0, centre + reach)
