"""Advice in plain words: lines of text, no markup."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ebbench.render.numbers import change, count, duration_ms, percent, rate

if TYPE_CHECKING:
    from ebbench.analysis.advise_answer import Advice, Probe, Score
    from ebbench.analysis.statistics import Interval

FAR_APART = 0.1
"""From this difference of the two gains on, as a share, a reader is told why they differ."""


def headline(advice: Advice) -> list[str]:
    """What to run and what it brings."""
    chosen, question = advice.chosen, advice.question
    lines = [f"Run {chosen.policy}: {advice.reason}."]
    if chosen.gain is not None and chosen.policy != "v1":
        what = "requests/s within the SLO" if question.slo else "tokens/s"
        lines.append(f"Expected: {interval(chosen.gain, question.seeds)} {what} over v1.")
    if chosen.attainment is not None:
        lines.append(f"{percent(chosen.attainment)} of the requests meet {question.slo} (ms).")
    lines.append(
        f"Expect about {rate(chosen.tokens_per_s)} tokens/s, median TTFT {duration_ms(chosen.ttft_ms)}, median TPOT "
        f"{duration_ms(chosen.tpot_ms)}."
    )
    return lines


def parameters(advice: Advice) -> list[str]:
    """Settings of the server and what the controller will arrive at."""
    question, theory = advice.question, advice.theory
    lines = [
        f"Server: --max-num-seqs {question.max_num_seqs} --max-num-batched-tokens {question.max_num_batched_tokens}",
    ]
    found = advice.tuning
    if found is not None:
        lines.append(
            f"Of {found.tried} settings tried with {advice.chosen.policy}, --max-num-seqs {found.max_num_seqs} "
            f"--max-num-batched-tokens {found.max_num_batched_tokens} is best: {change(found.gain)} over the above "
            "(one seed)."
        )
    if advice.chosen.policy.partition(":")[0] in ("eb", "ebplus"):
        lines.append(
            "The controller sets k and N itself; for this workload theory gives "
            f"theta* = {theory.threshold.theta_star:.3f}, N* = {theory.n_star:,} and k* = {theory.k_star:,} idle slots "
            "before a refill."
        )
    return lines


def theory_lines(advice: Advice) -> list[str]:
    """Both sides of the crossover, and where they meet."""
    theory, load = advice.theory, advice.load
    sides = theory.sides
    lines = [
        f"lengths: mean {load.mu_l:,.0f} in, {load.mu_o:,.0f} out, decode share r = {sides.r:.2f}; "
        f"{load.concurrency:,} requests open at most, {theory.n:,} of them in the batch",
        f"mixing costs {1e6 * sides.lhs:+.1f} µs a token and saves {1e6 * sides.rhs:.1f} µs of fixed costs: "
        f"{'exclusive' if theory.exclusive else 'mixed'} batches win"
        + (f" (EB over MB {change(theory.gain)})" if theory.gain is not None else ""),
        _theory_concurrency(theory.concurrency_crossover, theory.sides.lhs),
    ]
    if theory.mix_crossovers:
        shares = ", ".join(f"{share:.2f}" for share in theory.mix_crossovers)
        lines.append(
            f"at this batch and {load.mu_l + load.mu_o:,.0f} tokens a request the better mode changes at r = {shares}"
        )
    else:
        lines.append("no other mix of prompt and answer changes that at this batch")
    return lines


def _theory_concurrency(crossing: float | None, lhs: float) -> str:
    if crossing is None:
        return "mixed batches win at any concurrency: mixing costs nothing here" if lhs <= 0 else "no crossover"
    if crossing <= 1:
        return "exclusive batches win at any concurrency"
    return f"exclusive batches win from about {crossing:,.0f} sequences in the batch on"


def simulation_lines(advice: Advice) -> list[str]:
    """Every candidate, then the crossovers."""
    lines = [_score_line(score, advice) for score in advice.scores]
    if advice.concurrency is not None:
        lines.append("EB over v1 by concurrency: " + _probe_text(advice.concurrency, "{:.0f}"))
        lines.append(_crossing_text(advice.concurrency, "concurrency", "{:,.0f}"))
    if advice.mix is not None:
        lines.append("EB over v1 by decode share r: " + _probe_text(advice.mix, "{:g}"))
        lines.append(_crossing_text(advice.mix, "decode share", "{:.2f}"))
    return lines


def agreement(advice: Advice) -> str:
    """Whether theory and simulation prefer the same mode."""
    scores = {score.policy: score for score in advice.scores}
    if "eb" not in scores or "v1" not in scores:
        return ""
    simulated = scores["eb"].tokens_per_s / scores["v1"].tokens_per_s - 1
    theory = advice.theory.gain
    winner = "exclusive" if advice.theory.exclusive else "mixed"
    same = (simulated > 0) == advice.theory.exclusive
    verdict = (
        f"agree that {winner} batches win"
        if same
        else "disagree, and the simulation, which knows context lengths and KV memory, decides"
    )
    line = f"Theory and simulation {verdict}: EB over v1 in tokens/s is {change(simulated)} in simulation"
    if theory is None:
        return f"{line}."
    line += f" and {change(theory)} in theory."
    if same and abs(theory - simulated) > FAR_APART:
        line += " Theory is of a batch that stays full; a simulated run also fills up and drains."
    return line


def interval(gain: Interval, seeds: int) -> str:
    """``+56.1 % (95 % interval +53.0 % to +59.2 %, 5 seeds)``."""
    if not math.isfinite(gain.high):
        return f"{change(gain.mean)} (one seed, no interval)"
    return f"{change(gain.mean)} (95 % interval {change(gain.low)} to {change(gain.high)}, {seeds} seeds)"


def _score_line(score: Score, advice: Advice) -> str:
    parts = [f"{score.policy}: {rate(score.tokens_per_s)} tokens/s"]
    if score.attainment is not None:
        parts.append(f"{rate(score.objective)} requests/s within the SLO ({percent(score.attainment)})")
    if score.gain is not None and score.policy != "v1":
        parts.append(f"{interval(score.gain, advice.question.seeds)} over v1")
    parts.append(f"TTFT {duration_ms(score.ttft_ms)}, TPOT {duration_ms(score.tpot_ms)}")
    return "; ".join(parts)


def _probe_text(probe: Probe, x_format: str) -> str:
    return ", ".join(f"{x_format.format(x)}: {change(gain)}" for x, gain in zip(probe.x, probe.gain, strict=True))


def _crossing_text(probe: Probe, what: str, x_format: str) -> str:
    if not probe.crossings:
        winner = "EB" if probe.gain[-1] > 0 else "v1"
        return f"no crossover in {what} in this range: {winner} is ahead throughout"
    where = ", ".join(x_format.format(value) for value in probe.crossings)
    return f"crossover in {what} at about {where} (interpolated between {count(len(probe.x))} points, one seed)"
