"""The terminal output for runs: conditions, tables, verdict, reasons, caveats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ebbench.analysis.cases import ComparisonCase
from ebbench.analysis.documents import Document
from ebbench.analysis.environment import UNKNOWN_DEVICE, policy_settings
from ebbench.analysis.summary import ACCEPTED_ALIKE, Drafted, Summary, sets_drafts
from ebbench.analysis.validity import merge_failures
from ebbench.grouping import by_key
from ebbench.render import sentences, tables
from ebbench.render.documents import Console, section_tables
from ebbench.render.numbers import count, percent

# The conditions that all runs share, in sentences: machine, load, requests, limits. Tables show what differs.


def machine(summaries: Sequence[Summary]) -> str:
    """``qwen3-8b on h200 (1 GPU), engine sim in virtual time``."""
    model = _common(summaries, lambda s: s.model) or "several models"
    device = _common(summaries, lambda s: s.device) or "several devices"
    joined = _common(summaries, lambda s: str(s.machine))
    engine = _common(summaries, lambda s: s.engine) or "several engines"
    where = f"{device} ({joined})" if joined else device
    if device == UNKNOWN_DEVICE:
        where = "a server whose device is unknown"
    elif engine == "endpoint":
        where += " (device as stated, not verified)"
    times = {summary.virtual for summary in summaries}
    clock = "" if len(times) > 1 else " in virtual time" if times == {True} else ", real time"
    return f"{model} on {where}" + ("" if engine == "endpoint" else f", engine {engine}{clock}")


def load_and_limits(summaries: Sequence[Summary]) -> list[str]:
    """Lines about the load, the requests, the scheduler's limits and the policies' settings."""
    trace = _common(summaries, lambda s: s.load.trace)
    limits = _common(summaries, lambda s: s.machine.limits())
    reported = _common(summaries, lambda s: s.machine.reported)
    lines = (
        _load(summaries),
        f"{trace[0].upper()}{trace[1:]}." if trace else "",
        requests(summaries),
        _prefix_cache(summaries),
        _drafted(summaries),
        _clients(summaries),
        f"Scheduler: {limits}." if limits else "",
        f"The server reports: {reported}." if reported else "",
        _settings(summaries),
    )
    return [line for line in lines if line]


def _load(summaries: Sequence[Summary]) -> str:
    scenario = _common(summaries, lambda s: s.scenario)
    parts = [summary.load.parts() for summary in summaries]
    shared = [text for name, text in parts[0].items() if all(of_run.get(name) == text for of_run in parts)]
    named = f"scenario {scenario}" if scenario else "several scenarios"
    return f"Load: {', '.join([*shared, named])}, {_seeds(summaries)}."


def _prefix_cache(summaries: Sequence[Summary]) -> str:
    """The share of the prompt tokens that the prefix cache held, per policy if it differs: means over the seeds."""
    known = [summary for summary in summaries if summary.metrics.completed]
    told = [summary for summary in known if summary.metrics.prefix_hit_rate is not None]
    if not told:
        kept = ", and nothing emptied it before the run" if any(s.machine.cache_kept for s in summaries) else ""
        return f"Prefix cache: the server does not report hits{kept}." if known else ""
    shown = {
        policy: _range(_means(of_policy, lambda s: (s.metrics.prefix_hit_rate or 0.0, 1)), percent)
        for policy, of_policy in by_key((summary.policy, summary) for summary in told).items()
    }
    untold = f", not reported in {len(known) - len(told)} of {len(known)} runs" if len(told) < len(known) else ""
    if len(set(shown.values())) == 1:
        return f"Prefix cache: {next(iter(shown.values()))} of the prompt tokens were hits{untold}."
    shares = ", ".join(f"{share} ({policy})" for policy, share in shown.items())
    return f"Prefix cache: hits among the prompt tokens {shares}{untold}."


def _means(summaries: Sequence[Summary], of: Callable[[Summary], tuple[float, float]]) -> list[float]:
    """The ratio of two sums over the runs of each load and environment, which are not averaged with each other."""
    alike = by_key((tuple(sorted(summary.conditions.items())), of(summary)) for summary in summaries)
    return [sum(part for part, _ in sums) / sum(whole for _, whole in sums) for sums in alike.values()]


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    """``103``, or from the least to the greatest: ``62 to 103``."""
    return " to ".join(dict.fromkeys((show(min(values)), show(max(values)))))


def _drafted(summaries: Sequence[Summary]) -> str:
    """How many drafted tokens were accepted, per policy if it differs."""
    by_policy = by_key((summary.policy, summary.drafted) for summary in summaries if summary.drafted is not None)
    shown = by_key((_accepted(Drafted.over(runs)), policy) for policy, runs in by_policy.items())
    if len(shown) < 2:
        return "".join(f"Drafts: {text}." for text in shown)
    apart = "; ".join(f"{text} with {', '.join(policies)}" for text, policies in shown.items())
    # Whether so different shares of drafts were accepted that speeds differ by that alone.
    known = [summary.tokens_per_step or 1.0 for summary in summaries if not sets_drafts(summary.policy)]
    unlike = bool(known) and max(known) > (1.0 + ACCEPTED_ALIKE) * min(known)
    doubt = " A difference in speed may come from what was accepted, not from the policy." if unlike else ""
    return f"Drafts: {apart}.{doubt}"


def _accepted(drafted: Drafted) -> str:
    rate = "" if drafted.rate is None else f"{percent(drafted.rate)} of the drafted tokens accepted"
    if drafted.mean_acceptance_length is None:
        return rate or f"{drafted.accepted_tokens:,} tokens accepted"
    by_position = ", ".join(f"{share:.2f}" for share in drafted.acceptance)
    details = ", ".join(filter(None, (rate, by_position and f"by position: {by_position}")))
    return f"{drafted.mean_acceptance_length:.2f} tokens per step with drafts{f' ({details})' if details else ''}"


def _clients(summaries: Sequence[Summary]) -> str:
    several = [summary.clients for summary in summaries if summary.clients.count]
    if not several:
        shown = max((summary.clients for summary in summaries), key=lambda client: client.connections or 0)
        return f"Client: {shown}." if str(shown) else ""
    counts = {(client.count, client.workers, client.lost) for client in several}
    if len(counts) > 1 or len(several) < len(summaries):
        return "Clients: different numbers of nodes."
    return f"Clients: {max(several, key=lambda client: client.alignment_error_ms or 0.0)}."


def requests(summaries: Sequence[Summary]) -> str:
    """Number, workload and source of the requests, and mean lengths; ranges where loads or environments differ."""
    workload, source = _common(summaries, lambda s: s.workload), _common(summaries, lambda s: s.source)
    if workload is None:
        return ""
    line = f"Requests: {_range([s.metrics.planned for s in summaries], count)} of {workload}"
    line += "" if source is None else f", lengths from {source or 'the plan'}"
    if done := [summary for summary in summaries if summary.metrics.completed]:
        mean_in = _range(_means(done, lambda s: (s.metrics.total_input_tokens, s.metrics.completed)), count)
        mean_out = _range(_means(done, lambda s: (s.metrics.total_output_tokens, s.metrics.completed)), count)
        which = "" if all(s.metrics.completed == s.metrics.planned for s in done) else " of those completed"
        line += f", mean{which} {mean_in} tokens in, {mean_out} out"
    return f"{line}."


def _settings(summaries: Sequence[Summary]) -> str:
    """The settings in force with defaults; settings shared by several policies are named once.

    Left out: values that a policy computes by itself (they are shown with the reasons), and settings that are part of
    its name, requests waiting in the order they came (``order=fcfs``), and those of a policy that is only a label.
    """
    owners: dict[str, list[str]] = {}
    known = [summary for summary in summaries if summary.machine.policy_known]
    for policy in dict.fromkeys(summary.policy for summary in known):
        for name, value in (policy_settings(policy) or {}).items():
            if value is not None and f"{name}=" not in policy and (name, value) != ("order", "fcfs"):
                number = f"{value:g}" if isinstance(value, float) else value
                shown = ("off", "on")[value] if isinstance(value, bool) else number
                owners.setdefault(f"{name} {shown}", []).append(policy)
    shared = by_key((tuple(policies), text) for text, policies in owners.items())
    parts = [f"{', '.join(policies)}: {', '.join(texts)}" for policies, texts in shared.items()]
    return f"Settings of {'; '.join(parts)}." if parts else ""


def _seeds(summaries: Sequence[Summary]) -> str:
    seeds = sorted({summary.seed for summary in summaries})
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    in_a_row = seeds[-1] - seeds[0] == len(seeds) - 1  # they are different; a date may be among them: no range of them
    return f"seeds {seeds[0]}–{seeds[-1]}" if in_a_row else f"seeds {', '.join(map(str, seeds))}"


def _common(summaries: Sequence[Summary], of: Callable[[Summary], str]) -> str | None:
    values = {of(summary) for summary in summaries}
    return values.pop() if len(values) == 1 else None


def render(cases: Sequence[ComparisonCase], *, width: int, all_percentiles: bool = False) -> RenderableType:
    """The output for ``cases``, for a terminal of ``width`` characters."""
    summaries = [summary for case in cases for summary in case.summaries]
    document = tables.comparison(cases, all_percentiles=all_percentiles)
    parts: list[RenderableType] = [Text(machine(summaries), style="bold")]
    parts += [Text(line) for line in load_and_limits(summaries)]
    for section in document.sections:
        parts += [Text(), *section_tables(section, width)]
    parts += [Text(note, style="dim") for note in document.notes]
    for section in (part for case in cases for part in tables.parts(case)):
        parts += [Text(), *section_tables(section, width)]
    parts += _conclusions(cases)
    parts += notes("Requests that did not complete", failure_lines(summaries))
    parts += notes("Keep in mind", sentences.keep_in_mind(cases))
    parts += notes("Stored in", [summary.run_dir for summary in summaries])
    return Stack(*parts)


def document(cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> Document:
    """The same content as a document for Markdown and CSV: tables, and everything else as notes."""
    summaries = [summary for case in cases for summary in case.summaries]
    compared = tables.comparison(cases, all_percentiles=all_percentiles)
    said = (f"{title}: {line}" if title else line for title, lines, _ in sentences.verdicts(cases) for line in lines)
    failed = (f"Did not complete: {line}" for line in failure_lines(summaries))
    told = (*load_and_limits(summaries), *compared.notes, *said, *failed, *sentences.keep_in_mind(cases))
    parts = [section for case in cases for section in tables.parts(case)]
    return replace(compared, title=machine(summaries), sections=(*compared.sections, *parts), notes=told)


def print_report(console: Console, cases: Sequence[ComparisonCase], *, all_percentiles: bool = False) -> None:
    """Print the output at the console's width."""
    console.print(render(cases, width=console.width, all_percentiles=all_percentiles), soft_wrap=False)


def _conclusions(cases: Sequence[ComparisonCase]) -> list[RenderableType]:
    """The verdict of each case; for a single case also the reasons."""
    verdicts = sentences.verdicts(cases)
    if len(cases) == 1:
        [(_, lines, shown)] = verdicts
        head = [Text(line, style="bold green" if shown else "bold") for line in lines[:1]]
        return [Text(), *head, *map(Text, lines[1:]), *_explanations(cases[0])]
    parts: list[RenderableType] = [Text()]
    for title, lines, _ in verdicts:
        parts += [Text(title, style="bold"), *map(_bullet, lines)] if title else map(Text, lines)
    return [*parts, Text("For the reasons, show the runs of one load and environment alone.", style="dim")]


def _explanations(case: ComparisonCase) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for group in case.groups:
        if lines := [line for explanation in group.explanations[:1] for line in sentences.why(explanation)]:
            note = f" (seed {group.summaries[0].seed})" if len(group.summaries) > 1 else ""
            parts += [Text(f"{group.policy}{note}", style="bold"), *map(_bullet, lines)]
    return [Text(), *parts] if parts else []


def notes(title: str, lines: Sequence[str]) -> list[RenderableType]:
    """Lines under a title; nothing without lines."""
    return [Text(), Text(title, style="bold"), *map(_bullet, lines)] if lines else []


def _bullet(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)


def failure_lines(summaries: Sequence[Summary]) -> list[str]:
    """One line per error class and cause, over all runs of a policy; the policy is named if there are several."""
    by_policy = by_key((summary.policy, summary) for summary in summaries)
    return [
        f"{policy}: {failure}" if len(by_policy) > 1 else str(failure)
        for policy, runs in by_policy.items()
        for failure in merge_failures(summary.failures for summary in runs)
    ]
