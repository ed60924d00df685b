"""The gate's verdict as console text, JSON, JUnit XML and a GitHub job summary."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as Xml

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebbench.analysis.gate.units import LABELS
from ebbench.analysis.gate.verdict import Judged, Outcome, Verdict
from ebbench.render import numbers
from ebbench.untrusted import markdown

WORDS: dict[Outcome, str] = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}
_ROWS: dict[Outcome, str] = {"pass": "inside margin", "fail": "worse", "inconclusive": "undecided"}
"""Words for single figures; PASS and FAIL are words for the whole gate."""
EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "inconclusive": 5}
_STYLES: dict[Outcome, str] = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def console(verdict: Verdict) -> RenderableType:
    """The verdict, its table, and notes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("figure", "") else "right", no_wrap=True)
    for entry in verdict.judged:
        table.add_row(*_cells(entry), style=None if entry.gated else "dim")
    head = Text(f"{WORDS[verdict.outcome]}: {verdict.reason}.", style=_STYLES[verdict.outcome])
    return Group(head, Text(), table, Text(_legend(verdict), style="dim"), *(Text(line) for line in notes(verdict)))


HEADERS = ("figure", "baseline", "candidate", "worse by", "95 % interval", "p", "")


def _cells(entry: Judged) -> list[str]:
    return [
        LABELS[entry.figure],
        _value(entry.figure, entry.baseline),
        _value(entry.figure, entry.candidate),
        _percent(entry.loss),
        interval(entry),
        f"{entry.p_adjusted:.3f}",
        _ROWS[entry.outcome] if entry.gated else "advisory",
    ]


def _legend(verdict: Verdict) -> str:
    head = (
        f"{len(verdict.pairs)} pairs; worse by: latency over the baseline's, baseline's rate over the candidate's, "
        "geometric mean over the pairs, negative is better; "
    )
    if verdict.rules.sequential:
        return (
            f"{head}p (one-sided: is the candidate worse?) and interval hold at every look (e-process), p "
            f"Holm-adjusted. Margin: {_margins(verdict)}."
        )
    return (
        f"{head}p: exact sign-flip test, one-sided (is the candidate worse?), Holm-adjusted. "
        f"Minimum detectable loss (failed with 80 % probability) and margin: {detectable(verdict)}."
    )


def detectable(verdict: Verdict) -> str:
    """The minimum detectable effect and the margin of every gated figure."""
    parts = []
    for entry in verdict.judged:
        if entry.gated:
            smallest = "none" if entry.detectable is None else f"{100 * entry.detectable:.1f} %"
            parts.append(f"{LABELS[entry.figure]} {smallest} ({100 * entry.margin:g} %)")
    return ", ".join(parts) or "nothing is gated"


def _margins(verdict: Verdict) -> str:
    """The margin of every gated figure."""
    gated = [entry for entry in verdict.judged if entry.gated]
    return ", ".join(f"{LABELS[entry.figure]} {100 * entry.margin:g} %" for entry in gated) or "nothing is gated"


def interval(entry: Judged) -> str:
    """The interval as ``+1.2 to +3.4 %``."""
    return f"{_percent(entry.low).removesuffix(' %')} to {_percent(entry.high)}"


def notes(verdict: Verdict) -> list[str]:
    """Notes and the figures that could not be judged."""
    skipped = [
        f"not judged: {', '.join(LABELS[f] for f, reason in verdict.skipped.items() if reason == why)}; {why}"
        for why in dict.fromkeys(verdict.skipped.values())
    ]
    return [f"note: {text}" for text in (*verdict.notes, *skipped)]


def to_json(verdict: Verdict) -> dict[str, Any]:
    """One JSON object; infinite bounds are null."""
    return {
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "exit_code": EXIT_CODES[verdict.outcome],
        "sequential": verdict.rules.sequential,
        "pairs": [
            {"plan_hash": pair.baseline.plan_hash, "seed": pair.baseline.seed, "baseline": pair.baseline.run,
             "candidate": pair.candidate.run}
            for pair in verdict.pairs
        ],
        "figures": [_finite(asdict(entry)) for entry in verdict.judged],
        "skipped": dict(verdict.skipped),
        "notes": list(verdict.notes),
    }  # fmt: skip


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def junit(verdict: Verdict, name: str = "ebbench gate") -> bytes:
    """JUnit XML: one test case per figure. Inconclusive counts as an error, since it must not pass."""
    gated = [entry for entry in verdict.judged if entry.gated]
    suite = Xml.Element("testsuite", name=_legal(name), tests=str(len(verdict.judged)))
    for entry in verdict.judged:
        case = Xml.SubElement(suite, "testcase", classname=_legal(name), name=entry.figure)
        if not entry.gated:
            Xml.SubElement(case, "skipped", message="advisory")
        elif entry.outcome == "fail":
            Xml.SubElement(case, "failure", message=sentence(entry))
        elif verdict.outcome == "inconclusive":
            Xml.SubElement(case, "error", message=sentence(entry) if entry.outcome != "pass" else verdict.reason)
        Xml.SubElement(case, "system-out").text = _legal(sentence(entry))
    if not gated:
        case = Xml.SubElement(suite, "testcase", classname=_legal(name), name="gate")
        Xml.SubElement(case, "error", message=_legal(verdict.reason))
        suite.set("tests", str(len(verdict.judged) + 1))
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    return _document(suite)


def junit_of_error(message: str, name: str = "ebbench gate") -> bytes:
    """JUnit XML of a gate that could not give a verdict: one test case with an error."""
    suite = Xml.Element("testsuite", name=_legal(name), tests="1", failures="0", errors="1", skipped="0")
    case = Xml.SubElement(suite, "testcase", classname=_legal(name), name="gate")
    Xml.SubElement(case, "error", message=_legal(message))
    return _document(suite)


def _document(suite: Xml.Element) -> bytes:
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    content: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _legal(text: str) -> str:
    """The text without characters that XML 1.0 does not allow."""
    return _ILLEGAL.sub("�", text)


def sentence(entry: Judged) -> str:
    """One figure in words."""
    return (
        f"{LABELS[entry.figure]}: {_value(entry.figure, entry.baseline)} -> {_value(entry.figure, entry.candidate)}, "
        f"{_percent(entry.loss)} worse ({interval(entry)}), p = {entry.p_adjusted:.3f}, "
        f"margin {100 * entry.margin:g} %"
    )


def summary(verdict: Verdict) -> str:
    """A GitHub job summary."""
    icon = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️"}[verdict.outcome]
    lines = [
        f"## {icon} {WORDS[verdict.outcome]}",
        "",
        f"{markdown(verdict.reason)}.",
        "",
        *markdown_table(verdict.judged),
    ]
    lines += ["", _legend(verdict), *(f"- {markdown(line)}" for line in notes(verdict))]
    return "\n".join(lines) + "\n"


def summary_of_error(message: str, exit_code: int) -> str:
    """GitHub job summary of a gate that could not give a verdict."""
    return f"## ⛔ NOT JUDGED (exit code {exit_code})\n\n{markdown(message)}\n"


def markdown_table(judged: Sequence[Judged]) -> list[str]:
    """The figures as lines of a Markdown table."""
    head = [header or "verdict" for header in HEADERS]
    rows = [[markdown(cell) for cell in _cells(entry)] for entry in judged]
    rule = ["---", *["---:"] * (len(head) - 2), "---"]
    return [f"| {' | '.join(row)} |" for row in [head, rule, *rows]]


def _value(figure: str, value: float) -> str:
    return numbers.duration_ms(value) if figure.endswith("_ms") else numbers.rate(value)


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %" if math.isfinite(share) else ("∞" if share > 0 else "-∞")
