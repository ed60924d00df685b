"""Numbers, words, tables and progress lines."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbench.analysis.cases import Group, comparison_cases, group_by_policy
from ebbench.analysis.documents import text
from ebbench.analysis.explain import CrossoverFacts, DecisionFacts, Explanation, Spread, StepFacts, explain
from ebbench.analysis.metrics import Distribution, Slo, SteadyRates
from ebbench.analysis.summary import summarise
from ebbench.records.run import RunWriter
from ebbench.render import sentences, tables
from ebbench.render.documents import Console, as_csv
from ebbench.render.report import load_and_limits, print_report, requests
from ebbench.render.sentences import doubts
from ebbench.runs.conclude import RunContext, conclude
from ebbench.spec.server import EngineOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of
from vllm_eb.policy import parse_policy


def made_groups(path: Path, *policies: str, gaps: dict[str, int] | None = None, **faults: Any) -> tuple[Group, ...]:
    summaries, explanations = [], []
    for policy in policies:
        engine, plan, spec = MadeEngine(**faults), plan_of(40), parse_policy(policy)
        engine.GAP_MS = engine.GAP_MS | (gaps or {})
        result = engine.run(plan, spec, device_of(), EngineOptions(), None)
        with RunWriter.create(path / policy.replace(":", "-")) as writer:
            run = conclude(writer, RunContext(plan, spec, "sim", device_of(), EngineOptions(), 1), result)[0]
        summaries.append(summarise(run))
        explanations.append(explain(run))
    return group_by_policy(summaries, explanations)


def test_the_winner_is_measured_against_v1(tmp_path: Path) -> None:
    lines = sentences.verdict(made_groups(tmp_path, "eb", "v1", "ebplus")).lines
    assert lines[0].startswith("ebplus is ahead: ")
    assert "+100.0 % over v1" in lines[0]
    assert lines[1] == "Against ebplus: eb -9.1 %, v1 -50.0 %."
    assert "time per token 10 ms (median) against 20 ms" in lines[2]


def test_a_winning_v1_is_compared_with_the_second_best(tmp_path: Path) -> None:
    lines = sentences.verdict(made_groups(tmp_path, "v1", "eb", "ebplus", gaps={"v1": 5})).lines
    assert lines[0].startswith("v1 is ahead: ")
    assert "+100.0 % over ebplus" in lines[0]


def as_open_loop(groups: tuple[Group, ...]) -> list[Group]:
    return [
        replace(group, summaries=tuple(replace(summary, open_loop=True) for summary in group.summaries))
        for group in groups
    ]


def with_steady(group: Group, output_throughput: float) -> Group:
    rates = SteadyRates(0, 1, 1, 1, 1, output_throughput, output_throughput)
    [summary] = group.summaries
    return replace(group, summaries=(replace(summary, metrics=replace(summary.metrics, steady=rates)),))


def test_latency_decides_where_arrivals_set_the_throughput(tmp_path: Path) -> None:
    v1, eb = as_open_loop(made_groups(tmp_path, "v1", "eb", gaps={"v1": 10, "eb": 20}))
    lines = sentences.verdict([with_steady(v1, 1000), with_steady(eb, 1001)]).lines
    assert lines[0].startswith("v1 is ahead: a request takes 210 ms (median) against 420 ms under eb.")
    assert "keep up with the arrivals" in lines[0]
    # An overloaded server does not keep up: throughput decides again.
    assert sentences.verdict([with_steady(v1, 1000), with_steady(eb, 900)]).lines[0].startswith("v1 is ahead")
    equal = as_open_loop(made_groups(tmp_path / "b", "v1", "eb", gaps={"v1": 10, "eb": 10}))
    assert sentences.verdict([with_steady(g, 10) for g in equal]).lines[0].startswith("No winner: all policies keep up")


def test_limits_given_are_answered(tmp_path: Path) -> None:
    groups = made_groups(tmp_path, "v1", "eb")
    shares = {"v1": 0.25, "eb": 1.0}
    asked = [
        replace(
            group,
            summaries=tuple(
                replace(s, slo=Slo(tpot=15), metrics=replace(s.metrics, slo_attainment=shares[group.policy]))
                for s in group.summaries
            ),
        )
        for group in groups
    ]
    assert sentences.verdict(asked).lines[-1] == "Requests within tpot:15 ms: v1 25.0 %, eb 100.0 %."


def with_goodput(group: Group, request_goodput: float) -> Group:
    return replace(
        group,
        summaries=tuple(
            replace(s, slo=Slo(tpot=15), metrics=replace(s.metrics, request_goodput=request_goodput))
            for s in group.summaries
        ),
    )


def test_goodput_decides_where_limits_were_given(tmp_path: Path) -> None:
    v1, eb, ebplus = made_groups(tmp_path, "v1", "eb", "ebplus")
    lines = sentences.verdict([with_goodput(v1, 20), with_goodput(eb, 5), with_goodput(ebplus, 10)]).lines
    assert lines[0] == "v1 is ahead: 20 requests/s within the limits, +100.0 % over ebplus (10)."
    assert lines[1].startswith("Output tokens/s over the whole run: v1 ")
    assert lines[-1].startswith("Requests within tpot:15 ms: v1 ")
    none = sentences.verdict([with_goodput(v1, 20), with_goodput(eb, 0)]).lines
    assert none[0] == "v1 is ahead: 20 requests/s within the limits (0 under eb)."
    # If limits do not separate the policies, or no request met them, throughput decides.
    for rates in ((7, 7), (0, 0)):
        assert (
            sentences.verdict([with_goodput(g, r) for g, r in zip((v1, eb), rates, strict=True)])
            .lines[0]
            .startswith("eb is ahead")
        )


def test_the_seeds_of_a_group_are_listed(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    [summary] = group.summaries
    for seeds, shown in (((3,), "seed 3."), ((0, 1, 2), "seeds 0–2."), ((1, 5), "seeds 1, 5.")):
        assert load_and_limits([replace(summary, seed=seed) for seed in seeds])[0].endswith(shown)


def test_means_of_lengths_say_that_they_are_of_completed_requests(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    [summary] = group.summaries
    assert "of those completed" not in requests([summary])
    metrics = replace(summary.metrics, planned=summary.metrics.completed + 3)
    assert "mean of those completed" in requests([replace(summary, metrics=metrics)])


def test_the_header_gives_ranges_where_loads_differ(tmp_path: Path) -> None:
    """It had the figures of the first run, as if they were those of all."""
    [group] = made_groups(tmp_path, "v1")
    [run] = group.summaries
    run = replace(run, metrics=replace(run.metrics, prefix_hit_rate=0.25))
    done = run.metrics.completed
    longer = replace(run.metrics, planned=3 * done, completed=3 * done, total_input_tokens=60 * done)
    busier = replace(run, load=replace(run.load, max_concurrency=77), metrics=replace(longer, prefix_hit_rate=None))
    told = load_and_limits([run, busier])
    assert f"Requests: {done} to {3 * done} of {run.workload}" in told[1]
    mean_in = run.metrics.total_input_tokens / done
    low, high = sorted((mean_in, 20))
    assert f"mean {low:.0f} to {high:.0f} tokens in" in told[1]
    assert told[2] == "Prefix cache: 25.0 % of the prompt tokens were hits, not reported in 1 of 2 runs."
    repeat = replace(run, seed=1, metrics=replace(run.metrics, total_input_tokens=round(done * (mean_in + 20))))
    assert f"mean {mean_in + 10:.0f} tokens in" in requests([run, repeat]), "seeds are one row: their mean"
    assert load_and_limits([run, replace(busier, scenario="poisson")])[0].endswith(
        " sessions, several scenarios, seed 0."
    )


def test_a_tie_has_no_winner(tmp_path: Path) -> None:
    lines = sentences.verdict(made_groups(tmp_path, "v1", "ebplus", gaps={"v1": 10})).lines
    assert lines == ["No winner: v1 and ebplus differ by 0.0 %."]


def test_a_single_policy_and_none_at_all(tmp_path: Path) -> None:
    assert sentences.verdict(made_groups(tmp_path / "a", "v1")).lines[0].startswith("v1: 3")
    assert (
        sentences.verdict(made_groups(tmp_path / "b", "v1", "eb", fail_from=0))
        .lines[0]
        .startswith("No policy completed")
    )


def test_shared_warnings_are_said_once_and_others_name_their_policy(tmp_path: Path) -> None:
    from ebbench.records.warnings import RunWarning

    first, second = made_groups(tmp_path, "v1", "eb")
    own = replace(
        second.summaries[0], warnings=(*second.summaries[0].warnings, RunWarning("x", message="Odd.", remedy="Look."))
    )
    lines = sentences.caveats([first, replace(second, summaries=(own,))])
    assert lines.count("lengths are made up") == 1
    assert "eb: Odd. Look." in lines


def test_warnings_that_differ_in_numbers_alone_are_one_with_their_range(tmp_path: Path) -> None:
    from ebbench.records.warnings import warning

    [group] = made_groups(tmp_path, "v1")
    [summary] = group.summaries
    shares = {"v1": (47, 9, 44), "v0": (49,)}
    groups = [
        replace(
            group,
            policy=policy,
            summaries=tuple(
                replace(
                    summary,
                    policy=policy,
                    warnings=(warning("short-steady-window", share=n / 100, option="log", asked=9),),
                )
                for n in values
            ),
        )
        for policy, values in shares.items()
    ]
    (line,) = sentences.caveats(groups)
    assert line.startswith("Only 9 to 49 % of the run is steady;")
    assert sentences.caveats([replace(groups[0], summaries=(*groups[0].summaries, summary))])[0].startswith(
        "Only 9 to 47 %"
    )


def test_invalid_runs_are_marked_in_table_and_words(tmp_path: Path) -> None:
    groups = made_groups(tmp_path, "v1", "eb", fail_from=30)
    shown = printed(groups, 100)
    assert "v1 INVALID" in shown
    assert "INVALID v1 (seed 0): 10 of 40 requests failed" in shown


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("too_few_active", "too few active sequences"),
        ("fewer than 16 active sequences", "fewer than 16 active sequences"),  # in a run of schema version 1
    ],
)
def test_a_crossover_never_evaluated_is_explained(stored: str, shown: str) -> None:
    facts = DecisionFacts(0, None, None, None, None, None, None, None, 2, stored, ())
    assert sentences.why(Explanation("ebplus", None, facts)) == [f"Crossover: never evaluated ({shown})."]


def test_the_sentence_on_the_interval_says_where_no_prompt_was_held_back() -> None:
    steps = StepFacts(3, {}, 0.0, ())
    assert (
        "Interval: no prompt was held back, so this is v1."
        in sentences.why(Explanation("cadence:every=8", steps, None))[-1]
    )
    assert "Interval" not in sentences.why(Explanation("v1", steps, None))[-1]


def test_the_crossover_sentence_follows_from_both_sides() -> None:
    sides = CrossoverFacts(9, 0, 1e-5, 2e-5, 1e-6, 0.5, 300)
    facts = DecisionFacts(0, None, None, None, None, None, None, sides, 9, "", ())
    [line] = sentences.why(Explanation("ebplus", None, facts))
    assert "10 µs more in a mixed batch" in line
    assert ": mixed batches, at 300 active sequences" in line
    assert "exclusive ahead in 0 of 9" in line


def printed(groups: tuple[Group, ...], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    explanations = [explanation for group in groups for explanation in group.explanations]
    summaries = [summary for group in groups for summary in group.summaries]
    print_report(console, comparison_cases(summaries, explanations if len(explanations) == len(summaries) else ()))
    return console.file.getvalue()  # type: ignore[attr-defined]


POLICIES = ("v1", "ebplus", "deferred:k=4")


@pytest.mark.parametrize("width", [60, 80, 104, 120, 200])
@pytest.mark.parametrize("all_percentiles", [False, True])
def test_every_column_is_shown_at_every_width_beside_its_policy(
    tmp_path: Path, width: int, all_percentiles: bool
) -> None:
    from ebbench.render.documents import section_tables

    cases = comparison_cases([summary for group in made_groups(tmp_path, *POLICIES) for summary in group.summaries])
    [section] = tables.comparison(cases, all_percentiles=all_percentiles).sections
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in section_tables(section, width):
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    rules = [place for place, line in enumerate(lines) if line.startswith("──")]
    for place in rules:
        assert [line.split()[0] for line in lines[place + 1 : place + 4]] == list(POLICIES)
    heads = " ".join(word for place in rules for line in lines[place - 2 : place] for word in line.split()).split()
    wanted = [word for column in section.columns[1:] for word in column.name.split()]
    assert sorted(heads) == sorted([*wanted, *["policy"] * len(rules)])


def test_too_few_samples_show_the_highest_percentile_that_they_support(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    assert tables.sound_percentile([group], "ttft") is None  # 40 requests
    assert tables.sound_percentile([group], "itl") == "p99"
    [summary] = group.summaries

    def with_samples(count: int) -> Group:
        ttft = Distribution.of_ns(np.arange(1, count + 1) * 1e6)
        return replace(group, summaries=(replace(summary, metrics=replace(summary.metrics, ttft=ttft)),))

    for count, name in ((63, None), (64, "p90"), (130, "p95"), (662, "p99")):
        assert tables.sound_percentile([with_samples(count)], "ttft") == name
    assert tables.sound_percentile([with_samples(64), with_samples(662)], "ttft") == "p90"  # one column, one percentile
    shown = printed((with_samples(130),), 200)
    assert "TTFT: the highest percentile" in " ".join(shown.split())
    [header] = [line for line in shown.splitlines() if "TTFT" in line and "TPOT" in line and "ITL" in line]
    column = header.rindex("TTFT") + len("TTFT")
    below = shown.splitlines()[shown.splitlines().index(header) + 1]
    assert below[:column].endswith("p95")


def test_percentiles_of_too_few_samples_are_marked_where_asked_for(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    found = tables.comparison(comparison_cases(group.summaries), all_percentiles=True)
    [section] = found.sections
    marked = {
        column.key: text(value, column).endswith(" ?")
        for column, value in zip(section.columns, section.rows[0], strict=True)
    }
    assert marked["p99_ttft_ms"]
    assert marked["p90_e2el_ms"]
    assert not marked["p99_itl_ms"]
    [summary] = group.summaries
    told = summary.to_dict(all_percentiles=True)
    assert told["p99_ttft_ms"] is None
    assert told["unsound_percentiles"]["p99_ttft_ms"] == pytest.approx(summary.metrics.ttft.estimates[2])
    assert "p99_itl_ms" not in told["unsound_percentiles"]
    assert "unsound_percentiles" not in summary.to_dict()
    row = as_csv(found).splitlines()
    values = dict(zip(row[0].split(","), row[1].split(","), strict=True))
    assert values["p99_ttft_ms_sound"] == "false"
    assert float(values["p99_ttft_ms"]) == told["unsound_percentiles"]["p99_ttft_ms"]


def test_deviations_are_columns_of_their_own_in_csv(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    [summary] = group.summaries
    faster = replace(summary, seed=1, metrics=replace(summary.metrics, output_throughput=1.0))
    row = as_csv(tables.comparison(comparison_cases([summary, faster]))).splitlines()
    values = dict(zip(row[0].split(","), row[1].split(","), strict=True))
    mean = (1 + (summary.metrics.output_throughput or 0)) / 2
    assert float(values["output_throughput"]) == pytest.approx(mean)
    assert float(values["output_throughput_std"]) == pytest.approx(abs(mean - 1) * 2**0.5)


def test_the_header_says_which_settings_apply_shared_ones_once(tmp_path: Path) -> None:
    groups = made_groups(tmp_path, "v1", "eb:window=200", "ebplus", "deferred:k=8")
    lines = load_and_limits([summary for group in groups for summary in group.summaries])
    [told] = [line for line in lines if line.startswith("Settings")]
    assert "eb:window=200, ebplus: " in told
    own = told.rpartition("; ebplus: ")[2]
    assert "min_active 1" in own
    assert "window 500" in own
    assert "estimator" not in own, "said once, for both"
    assert told.count("min_samples 30") == 1
    assert "kv_gate on" in told
    assert not any(hidden in told for hidden in ("None", "window 200", "deferred", "v1"))
    assert not any("Settings" in line for line in load_and_limits(groups[0].summaries))


def facts_of(k: float, n: float, updates: int) -> DecisionFacts:
    k_spread, n_spread, theta = Spread(k, k, k), Spread(n, n, n), Spread(k / n, k / n, k / n)
    return DecisionFacts(updates, k_spread, n_spread, theta, theta, theta, None, None, 0, "", ())


@pytest.mark.parametrize(
    ("policy", "updates", "line"),
    [
        ("eb", 3, "when the requests waiting are 25 % of the batch they would join (k* = 8 of N* = 32 slots; theta*"),
        (
            "eb:k=8",
            0,
            "when the requests waiting are 25 % of the batch they would join (k = 8 of N = 32 slots), fixed.",
        ),
        ("deferred:k=8", 0, "when k = 8 of N = 32 slots are idle, fixed."),
        (
            "eb:theta=0.25",
            0,
            "when the requests waiting are 25 % of the batch they would join (k = 8 of N = 32 slots), fixed.",
        ),
        (
            "eb:theta_min=0.2",
            0,
            "when the requests waiting are 25 % of the batch they would join (k = 8 of N = 32 "
            "slots), the starting value: the run ended before the first update.",
        ),
    ],
)
def test_the_sentence_on_refills_states_the_rule_of_each_policy(policy: str, updates: int, line: str) -> None:
    [told] = sentences.why(Explanation(policy, None, facts_of(8, 32, updates)))
    assert told.startswith(f"Refill: {line}")


def test_a_winner_by_start_and_end_of_the_run_is_doubted(tmp_path: Path) -> None:
    v1, eb = made_groups(tmp_path, "v1", "eb", gaps={"v1": 10, "eb": 20})  # eb is slower over the whole run
    told = doubts([with_steady(v1, 1000), with_steady(eb, 1100)])
    assert told[0].startswith("eb: -50.0 % over the whole run but +10.0 % while it is steady.")
    assert told[1].startswith("One run of each policy does not tell")
    assert len(doubts([with_steady(v1, 1000), with_steady(eb, 600)])) == 1
    assert doubts([v1]) == []


def without_output(group: Group, *, valid: bool = True) -> Group:
    """Its first run completed nothing."""
    first, *others = group.summaries
    nothing = replace(first.metrics, completed=0, output_throughput=None, steady=None)
    return replace(group, summaries=(replace(first, metrics=nothing, valid=valid), *others))


def test_there_is_no_winner_where_only_one_policy_completed_requests(tmp_path: Path) -> None:
    v1, eb = as_open_loop(made_groups(tmp_path, "v1", "eb"))
    [line] = sentences.verdict([with_steady(v1, 1000), without_output(eb)]).lines
    assert line == "No winner: eb is without a completed request, so there is no figure to compare."
    seeds = [replace(g, summaries=(*g.summaries, replace(g.summaries[0], seed=1))) for g in (eb, v1)]
    [line] = sentences.verdict([without_output(seeds[0]), seeds[1]]).lines
    assert line.startswith("No winner: eb (seed 0) is without a completed request")


def test_an_invalid_run_is_never_compared(tmp_path: Path) -> None:
    v1, eb = made_groups(tmp_path, "v1", "eb")
    broken = replace(v1, summaries=tuple(replace(s, valid=False) for s in v1.summaries))
    assert sentences.verdict([broken, eb]).lines == ["No winner: v1 is INVALID, and an INVALID run is never compared."]
    assert sentences.verdict([broken]).lines[0].startswith("v1: ")


def test_different_limits_have_no_winner_and_no_line_of_limits(tmp_path: Path) -> None:
    v1, eb = (with_goodput(g, 5) for g in made_groups(tmp_path, "v1", "eb"))
    other = replace(eb, summaries=tuple(replace(s, slo=Slo(tpot=99)) for s in eb.summaries))
    [line] = sentences.verdict([v1, other]).lines
    assert line.startswith("No winner: these runs differ in limits (--goodput")
    unlimited = replace(eb, summaries=tuple(replace(s, slo=Slo()) for s in eb.summaries))
    assert not any("Requests within" in line for line in sentences.verdict([v1, unlimited]).lines)


def test_runs_of_one_seed_are_not_averaged(tmp_path: Path) -> None:
    [group] = made_groups(tmp_path, "v1")
    [summary] = group.summaries
    slower = replace(summary, metrics=replace(summary.metrics, output_throughput=1.0))
    shown = printed((replace(group, summaries=(summary, slower)),), 120)
    assert "Several measurements of the same plan and policy: shown apart, not averaged" in shown
    assert "±" not in shown
    shown = printed((replace(group, summaries=(summary, replace(summary, seed=1))),), 120)
    assert "2 repeats that agree in every figure: no spread" in shown


def test_documents_of_this_project_may_hold_markdown() -> None:
    from ebbench.analysis.documents import Document, Section, labels
    from ebbench.render.documents import as_markdown

    section = Section("", labels("a"), (("**b|c**",),))
    own = as_markdown(Document("d", "t", (section,), ("see `x`",), markup=True))
    assert "| **b\\|c** |" in own
    assert "- see `x`" in own
    assert "- see \\`x\\`" in as_markdown(Document("d", "t", (section,), ("see `x`",)))


def test_a_terminal_gets_lines_broken_between_words_and_a_pipe_whole_ones() -> None:
    line = "two repeats cannot show a difference between these policies"
    shown = {}
    for terminal in (True, False):
        file = io.StringIO()
        Console(file=file, width=24, force_terminal=terminal, color_system=None).print(line, soft_wrap=True)
        shown[terminal] = file.getvalue().splitlines()
    assert [part.strip() for part in shown[True]] == [
        "two repeats cannot show", "a difference between", "these policies",
    ]  # fmt: skip
    assert shown[False] == [line]
