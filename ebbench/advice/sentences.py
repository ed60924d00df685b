"""The advice as sentences without markup and as small tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ebbench.advice.candidates import topology_asked
from ebbench.advice.choice import BASELINE, budget_share, level_budgets, tuned_budget
from ebbench.analysis.cases import TIE
from ebbench.config.declare import option_name
from ebbench.engines.base import rank_notes
from ebbench.foreign.documents import texts_beside
from ebbench.grouping import by_key
from ebbench.records.warnings import Texts
from ebbench.render.numbers import DASH, change, count, duration_ms, finite, listed, percent, rate, sentence
from ebbench.render.tables import framed
from ebbench.spec.server import ENGINE_ALONE, version_defaults
from vllm_eb.policies.cadence import CadenceSpec
from vllm_eb.policies.v1 import V1
from vllm_eb.policy import PolicySpec, parse_policy

if TYPE_CHECKING:
    from ebbench.advice.choice import Advice, AdviceQuestion, GainCurve, PolicyScore
    from ebbench.analysis.statistics import PairedInterval
    from ebbench.render.documents import Console

_FULL_BATCH = "Theory assumes a batch that stays full; a simulated run also fills and drains."
MOST = 0.5
"""From this share of the best policy's gain on, a tuned token budget gives most of it."""
FEW_TURNS = 10
"""Requests per open one below which filling and draining are said to count."""
FAR_APART = 0.1
"""From this difference between the two gains on (a share), a sentence explains it."""


MOST_NAMED = 3
"""Of more policies only the number is given."""

Rivals = Sequence[Mapping[str, Any]]


def _with_gains(rivals: Rivals) -> str:
    """``eb -19.9 % (-48.6 to +24.9) and marginal +0.1 % (-0.3 to +0.6)``."""
    return _some(
        f"{rival['name']} {change(rival['gain'])}"
        + (f" ({100 * rival['low']:+.1f} to {100 * rival['high']:+.1f})" if "low" in rival else "")
        for rival in rivals
    )


def _some(names: Iterable[str]) -> str:
    """At most MOST_NAMED names, and how many others there are."""
    all_names = list(names)
    left = len(all_names) - MOST_NAMED
    return listed([*all_names[:MOST_NAMED], f"{left} other policies"] if left >= 2 else all_names)


def _simplest(equal: Rivals, ahead: Rivals, unsure: Rivals, seeds: int, level: bool) -> str:
    one_seed = " (one seed)" if seeds == 1 else ""
    parts = []
    if equal:
        names = _some(rival["policy"] for rival in equal)
        parts.append(f"{names} {_are(equal)} equal to it within half a per cent{one_seed}")
    if ahead:
        parts.append(f"{_with_gains(ahead)} {_are(ahead)} ahead of it")
    if unsure:
        parts.append(f"{_with_gains(unsure)} cannot be told from it with {seeds} seed{'s' if seeds > 1 else ''}")
    if not parts and level:
        return f"no other policy may be as good{one_seed}"
    return f"{'; '.join(parts)}, and it is the simplest" if parts else "it is the simplest that may be the best"


def _are(rivals: Rivals) -> str:
    return "are" if len(rivals) > 1 else "is"


def _doubt(one_seed: bool) -> str:
    why = "one seed" if one_seed else "in some runs no request met the targets"
    return f"({why}: chance is not ruled out)"


REASONS: Texts = {
    **texts_beside(__file__)["reasons"],
    "ahead_by_chance": lambda gain, one_seed: (
        f"it is ahead of every other candidate by {100 * gain:.1f} % or more {_doubt(one_seed)}"
    ),
    "only_one_in_targets": lambda one_seed: (
        f"it is the only candidate under which a request met the targets {_doubt(one_seed)}"
    ),
    "simplest": _simplest,
    "surely_ahead": lambda of, unsure: (
        f"it is surely ahead of {of}; {_with_gains(unsure)} may be as good, less certainly"
    ),
}
"""Why a policy is advised."""


def headline(advice: Advice) -> list[str]:
    """The advised policy and its expected gain."""
    chosen, question = advice.chosen, advice.question
    lines = [_run(advice), f"Why: {advice.reason.worded(REASONS)}."]
    if not question.slo and _arrivals_decide(advice):
        lines.append(
            "All candidates keep up with the arrivals, so tokens/s cannot tell them apart: --goodput ttft:MS tpot:MS "
            "compares their latencies, a higher rate (--speed, --request-rate) their throughput."
        )
    if chosen.gain is not None and chosen.name != BASELINE:
        what = "requests/s within the SLO" if question.slo else "tokens/s"
        over = f"{BASELINE} with {question.budget:,}" if question.budgets else BASELINE
        lines.append(f"Expected: {interval(chosen.gain, question.seeds)} {what} over {over}.")
    if chosen.attainment is not None:
        lines.append(f"{percent(chosen.attainment)} of the requests meet {question.slo} (ms).")
    if (tuned := _budget_line(advice)) is not None:
        lines.append(tuned)
    lines.append(
        f"Expect about {rate(chosen.tokens_per_s)} tokens/s (prompts and answers), median TTFT "
        f"{duration_ms(chosen.ttft_ms)}, median TPOT {duration_ms(chosen.tpot_ms)}."
    )
    return lines


def _run(advice: Advice) -> str:
    """What to run, with its token budget where several were tried, and which others are as good."""
    chosen = advice.chosen
    if not advice.question.budgets:
        return f"Run {chosen.policy}."
    level, at = level_budgets(chosen, advice.scores), f"with --max-num-batched-tokens {chosen.max_num_batched_tokens}"
    if not level:
        return f"Run {chosen.policy} {at}."
    others = f"{level[0]:,} makes" if len(level) == 1 else f"{level[0]:,} to {level[-1]:,} make"
    return f"Run {chosen.policy} {at}; {others} no difference."


def _arrivals_decide(advice: Advice) -> bool:
    """Whether every candidate completes what arrives."""
    most = max(score.tokens_per_s for score in advice.scores)
    return (
        advice.load.open_loop
        and len(advice.scores) > 1
        and all(score.tokens_per_s >= (1 - TIE) * most for score in advice.scores)
    )


def server_options(settings: Mapping[str, Any]) -> str:
    """Settings of a server that are not its version's, as options of ``ebbench advise``."""
    implied = version_defaults(settings.get("vllm_version"))
    texts = (f"{option_name(name)} {value}" for name, value in settings.items() if name not in implied)
    return " ".join(re.sub(r"^--topology tp=(\d+)$", r"--tp \1", text) for text in texts)


def _budget_line(advice: Advice) -> str | None:
    best_budget = budget_share(advice.scores)
    if best_budget is None:
        return None
    score, share = best_budget
    budget, most = tuned_budget(score), max(scored.gain.mean for scored in advice.scores if scored.gain is not None)
    assert score.gain is not None
    if score.gain.mean <= TIE:
        return "Another token budget alone gives no gain."
    if score is advice.chosen:
        return "That is a tuned token budget alone: vLLM's own scheduler, without the plugin."
    much = "most" if share >= MOST else "only a part"
    return (
        f"A tuned token budget alone, --max-num-batched-tokens {budget}, gives {much} of it: "
        f"{change(score.gain.mean)} of {change(most)}."
    )


def parameters(advice: Advice) -> list[str]:
    """Settings of the server, and the values that the controller will reach."""
    question, theory = advice.question, advice.theory
    lines = [
        f"Server: --max-num-seqs {question.spec.server.max_num_seqs} --max-num-batched-tokens "
        f"{advice.chosen.max_num_batched_tokens}",
    ]
    tuning = advice.tuning
    if tuning is not None:
        lines.append(
            f"Of {tuning.tried} settings tried with {advice.chosen.policy}, --max-num-seqs {tuning.max_num_seqs} "
            f"--max-num-batched-tokens {tuning.max_num_batched_tokens} is best: {change(tuning.gain)} over the above "
            "(one seed)."
        )
    policy = parse_policy(advice.chosen.policy)
    if policy.adapts:
        lines.append(
            "The controller sets k and N itself; for this workload theory gives "
            f"theta* = {theory.threshold.theta_star:.3f}, N* = {theory.n_star:,} and k* = {theory.k_star:,} idle slots "
            "before a refill."
        )
    lines += _without_plugin(policy)
    topology = topology_asked(question)
    if topology is not None:
        lines += [sentence(str(note)) for note in rank_notes(policy, topology.pools[0].dp)]
    return lines


def _without_plugin(policy: PolicySpec) -> list[str]:
    """The option of vLLM's with the same effect, if there is one."""
    if isinstance(policy, V1) and policy.budget is not None:
        return [f"--max-num-batched-tokens {policy.budget} does it without the plugin."]
    if isinstance(policy, CadenceSpec) and policy.escape:
        return [f"From vLLM 0.33 on --prefill-schedule-interval {policy.every} does it without the plugin."]
    return []


def theory_lines(advice: Advice) -> list[str]:
    """Both sides of the crossover inequality, and where they are equal."""
    theory, load = advice.theory, advice.load
    sides = theory.sides
    shared = f" of each of {advice.engines} engines" if advice.engines > 1 else ""
    lines = [
        f"lengths from {load.source}: mean {load.mu_l:,.0f} in, {load.mu_o:,.0f} out, "
        f"decode share r = {sides.r:.2f}; {load.concurrency:,} requests open "
        f"{'on average' if load.open_loop else 'at most'}, {theory.n:,} of them in the batch{shared}",
        f"mixing costs {1e6 * sides.lhs:+.1f} µs per token and saves {1e6 * sides.rhs:.1f} µs of fixed costs: "
        f"{'exclusive' if theory.exclusive else 'mixed'} batches win"
        + (f" (EB over MB {change(theory.gain)})" if theory.gain is not None else ""),
        _theory_concurrency(theory.concurrency_crossover, theory.sides.lhs),
    ]
    if theory.mix_crossovers:
        shares = ", ".join(f"{share:.2f}" for share in theory.mix_crossovers)
        lines.append(
            f"at this batch and {load.mu_l + load.mu_o:,.0f} tokens per request the better mode changes at r = {shares}"
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


def candidates(advice: Advice) -> Table:
    """One row per policy, best first: the objective, its gain over v1 with the interval below, latencies."""
    limits = bool(advice.question.slo)
    headers = [*(["B"] if advice.question.budgets else []), "tokens/s"]
    headers += ["goodput\nreq/s", "SLO\nmet"] if limits else []
    headers += [f"{'goodput' if limits else 'tokens/s'} over v1\n(95 % interval)", "TTFT\nmedian", "TPOT\nmedian"]
    table = framed(Column("policy", min_width=8, overflow="fold"), right=headers)
    for score in _scores_shown(advice):
        budget = [f"{score.max_num_batched_tokens}"] if advice.question.budgets else []
        cells = [*budget, rate(score.tokens_per_s)]
        if score.attainment is not None:
            cells += [rate(score.objective), percent(score.attainment)]
        cells += [_gain_cell(score), duration_ms(score.ttft_ms), duration_ms(score.tpot_ms)]
        table.add_row(Text(score.policy), *cells, style="bold" if score is advice.chosen else None)
    return table


def _scores_shown(advice: Advice) -> list[PolicyScore]:
    """Each policy at its best budget, or at the reference budget where no other is better by more than a tie.

    Of v1, the reference and its best other budget; and the chosen candidate in any case.
    """
    shown = [advice.chosen]
    for policy, scores in by_key((score.policy, score) for score in advice.scores).items():
        reference = [score for score in scores if score.at_reference]
        others = [score for score in scores if not score.at_reference][:1]
        if policy == BASELINE:
            shown += reference + others
        elif policy != advice.chosen.policy:
            level = bool(reference) and reference[0].objective >= (1 - TIE) * scores[0].objective
            shown.append(reference[0] if level else scores[0])
    return [score for score in advice.scores if score in shown]


def left_out(advice: Advice) -> list[str]:
    """What the table's B is, and what the search dropped: after how many seeds, and how far behind the best there."""
    if not advice.question.budgets:
        return []
    lines = [
        f"B: token budget per step, the best for each policy, or {advice.question.budget:,} where no "
        "other is half a per cent better. --json has all"
    ]
    for seeds in sorted({policy.seeds for policy in advice.dropped}):
        dropped = [policy for policy in advice.dropped if policy.seeds == seeds]
        best = max(dropped, key=lambda policy: policy.behind_best)
        lines.append(
            f"{len(dropped)} candidates were dropped after {seeds} seed{'s' if seeds > 1 else ''}; the best of them, "
            f"{best.policy} with B = {best.max_num_batched_tokens:,}, was {change(best.behind_best)} there against the "
            "best"
        )
    return [f"{'. '.join(lines)}."]


def _gain_cell(score: PolicyScore) -> str:
    if score.gain is None or score.name == BASELINE:
        return DASH
    if not math.isfinite(score.gain.high):
        return change(score.gain.mean)  # the heading says that there was one seed
    return f"{change(score.gain.mean)}\n({change(score.gain.low)[:-2]} to {change(score.gain.high)})"


def probes(advice: Advice) -> list[tuple[Table, str]]:
    """EB over v1 by concurrency and by decode share, each with a line about the crossover."""
    asked = (
        (advice.concurrency, "requests open", "{:.0f}", "requests open", "{:,.0f}"),
        (advice.mix, "decode share r", "{:g}", "decode share", "{:.2f}"),
    )
    return [
        (_probe_table(head, probe, x_format), _crossing_text(probe, what, crossing_format))
        for probe, head, x_format, what, crossing_format in asked
        if probe is not None
    ]


def _probe_table(what: str, probe: GainCurve, x_format: str) -> Table:
    table = framed(Column(what), right=map(x_format.format, probe.x))
    table.add_row("EB over v1", *(f"{100 * gain:+.0f} %" for gain in probe.gain))
    return table


def _few_requests(asked: int, concurrency: int) -> str:
    why = (
        f"are {asked / concurrency:.1f} per open one: the batch fills and drains during much of each run, which counts "
        "against exclusive batches and can turn the sign of a gain"
    )
    if asked < concurrency:
        why = (
            f"do not fill the {concurrency:,} that the load allows: the candidates ran while the batch filled and "
            "drained, which hides their differences"
        )
    return f"{asked:,} requests {why}. Use --num-prompts {FEW_TURNS * concurrency}, or set --max-concurrency."


def limits_of_it(advice: Advice) -> list[str]:
    """Assumptions and limits of the advice."""
    question, load = advice.question, advice.load
    lines = [sentence(note) for note in advice.notes]
    if question.seeds_alike:
        lines.append(
            "Every seed gives the same requests at the same times, as a replayed trace does, so each candidate was run "
            "once: there is no interval, and chance is not ruled out."
        )
    asked = question.spec.plan.num_prompts
    if isinstance(asked, int) and asked < FEW_TURNS * load.concurrency:
        lines.append(_few_requests(asked, load.concurrency))
    options = server_options(_of_device(question))
    shown = f"ebbench devices show {question.spec.device} --model {question.spec.model} {options}".rstrip()
    lines.append(
        f"Simulated on a model of the device; `{shown}` says where its step times come from. Measure on your GPU "
        "before changing production."
    )
    return lines


def _of_device(question: AdviceQuestion) -> dict[str, Any]:
    """The server's settings that `ebbench devices show` also takes: those of one engine, without shared experts."""
    topology = topology_asked(question)
    tp = topology.pools[0].tp if topology else 1
    left_out = (*ENGINE_ALONE, "topology", *(() if tp > 1 else ("link",)))
    shown = {name: value for name, value in question.server.items() if name not in left_out}
    return {**({"tp": tp} if tp > 1 else {}), **shown}


def agreement(advice: Advice) -> str:
    """Whether theory and simulation prefer the same mode."""
    scores = {score.policy: score for score in advice.scores if score.at_reference}
    if "eb" not in scores or "v1" not in scores:
        return ""
    simulated = scores["eb"].tokens_per_s / scores["v1"].tokens_per_s - 1
    theory = advice.theory.gain
    winner = "exclusive" if advice.theory.exclusive else "mixed"
    if abs(simulated) < TIE:
        expected = "" if theory is None else f" ({change(theory)} for EB over v1 in tokens/s)"
        return (
            f"Theory expects {winner} batches to win{expected}; in simulation EB and v1 are equal "
            f"({change(simulated)}). {_FULL_BATCH}"
        )
    same = (simulated > 0) == advice.theory.exclusive
    verdict = f"agree that {winner} batches win"
    if not same:
        verdict = "disagree, and the simulation, which knows context lengths and KV memory, decides"
    in_theory = "" if theory is None else f" and {change(theory)} in theory"
    why = f" {_FULL_BATCH}" if same and theory is not None and abs(theory - simulated) > FAR_APART else ""
    figures = f"EB over v1 in tokens/s is {change(simulated)} in simulation{in_theory}"
    return f"Theory and simulation {verdict}: {figures}.{why}"


def interval(gain: PairedInterval, seeds: int) -> str:
    """``+56.1 % (95 % interval +53.0 % to +59.2 %, 5 seeds)``."""
    if not math.isfinite(gain.high):
        return f"{change(gain.mean)} (one seed, no interval)"
    return f"{change(gain.mean)} (95 % interval {change(gain.low)} to {change(gain.high)}, {seeds} seeds)"


def _crossing_text(probe: GainCurve, what: str, x_format: str) -> str:
    if not probe.crossings:
        winner = "EB" if probe.gain[-1] > 0 else "v1"
        return f"no crossover in {what} in this range: {winner} is ahead throughout"
    where = ", ".join(x_format.format(value) for value in probe.crossings)
    return f"crossover in {what} at about {where} (interpolated between {count(len(probe.x))} points, one seed)"


def print_advice(advice: Advice, console: Console) -> None:
    """Print what to run, why, and where that changes."""
    question = advice.question
    served = server_options(question.server)
    on = f"{question.spec.plan.workload}, {question.spec.model} on {question.spec.device} {served}"
    console.print(on.rstrip(), style="bold", markup=False)
    for index, line in enumerate(headline(advice)):
        console.print(line, style="bold green" if not index else None, markup=False)

    def section(title: str, lines: Sequence[str]) -> None:
        console.print(f"\n{title}", style="bold", markup=False)
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))

    section("Parameters", parameters(advice))
    how_many = f"means over {question.seeds} seeds" if question.seeds > 1 else "one seed"
    section(f"Simulation, which decides ({how_many})", [])
    console.print(candidates(advice))
    for line in left_out(advice):
        console.print(line, markup=False)
    for table, crossing in probes(advice):
        console.print()
        console.print(table)
        console.print(crossing, markup=False)
    section("Theory", [*theory_lines(advice), *filter(None, [agreement(advice)])])
    section("Keep in mind", limits_of_it(advice))


def as_dict(advice: Advice) -> dict[str, Any]:
    """One JSON object; infinite bounds are null."""
    budget = budget_share(advice.scores)
    theory = asdict(advice.theory) | {"exclusive": advice.theory.exclusive, "gain": advice.theory.gain}
    return {
        "policy": advice.chosen.policy,
        "reason": to_builtins(advice.reason),
        "equal_budgets": level_budgets(advice.chosen, advice.scores),
        "objective": "goodput" if advice.question.slo else "total_token_throughput",
        "slo_ms": advice.question.slo.limits() or None,
        "load": asdict(advice.load),
        "theory": theory,
        "scores": [finite(asdict(score)) for score in advice.scores],
        "concurrency": None if advice.concurrency is None else asdict(advice.concurrency),
        "mix": None if advice.mix is None else asdict(advice.mix),
        "tuned_budget": budget and {"max_num_batched_tokens": tuned_budget(budget[0]), "share_of_gain": budget[1]},
        "tuning": None if advice.tuning is None else asdict(advice.tuning),
        "server": dict(advice.question.server),
        "max_num_seqs": advice.question.spec.server.max_num_seqs,
        "max_num_batched_tokens": advice.chosen.max_num_batched_tokens,
        "compared_with": {"policy": BASELINE, "max_num_batched_tokens": advice.question.budget},
        "dropped": [policy._asdict() for policy in advice.dropped],
        "engines": advice.engines,
        "seeds": advice.question.seeds,
        "seeds_alike": advice.question.seeds_alike,
        "notes": list(advice.notes),
    }
