"""The terminal output for runs: conditions, tables, verdict, reasons, caveats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ebbench.analysis.compare.cases import ComparisonCase
from ebbench.analysis.documents import Document
from ebbench.analysis.failures import merge_failures
from ebbench.analysis.summary import Summary
from ebbench.render import conditions, sentences, tables
from ebbench.render.console import Console
from ebbench.render.documents import section_tables
from ebbench.render.doubts import doubts_of


def render(cases: Sequence[ComparisonCase], *, width: int, all_percentiles: bool = False) -> RenderableType:
    """The output for ``cases``, for a terminal of ``width`` characters."""
    summaries = [summary for case in cases for summary in case.summaries]
    document = tables.comparison(cases, all_percentiles=all_percentiles)
    parts: list[RenderableType] = [Text(conditions.machine(summaries), style="bold")]
    parts += [Text(line) for line in conditions.load_and_limits(summaries)]
    for section in document.sections:
        parts += [Text(), *section_tables(section, width)]
    parts += [Text(note, style="dim") for note in document.notes]
    for section in filter(None, map(tables.phases, cases)):
        parts += [Text(), *section_tables(section, width)]
    parts += _conclusions(cases)
    groups = [group for case in cases for group in case.groups]
    parts += notes("Requests that did not complete", failure_lines(summaries))
    parts += notes("Keep in mind", [*sentences.missing(groups), *doubts_of(cases), *sentences.caveats(groups)])
    parts += notes("Stored in", [summary.run_dir for summary in summaries])
    return Stack(*parts)


def document(cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> Document:
    """The same content as a document for Markdown and CSV: tables, and everything else as notes."""
    summaries = [summary for case in cases for summary in case.summaries]
    groups = [group for case in cases for group in case.groups]
    compared = tables.comparison(cases, all_percentiles=all_percentiles)
    said = [
        *conditions.load_and_limits(summaries),
        *compared.notes,
        *(f"{title}: {line}" if title else line for title, lines, _ in sentences.verdicts(cases) for line in lines),
        *(f"Did not complete: {line}" for line in failure_lines(summaries)),
        *sentences.missing(groups),
        *doubts_of(cases),
        *sentences.caveats(groups),
    ]
    phases = tuple(filter(None, map(tables.phases, cases)))
    return replace(
        compared, title=conditions.machine(summaries), sections=(*compared.sections, *phases), notes=tuple(said)
    )


def print_report(console: Console, cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> None:
    """Print the output at the console's width."""
    console.print(render(cases, width=console.width, all_percentiles=all_percentiles), soft_wrap=False)


def _conclusions(cases: Sequence[ComparisonCase]) -> list[RenderableType]:
    """The verdict of each case; for a single case also the reasons."""
    found = sentences.verdicts(cases)
    if len(cases) == 1:
        [(_, lines, shown)] = found
        return [Text(), *_paragraphs(lines, shown), *_explanations(cases[0])]
    parts: list[RenderableType] = [Text()]
    for title, lines, _ in found:
        parts += [Text(title, style="bold"), *map(_bullet, lines)] if title else map(Text, lines)
    return [*parts, Text("For the reasons, show the runs of one load and environment alone.", style="dim")]


def _paragraphs(lines: Sequence[str], certain: bool) -> list[Text]:
    first = "bold green" if certain else "bold"
    return [Text(line, style=first if index == 0 else "") for index, line in enumerate(lines)]


def _explanations(case: ComparisonCase) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for group in case.groups:
        for explanation in group.explanations[:1]:
            lines = sentences.why(explanation)
            if lines:
                note = f" (seed {group.summaries[0].seed})" if len(group.summaries) > 1 else ""
                parts.append(Text(f"{group.policy}{note}", style="bold"))
                parts += [_bullet(line) for line in lines]
    return [Text(), *parts] if parts else []


def notes(title: str, lines: Sequence[str]) -> list[RenderableType]:
    """Lines under a title; nothing without lines."""
    if not lines:
        return []
    return [Text(), Text(title, style="bold"), *(_bullet(line) for line in lines)]


def _bullet(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)


def failure_lines(summaries: Sequence[Summary]) -> list[str]:
    """One line per error class and cause, over all runs of a policy; the policy is named if there are several."""
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    lines = []
    for policy in policies:
        failures = merge_failures(summary.failures for summary in summaries if summary.policy == policy)
        name = f"{policy}: " if len(policies) > 1 else ""
        lines += [f"{name}{failure}" for failure in failures]
    return lines
