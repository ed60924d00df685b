"""Paired comparisons as a document (terminal, Markdown, CSV), as tables of the HTML page and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ebbench.analysis.cases import ALPHA, TIE
from ebbench.analysis.documents import Column, Document, Section
from ebbench.analysis.paired import (
    REQUEST_TIME,
    Compared,
    Contrast,
    PairedComparison,
    PolicyContrasts,
    compare_cases,
    pairs_needed_by,
)
from ebbench.analysis.units import DRAFTS, gate_units, is_higher_better, label_of
from ebbench.analysis.validity import by_settings, told_once
from ebbench.analysis.verdict import COPIES, gated_by_default, repeated_until_clear, units_of
from ebbench.errors import DataError, EbbenchError
from ebbench.grouping import by_key
from ebbench.records.run import Run
from ebbench.records.warnings import counted, fact
from ebbench.render import numbers
from ebbench.render.documents import section_tables
from ebbench.render.report import notes as titled
from ebbench.render.sentences import AHEAD, PAIRING, SKIPPED, WINS
from ebbench.report import page_data

BETTER, WORSE, UNDECIDED, IDENTICAL = "better", "worse", "undecided", "identical"
"""Words for a significant difference, for one that may be chance, and for none in any pair."""


LOAD = ("sessions", "concurrency", "rate", "burstiness", "speed")
"""Conditions of the load that the heading names if all runs agree in them."""


def document(compared: Compared) -> Document:
    """One section per case and policy, one row per figure."""
    sections = tuple(
        _section(comparison, policy) for comparison in compared.comparisons for policy in comparison.others
    )
    return Document("comparison", heading(compared), sections, notes(compared))


def plain(compared: Compared) -> Document:
    """The comparisons for a spreadsheet: every figure by its JSON name, as a number in its unit."""
    labels = ("figure", "baseline", "policy")
    figures = ("baseline_value", "value", "change", "change_low", "change_high", "p_adjusted")
    columns = (*(Column(name, "label") for name in labels), *map(Column, figures), Column("verdict", "label"))
    sections = []
    for comparison, policy in ((compared, policy) for compared in compared.comparisons for policy in compared.others):
        rows = tuple(
            (c.figure, comparison.baseline, policy.label, c.baseline, c.value, c.change, c.low, c.high, c.p_adjusted,
             verdict(c))
            for c in policy.contrasts
        )  # fmt: skip
        sections.append(Section(comparison.title, columns, rows))
    return Document("comparison", heading(compared), tuple(sections))


def console(compared: Compared, width: int) -> RenderableType:
    """The comparisons for a terminal of ``width`` characters."""
    shown_document = document(compared)
    parts: list[RenderableType] = [Text(shown_document.title, style="bold")]
    shown = iter(shown_document.sections)
    alike = len({legend(comparison) for comparison in compared.comparisons}) == 1
    for comparison in compared.comparisons:
        for policy in comparison.others:
            parts += [Text(), *section_tables(next(shown), width), Text(verdict_sentence(comparison, policy))]
        if not alike or comparison is compared.comparisons[-1]:
            parts += [Text()] * (alike and len(compared.comparisons) > 1)
            parts.append(Text(legend(comparison), style="dim"))
    parts += [Text(line) for line in left_out(compared)]
    return Group(*parts, *titled("Keep in mind", caveats(compared.comparisons)))


def notes(compared: Compared) -> tuple[str, ...]:
    """Conclusions, legends, what was left out, and caveats, as sentences."""
    lines = []
    for comparison in compared.comparisons:
        before = f"{comparison.title}: " if comparison.title else ""
        lines += [before + verdict_sentence(comparison, policy) for policy in comparison.others]
        lines.append(before + legend(comparison))
    return (*lines, *left_out(compared), *caveats(compared.comparisons))


def caveats(comparisons: Sequence[PairedComparison]) -> list[str]:
    """The caveats of the devices, each once, with the cases and policies of the runs that have it unless all do."""
    texts, settings = [], []
    for comparison in comparisons:
        compared = {policy.label: [pair.candidate for pair in policy.pairs] for policy in comparison.others}
        for label, units in ({comparison.baseline: list(comparison.units)} | compared).items():
            texts += [unit.caveats for unit in units]
            settings += [{"case": comparison.title, "policy": label}] * len(units)
    return told_once(texts, by_settings(settings, lambda _, value: value, "runs"))


def left_out(compared: Compared) -> list[str]:
    """Cases that have no second policy to compare."""
    return [f"Not compared, {alone}." for alone in compared.alone]


def heading(compared: Compared) -> str:
    """What all comparisons share: model, device, engine, workload, load, scheduler limits."""
    units = [unit for comparison in compared.comparisons for unit in comparison.units]
    shared = {
        name: text
        for name, text in units[0].environment.items()
        if all(unit.environment.get(name) == text for unit in units)
    }
    parts = [
        f"{shared.get('model', 'several models')} on {shared.get('device', 'several devices')}",
        f"engine {shared.get('engine', 'of several kinds')}",
        f"{shared.get('workload', 'several workloads')} ({shared.get('scenario', 'several scenarios')})",
    ]
    load = [dict.fromkeys(unit.conditions.get(name) for unit in units) for name in LOAD]
    parts += [text for values in load if len(values) == 1 for text in values if text]
    options = json.loads(shared.get("options") or "{}")
    named = {"B": options.get("max_num_batched_tokens"), "N": options.get("max_num_seqs")}
    parts += [f"{name} = {value:,}" for name, value in named.items() if value is not None]
    return ", ".join([*parts, *([f"topology {options['topology']}"] if "topology" in options else [])])


def _section(comparison: PairedComparison, policy: PolicyContrasts) -> Section:
    columns = (
        Column("figure", "label"), Column(comparison.baseline, "label", key="baseline", right=True),
        Column(policy.label, "label", key="value", right=True), Column("change", "change"),
        Column("95 % interval", "label", right=True), Column("p", show=_p), Column("verdict", "label"),
    )  # fmt: skip
    before = f"{comparison.title}: " if comparison.title else ""
    rows = tuple(
        (label_of(c.figure), numbers.figure(c.figure, c.baseline), numbers.figure(c.figure, c.value), c.change,
         _interval(c), c.p_adjusted, verdict(c))
        for c in policy.contrasts
    )  # fmt: skip
    return Section(f"{before}{policy.label} against {comparison.baseline}", columns, rows)


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _interval(contrast: Contrast) -> str:
    if contrast.low is None or contrast.high is None:
        return numbers.DASH
    return f"{numbers.change(contrast.low).removesuffix(' %')} to {numbers.change(contrast.high)}"


def verdict(contrast: Contrast) -> str:
    """``better`` or ``worse`` if the difference is significant, ``undecided`` if not, ``identical`` if there is none in
    any pair; empty without a test."""
    if contrast.p_adjusted is None:
        return ""
    if contrast.identical:
        return IDENTICAL
    if contrast.p_adjusted > ALPHA or contrast.change == 0:
        return UNDECIDED
    return BETTER if (contrast.change > 0) == is_higher_better(contrast.figure) else WORSE


def verdict_sentence(comparison: PairedComparison, policy: PolicyContrasts) -> str:
    """Which policy wins in the deciding figure if the difference is significant, else which is ahead."""
    contrast = next((candidate for candidate in policy.contrasts if candidate.figure == policy.deciding), None)
    if contrast is None:
        return f"{policy.label} and {comparison.baseline} have no throughput to compare."
    if policy.identical:
        return (
            f"No winner: {policy.label} and {comparison.baseline} have the same figures in every pair of runs: under "
            "this load they behave identically."
        )
    figure = _DECIDING[contrast.figure]
    by = f"{numbers.change(contrast.change)} {figure} of {policy.label} against {comparison.baseline}"
    kept_up = " Both keep up with the arrivals, so latency decides." if contrast.figure == REQUEST_TIME else ""
    higher = contrast.change > 0
    leader = policy.label if higher == is_higher_better(contrast.figure) else comparison.baseline
    word, kept_up = verdict(contrast), kept_up + _by_drafts(policy)
    if abs(contrast.change) < TIE:
        return f"No winner: {by}.{kept_up}"
    gain = math.log1p(contrast.change) * (1 if is_higher_better(contrast.figure) else -1)
    drafts = math.log1p(policy.drafts)
    if gain * drafts > 0 and abs(gain) <= abs(drafts):
        return f"No winner among the policies: {by}.{kept_up}"
    if word in (BETTER, WORSE):
        return f"{leader} {WINS}: {by}, 95 % interval {_interval(contrast)}.{kept_up}"
    return f"{leader} {AHEAD}: {by}; {_open_question(policy, contrast)}.{kept_up}"


def _by_drafts(policy: PolicyContrasts) -> str:
    """What accepted drafts explain of a difference; empty where they are alike."""
    if not policy.drafts:
        return ""
    tokens = next(contrast for contrast in policy.contrasts if contrast.figure == DRAFTS)
    return (
        f" Drafts: {tokens.value:.2f} tokens per step against {tokens.baseline:.2f}; up to "
        f"{numbers.change(policy.drafts)} in tokens/s comes from what was accepted, not from the policy."
    )


def _open_question(policy: PolicyContrasts, contrast: Contrast) -> str:
    """Why a difference is not shown here; where the gate's one-sided test shows it, that is said, too."""
    if contrast.p_adjusted is None:
        return "one pair does not rule out chance"
    if contrast.figure not in policy.worse:
        return "which chance may explain"
    return (
        f"not shown here (p = {_p(contrast.p_adjusted)}, two-sided: is there a difference?), but `ebbench gate` counts "
        f"{policy.label} as worse (p = {_p(policy.worse[contrast.figure])}, one-sided: is it worse?)"
    )


def _gate_notes(comparison: PairedComparison) -> list[str]:
    """Figures other than the deciding one that are undecided here and worse by the gate's one-sided test."""
    worse = [
        f"{label_of(c.figure)} of {policy.label} (p = {_p(policy.worse[c.figure])})"
        for policy in comparison.others
        for c in policy.contrasts
        if c.figure in policy.worse and c.figure != policy.deciding and verdict(c) == UNDECIDED
    ]
    return [f"undecided here, but worse by the gate's one-sided test: {', '.join(worse)}"] if worse else []


_DECIDING = {
    "output_throughput": "output tokens/s",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s within the limits",
    REQUEST_TIME: "time per request (median)",
}


def legend(comparison: PairedComparison) -> str:
    """How the figures were computed, and the smallest change that could have been detected."""
    pairs = max(len(policy.pairs) for policy in comparison.others)
    made = counted(pairs, "pair")
    text = f"{made} of runs on the same plan; change: geometric mean over the pairs"
    if any(contrast.figure == DRAFTS for policy in comparison.others for contrast in policy.contrasts):
        text += "; tokens/step: output tokens over those that its steps would have made without drafts"
    skipped = [
        f"{label_of(figure)} left out for {contrasts.label}: {SKIPPED[why]}"
        for contrasts in comparison.others
        for figure, why in contrasts.skipped.items()
    ]
    # Runs that are in no pair, with the policies that this concerns.
    alone = by_key((note.worded(PAIRING), policy.label) for policy in comparison.others for note in policy.left_out)
    unpaired = [f"{note} ({', '.join(labels)})" for note, labels in alone.items()]
    text += "".join(f"; {line}" for line in (*skipped, *unpaired, *_gate_notes(comparison)))
    needed = pairs_needed_by(comparison)
    if copies := max(sum(pair.copies for pair in policy.pairs) for policy in comparison.others):
        text += f"; {fact(COPIES, pairs=copies).worded(PAIRING)}"
        if pairs < needed:
            return f"{text}. {made} {'does' if pairs == 1 else 'do'} not rule out chance."
    if pairs < 2:
        return f"{text}. One pair does not rule out chance: use --repeats {needed} or more."
    sequential = any(repeated_until_clear(policy.pairs) for policy in comparison.others)
    test = "valid after every pair (--repeats auto)" if sequential else "exact sign-flip test"
    text += f"; p: {test}, two-sided, Holm-adjusted over throughput and medians of all policies"
    more = dict.fromkeys(c.deciding for c in comparison.others if c.deciding not in gated_by_default(units_of(c.pairs)))
    text += "".join(f"; {label_of(figure)} decides here and counts as one test more" for figure in more)
    if pairs < needed:
        return f"{text}. {made} cannot show any difference: use --repeats {needed} or more."
    detectable = []
    for policy in (policy for policy in comparison.others if not policy.identical):
        least = ((label_of(contrast.figure), contrast.detectable) for contrast in policy.contrasts)
        known = [f"{name} {100 * change:.1f} %" for name, change in least if change is not None]
        detectable.append(f"{policy.label} {', '.join(known) or 'none'}")
    return f"{text}. Minimum detectable change: {'; '.join(detectable)}." if detectable else f"{text}."


def tables(compared: Compared) -> list[page_data.Table]:
    """The comparisons with several pairs as tables of the HTML page."""
    page = []
    for comparison in compared.comparisons:
        if max(len(policy.pairs) for policy in comparison.others) > 1:
            sections = [_section(comparison, policy) for policy in comparison.others]
            sentences = [verdict_sentence(comparison, policy) for policy in comparison.others]
            notes = [""] * (len(sections) - 1) + [" ".join([*sentences, legend(comparison)])]
            paired = zip(sections, notes, strict=True)
            page += [page_data.of_section(section, f"Paired: {section.title}", note) for section, note in paired]
    return page


def to_json(compared: Compared) -> dict[str, Any]:
    """One JSON object: ``cases`` with one comparison each; for a single case also its keys at the top level.

    Each case has the ``warnings`` of its devices; at the top level are those of all cases.
    """
    cases = [
        {
            "title": comparison.title,
            "baseline": comparison.baseline,
            "environment": dict(comparison.units[0].environment),
            "load": comparison.units[0].load,
            "warnings": caveats([comparison]),
            "policies": [_other_json(policy) for policy in comparison.others],
        }
        for comparison in compared.comparisons
    ]
    only = cases[0] if len(cases) == 1 else {"warnings": caveats(compared.comparisons)}
    return {**only, "cases": cases, "not_compared": list(compared.alone)}


def _other_json(policy: PolicyContrasts) -> dict[str, Any]:
    pairs: Sequence[Any] = policy.pairs
    return {
        "policy": policy.label,
        "pairs": [
            {"seed": pair.baseline.seed, "baseline": pair.baseline.run, "candidate": pair.candidate.run}
            for pair in pairs
        ],
        "figures": [asdict(contrast) | {"verdict": verdict(contrast)} for contrast in policy.contrasts],
        "skipped": dict(policy.skipped),
        "copies": sum(pair.copies for pair in pairs),
        "left_out": [difference.to_dict(difference.worded(PAIRING)) for difference in policy.left_out],
        "worse_one_sided": dict(policy.worse),
        "tokens_per_step_change": policy.drafts,
    }


def paired_tables(runs: Sequence[Run]) -> tuple[list[page_data.Table], list[str]]:
    """The paired comparison for a page, where there is one; why not, where runs of several policies do not compare."""
    if len({run.manifest.policy for run in runs}) < 2:
        return [], []
    try:
        compared = compare_cases(by_key((unit.policy, unit) for unit in gate_units(runs)))
    except DataError as error:
        return [], [f"These runs are not comparable: {error}"]
    except EbbenchError as error:
        return [], [f"Left out, the paired comparison: {error}"]
    return tables(compared), left_out(compared)
