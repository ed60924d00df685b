"""What the user sees after a run: the table, the winner, the reasons, the caveats."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.padding import Padding
from rich.text import Text

from ebbench.analysis.compare.policies import Group
from ebbench.analysis.summary import Summary
from ebbench.render import tables, words
from ebbench.render.failures import failure_lines


def render(groups: Sequence[Group], phases: Sequence[Summary], *, width: int) -> RenderableType:
    """Everything about some runs. ``phases`` holds the phases of every run whose plan has several."""
    first = groups[0].summaries[0]
    parts: list[RenderableType] = [
        Text(f"{first.model} on {first.device}, engine {first.engine}", style="bold"),
        Text(words.lengths([summary for group in groups for summary in group.summaries])),
        Text(),
        tables.comparison_table(groups, width=width),
        Text(_legend(groups), style="dim"),
    ]
    if phases:
        parts += [Text(), tables.phase_table(phases)]
    parts += [Text(), *_paragraphs(words.verdict(groups), "bold green"), *_stories(groups)]
    parts += _notes("Requests that did not complete", failure_lines([s for group in groups for s in group.summaries]))
    parts += _notes("Keep in mind", [*words.missing(groups), *words.doubts(groups), *words.caveats(groups)])
    parts += _notes("Stored in", [s.run_dir for group in groups for s in group.summaries])
    return Stack(*parts)


def print_report(console: Console, groups: Sequence[Group], phases: Sequence[Summary] = ()) -> None:
    """Print it at the console's width."""
    console.print(render(groups, phases, width=console.width), soft_wrap=False)


def _legend(groups: Sequence[Group]) -> str:
    return (
        f"{_repeats(groups)}whole: first intended start to last completion; steady: while the load is at its target; "
        "TTFT and E2EL count from the intended start; –: undefined or too few samples."
    )


def _repeats(groups: Sequence[Group]) -> str:
    """What the means are over; runs of one seed are not several seeds."""
    first = groups[0]
    runs = len(first.summaries)
    if runs < 2:
        return ""
    if all(group.copies for group in groups):
        return f"{runs} repeats that agree in every figure: no spread; "
    over = "seeds" if len(set(first.seeds)) == runs else "runs"
    return f"mean ± standard deviation over {runs} {over}; "


def _paragraphs(lines: Sequence[str], style_of_first: str) -> list[Text]:
    return [Text(line, style=style_of_first if index == 0 else "") for index, line in enumerate(lines)]


def _stories(groups: Sequence[Group]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for group in groups:
        for story in group.stories[:1]:
            lines = words.why(story)
            if lines:
                note = f" (seed {group.summaries[0].seed})" if len(group.summaries) > 1 else ""
                parts.append(Text(f"{group.policy}{note}", style="bold"))
                parts += [_bullet(line) for line in lines]
    return [Text(), *parts] if parts else []


def _notes(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    return [Text(), Text(title, style="bold"), *(_bullet(line) for line in lines)]


def _bullet(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)
