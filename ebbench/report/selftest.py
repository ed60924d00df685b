"""The gate's self-test as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench import __version__
from ebbench.analysis.gate import self_test as gate_trials
from ebbench.analysis.gate.self_test import SelfTest, Tally


def markdown(done: SelfTest) -> str:
    """False alarms by noise, power by slow-down, and how both were measured."""
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
    ]
    return "\n".join(lines)


def _table(head: str, rows: Sequence[tuple[str, Tally]]) -> list[str]:
    lines = [f"| {head} | trials | failed | passed | inconclusive |", "|---|---:|---:|---:|---:|"]
    for name, tally in rows:
        shares = " | ".join(_share(count, tally.trials) for count in (tally.failed, tally.passed, tally.inconclusive))
        lines.append(f"| {name} | {tally.trials} | {shares} |")
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
