"""The gate's verdict as console text, JSON, JUnit XML and a GitHub job summary."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ebbench import __version__
from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.analysis.environment import Difference, listed
from ebbench.analysis.units import label_of, name_of
from ebbench.analysis.validity import told_once
from ebbench.analysis.verdict import Judged, Outcome, Verdict
from ebbench.errors import EbbenchError
from ebbench.foreign.documents import markdown, texts_beside
from ebbench.gate import self_test as gate_trials
from ebbench.gate.self_test import SelfTest, TrialTally
from ebbench.records import files
from ebbench.records.warnings import Fact, RunWarning, Texts, counted
from ebbench.render import numbers
from ebbench.render.documents import Console, section_lines, section_tables
from ebbench.render.sentences import PAIRING, SKIPPED


def write_self_test(done: SelfTest, path: Path | None, messages: Console) -> None:
    """Write :func:`self_test_page` to ``path``, else to stdout. Raises RunError."""
    if path is None:
        print(self_test_page(done))
        return
    files.write_text(self_test_page(done), path)
    messages.say(f"wrote {path}")


def self_test_page(done: SelfTest) -> str:
    """False alarms by noise and power by slow-down, both with fixed and with sequential pairs, and the method."""
    design = done.equal[0].design
    rules = design.rules
    worst, trials = gate_trials.false_alarms(done.equal), len(done.equal[0].trials)
    by_spread = gate_trials.pairs_by_spread(RATIOS, margin=rules.default_margin)
    columns = tuple(map(Column, ("spread over margin", "pairs, median", "pairs, 90th percentile")))
    rows = tuple((f"{ratio:g}", _count(median), _count(upper)) for ratio, median, upper in by_spread)
    lines = [
        "# The gate tried on itself",
        "",
        f"ebbench {__version__}; made by `ebbench gate --self-test --trials {trials} --report FILE`.",
        "",
        f"A trial is a whole comparison: {design.pairs} pairs of simulated server restarts in ABBA order, a new plan "
        f"of {gate_trials.REQUESTS} requests in every pair, run on the simulator (rtx-pro-6000, qwen3-8b, policy v1) "
        "with disturbed step times, reduced and judged by the same code as measured runs. "
        f"Rules: margin {100 * rules.default_margin:g} %, alpha {rules.alpha:g}, Holm over the three gated figures.",
        "",
        "## False alarms: two equal sides",
        "",
        *_table("noise", done.equal),
        "",
        f"Highest share of failures: {worst:.1%} (aim: at most 5 %). The numbers in brackets are 95 % Wilson bounds.",
        "",
        "## Power: the candidate's steps made slower",
        "",
        *_table("slow-down", done.slowed),
        "",
        f"A slow-down below the margin of {100 * rules.default_margin:g} % is allowed, so a failure there is no "
        "detection that was asked for; one above it that does not fail is inconclusive far more often than passed.",
        "",
        *_sequential(done),
        "## Pairs by the spread between them",
        "",
        "How many pairs equal sides take to pass for one figure, by the standard deviation of the pairs' losses over "
        f"the margin (drawn from a normal distribution; margin {100 * rules.default_margin:g} %).",
        "",
        *section_lines(Section("", columns, rows)),
        "",
    ]
    return "\n".join(lines)


def _sequential(done: SelfTest) -> list[str]:
    most = done.equal_sequential[0].design.pairs
    worst = gate_trials.false_alarms(done.equal_sequential)
    return [
        "## Pairs until the answer is known",
        "",
        f"As `--max-pairs {most}` measures them: judged after every pair from the sixth on, by p-values and bounds "
        "that hold at every look (ebbench/analysis/statistics.py). Pairs: median, in brackets the 90th percentile.",
        "",
        *_table("two equal sides", done.equal_sequential),
        "",
        f"Highest share of failures: {worst:.1%} (aim: at most 5 %).",
        "",
        *_table("slow-down", done.slowed_sequential),
        "",
    ]


RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def _count(pairs: float) -> str:
    return "more than 200" if math.isinf(pairs) else f"{pairs:g}"


def _share(count: int, trials: int) -> str:
    from scipy.stats import binomtest  # takes a second

    low, high = binomtest(count, trials).proportion_ci(method="wilson")
    return f"{count / trials:.1%} ({low:.1%}–{high:.1%})"


def _table(head: str, tallies: Sequence[TrialTally]) -> list[str]:
    sequential, rows = tallies[0].design.rules.sequential, list[tuple[Value, ...]]()
    for tally in tallies:
        design, trials = tally.design, len(tally.trials)
        row: list[Value] = [f"{design.slowdown:.0%}" if head == "slow-down" else design.noise.name, trials]
        row += [_share(tally.count(outcome), trials) for outcome in OUTCOMES]
        median, upper = np.quantile([trial.pairs for trial in tally.trials], (0.5, 0.9), method="higher")
        rows.append((*row, *([f"{median:.0f} ({upper:.0f})"] if sequential else [])))
    names = ("trials", "failed", "passed", "inconclusive", *(["pairs"] if sequential else []))
    return section_lines(Section("", (Column(head, "label"), *map(Column, names)), tuple(rows)))


OUTCOMES: tuple[Outcome, ...] = ("fail", "pass", "inconclusive")
WORDS: dict[Outcome, str] = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}
_ROWS: dict[Outcome, str] = {"pass": "inside margin", "fail": "worse", "inconclusive": "undecided"}
"""Words for single figures; PASS and FAIL are words for the whole gate."""
EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "inconclusive": 5}
_STYLES: dict[Outcome, str] = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


_EMPTY_CACHE = (
    "restart the server between runs, or let it empty its cache (vLLM: VLLM_SERVER_DEV_MODE=1; SGLang has /flush_cache)"
)


def _undecided(
    bounds: Mapping[str, Mapping[str, float]], enough_pairs: int | None = None, cause: Mapping[str, Any] | None = None
) -> str:
    parts = [
        f"{label_of(figure)} may be up to {numbers.percent(bound['up_to'])} worse (margin {100 * bound['margin']:g} %)"
        for figure, bound in bounds.items()
    ]
    if cause is not None:
        return "; ".join([*parts, Fact(**cause).worded(VERDICTS)])
    if enough_pairs is None:
        remedy = "their spread is too large for this margin: measure longer runs or allow more with --margin"
    else:
        remedy = f"with this spread about {enough_pairs} pairs show that equal sides are equal, or take longer runs"
    return "; ".join([*parts, remedy])


def _changes(by: Mapping[str, float], percent: str = "{:.0f} %") -> str:
    return ", ".join(f"{label_of(figure)} by {percent.format(100 * share)}" for figure, share in by.items())


_TEXTS = texts_beside(__file__)
VERDICTS: Texts = {
    # Reasons.
    **_TEXTS["reasons"],
    "not_in_every_run": lambda figures: (
        f"{', '.join(label_of(figure) for figure in figures)} cannot be judged, since some runs have no value or zero"
    ),
    "undecided": _undecided,
    "none_worse": lambda at_most: f"no gated figure is worse by more than {numbers.percent(at_most)} (95 % confidence)",
    "worse": lambda losses: "; ".join(
        f"{label_of(figure)} is {numbers.percent(loss)} worse" for figure, loss in losses.items()
    ),
    # What explains the spread of pairs.
    "second_better": lambda by: (
        f"whichever side ran second in a pair was better ({_changes(by)}): both runs of a pair send the same prompts, "
        f"which a prefix cache that nothing emptied still holds; {_EMPTY_CACHE}"
    ),
    "second_worse": lambda by: (
        f"whichever side ran second in a pair was worse ({_changes(by)}): the machine or server slows down within a "
        "pair (temperature, clocks, memory of the server); leave more time between runs, or restart it"
    ),
    # Notes.
    **_TEXTS["notes"],
    "cache_warm_for_second": (
        "every run of the {side} sent prompts that {server} had met in the other side's run, and whose prefix cache "
        f"nothing emptied and no figure shows: it may look faster for that; {_EMPTY_CACHE}"
    ),
    "policies_differ": lambda policies: f"the sides differ in policy: {' against '.join(policies)}",
    "sides_differ": lambda differences: (
        f"the sides differ, as allowed, in {listed([Difference(**each) for each in differences])}"
    ),
    "worse_classes": lambda losses: (
        f"worse in single classes of requests: {_changes(losses, '{:.1f}%')}; "
        f"--metric {name_of(next(iter(losses)))} gates such a figure"
    ),
    **PAIRING,
}
"""What a verdict says, by code."""


def worded_reason(verdict: Verdict) -> str:
    """Why the gate gives this verdict, in words."""
    return verdict.reason.worded(VERDICTS)


def show(verdict: Verdict, *, as_json: bool) -> None:
    """Write a verdict to stdout, as a table or as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(to_json(verdict), indent=2, allow_nan=False) + "\n")
        return
    out = Console(highlight=False)
    out.print(console(verdict, out.width))


def console(verdict: Verdict, width: int) -> RenderableType:
    """The verdict, its table, and notes, for a terminal of ``width`` characters."""
    tables = section_tables(_section(verdict), width)
    head = Text(f"{WORDS[verdict.outcome]}: {worded_reason(verdict)}.", style=_STYLES[verdict.outcome])
    return Group(head, Text(), *tables, Text(_legend(verdict), style="dim"), *(Text(line) for line in notes(verdict)))


def _section(verdict: Verdict) -> Section:
    names = ("baseline", "candidate", "worse by", "95 % interval", "p")
    rows = tuple(
        (
            label_of(entry.figure),
            numbers.figure(entry.figure, entry.baseline),
            numbers.figure(entry.figure, entry.candidate),
            _percent(entry.loss),
            interval(entry),
            f"{entry.p_adjusted:.3f}",
            _ROWS[entry.outcome] if entry.gated else "advisory",
        )
        for entry in verdict.judged
    )
    return Section("", (*labels("figure"), *map(Column, names), *labels("verdict")), rows)


def _legend(verdict: Verdict) -> str:
    head = (
        f"{counted(len(verdict.pairs), 'pair')}; worse by: latency over the baseline's, baseline's rate over the "
        "candidate's, geometric mean over the pairs, negative is better; "
    )
    if verdict.rules.sequential:
        margins = [f"{label_of(entry.figure)} {100 * entry.margin:g} %" for entry in verdict.judged if entry.gated]
        return (
            f"{head}p (one-sided: is the candidate worse?) and interval hold at every look (e-process), p "
            f"Holm-adjusted. Margin: {', '.join(margins) or 'nothing is gated'}."
        )
    return (
        f"{head}p: exact sign-flip test, one-sided (is the candidate worse?), Holm-adjusted. "
        f"Minimum detectable loss (failed with 80 % probability) and margin: {detectable(verdict)}."
    )


def detectable(verdict: Verdict) -> str:
    """The minimum detectable effect and the margin of every gated figure."""
    parts = []
    for entry in filter(attrgetter("gated"), verdict.judged):
        smallest = "none" if entry.detectable is None else f"{100 * entry.detectable:.1f} %"
        parts.append(f"{label_of(entry.figure)} {smallest} ({100 * entry.margin:g} %)")
    return ", ".join(parts) or "nothing is gated"


def interval(entry: Judged) -> str:
    """The interval as ``+1.2 to +3.4 %``."""
    return f"{_percent(entry.low).removesuffix(' %')} to {_percent(entry.high)}"


def notes(verdict: Verdict) -> list[str]:
    """Notes and the figures that could not be judged."""
    skipped = [
        f"not judged: {', '.join(label_of(f) for f, code in verdict.skipped.items() if code == why)}; {SKIPPED[why]}"
        for why in dict.fromkeys(verdict.skipped.values())
    ]
    of_server = told_once([[note] for note in verdict.notes if isinstance(note, RunWarning)], lambda _: "")
    others = [_text(note) for note in verdict.notes if not isinstance(note, RunWarning)]
    return [f"note: {text}" for text in (*others, *of_server, *skipped)]


def _text(note: Fact) -> str:
    return str(note) if isinstance(note, RunWarning) else note.worded(VERDICTS)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """One JSON object; infinite bounds are null."""
    return {
        "outcome": verdict.outcome,
        "reason": verdict.reason.to_dict(worded_reason(verdict)),
        "exit_code": EXIT_CODES[verdict.outcome],
        "sequential": verdict.rules.sequential,
        "pairs": [
            {"plan_hash": pair.baseline.plan_hash, "seed": pair.baseline.seed, "baseline": pair.baseline.run,
             "candidate": pair.candidate.run}
            for pair in verdict.pairs
        ],
        "figures": [numbers.finite(asdict(entry)) for entry in verdict.judged],
        "skipped": dict(verdict.skipped),
        "notes": [each.to_dict(_text(each)) for each in verdict.notes],
    }  # fmt: skip


_GATE = "ebbench gate"


def junit(verdict: Verdict, name: str = _GATE) -> bytes:
    """JUnit XML: one test case per figure. Inconclusive counts as an error, since it must not pass."""
    gated = [entry for entry in verdict.judged if entry.gated]
    suite = Xml.Element("testsuite", name=_legal(name))
    for entry in verdict.judged:
        case = Xml.SubElement(suite, "testcase", classname=_legal(name), name=entry.figure)
        if not entry.gated:
            Xml.SubElement(case, "skipped", message="advisory")
        elif entry.outcome == "fail":
            Xml.SubElement(case, "failure", message=sentence(entry))
        elif verdict.outcome == "inconclusive":
            why = sentence(entry) if entry.outcome != "pass" else worded_reason(verdict)
            Xml.SubElement(case, "error", message=why)
        Xml.SubElement(case, "system-out").text = _legal(sentence(entry))
    return _document(suite, name, "" if gated else worded_reason(verdict))


def _document(suite: Xml.Element, name: str, error: str) -> bytes:
    """The whole document; ``error``: why there is no gated figure."""
    if error:
        case = Xml.SubElement(suite, "testcase", classname=_legal(name), name="gate")
        Xml.SubElement(case, "error", message=_legal(error))
    suite.set("tests", str(len(suite)))
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    content: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _legal(text: str) -> str:
    return _ILLEGAL.sub("�", text)


def sentence(entry: Judged) -> str:
    """One figure in words."""
    return (
        f"{label_of(entry.figure)}: {numbers.figure(entry.figure, entry.baseline)} -> "
        f"{numbers.figure(entry.figure, entry.candidate)}, "
        f"{_percent(entry.loss)} worse ({interval(entry)}), p = {entry.p_adjusted:.3f}, "
        f"margin {100 * entry.margin:g} %"
    )


def summary(verdict: Verdict) -> str:
    """A GitHub job summary."""
    icon = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️"}[verdict.outcome]
    head = [f"## {icon} {WORDS[verdict.outcome]}", "", f"{markdown(worded_reason(verdict))}.", ""]
    below = ["", _legend(verdict), *(f"- {markdown(line)}" for line in notes(verdict))]
    return "\n".join([*head, *section_lines(_section(verdict)), *below]) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %" if math.isfinite(share) else ("∞" if share > 0 else "-∞")


# Files that a CI service reads.


@dataclass(frozen=True)
class VerdictFiles:
    """Where the verdict is written beside the console; ``summary`` None: to $GITHUB_STEP_SUMMARY, if that is set."""

    junit: Path | None = None
    summary: Path | None = None

    def write(self, verdict: Verdict) -> None:
        """Write a verdict."""
        self._write(junit(verdict), summary(verdict))

    def write_error(self, error: EbbenchError) -> None:
        """Write the error that prevented a verdict."""
        suite = _document(Xml.Element("testsuite", name=_GATE), _GATE, str(error))
        self._write(suite, f"## ⛔ NOT JUDGED (exit code {error.exit_code})\n\n{markdown(str(error))}\n")

    def _write(self, xml: bytes, page: str) -> None:
        if self.junit is not None:
            files.write_text(xml.decode(), self.junit)
        files.append_to_summary(page, self.summary)
