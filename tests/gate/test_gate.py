"""The verdict: conditions of pass, fail, inconclusive and of errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.analysis.units import GateUnit, parse_margins
from ebbench.analysis.verdict import Pair, Rules, judge, left_out, pair_units
from ebbench.errors import DataError, UnknownNameError, UsageError
from ebbench.gate.baselines import save_baseline, stored_units
from ebbench.gate.verdicts import notes, worded_reason
from ebbench.records import files
from ebbench.records.warnings import OTHER_MODEL, fact, warning
from tests.gate.gate_data import side, unit

SAME = [0.0] * 6
NOISE = [0.004, -0.003, 0.002, -0.005, 0.001, -0.002]


def verdict(candidate: list[GateUnit], rules: Rules | None = None) -> tuple[str, str]:
    found = judge(pair_units(side(SAME[: len(candidate)]), candidate), rules or Rules())
    return found.outcome, worded_reason(found)


def test_equal_sides_pass() -> None:
    assert verdict(side(SAME))[0] == "pass"
    assert verdict(side(NOISE))[0] == "pass"


@pytest.mark.parametrize(
    ("figure", "label"), [("tokens", "tokens/s"), ("ttft", "TTFT median"), ("tpot", "TPOT median")]
)
def test_a_clear_loss_in_any_gated_figure_fails(figure: str, label: str) -> None:
    outcome, reason = verdict(side([0.08 + x for x in NOISE], figure))
    assert outcome == "fail"
    assert f"{label} is 7.9 % worse" in reason


def test_a_gain_of_any_size_passes() -> None:
    assert verdict(side([-0.3 + x for x in NOISE], "ttft"))[0] == "pass"


def test_a_significant_loss_inside_the_margin_does_not_fail() -> None:
    found = judge(pair_units(side(SAME), side([0.01 + x / 10 for x in NOISE])))
    tokens = found.judged[0]
    assert tokens.p_adjusted <= 0.05
    assert (tokens.outcome, found.outcome) == ("pass", "pass")


def test_a_loss_beyond_the_margin_that_chance_explains_is_left_open() -> None:
    outcome, reason = verdict(side([0.2, -0.1, 0.15, -0.05, 0.1, 0.01]))
    assert outcome == "inconclusive"
    assert "may be up to" in reason


def test_one_pair_against_the_trend_keeps_six_pairs_from_failing() -> None:
    """p is then at least 2/64, times three figures: above 5 %."""
    assert verdict(side([0.08, 0.08, 0.08, 0.08, 0.08, -0.001]))[0] == "inconclusive"


def test_fewer_than_six_pairs_never_decide() -> None:
    for losses in ([0.0] * 5, [0.5] * 5):
        outcome, reason = verdict(side(losses))
        assert outcome == "inconclusive"
        assert "5 pairs where the test needs 6" in reason


def test_holm_counts_only_figures_that_are_defined() -> None:
    pairs = pair_units(side(SAME), side([0.08] * 6))
    stripped = [
        type(pair)(
            *(replace(u, figures={**u.figures, "median_tpot_ms": None}) for u in (pair.baseline, pair.candidate))
        )
        for pair in pairs
    ]
    assert judge(pairs).judged[0].p_adjusted == pytest.approx(3 / 64)
    found = judge(stripped)
    assert found.judged[0].p_adjusted == pytest.approx(2 / 64)
    assert "median_tpot_ms" in found.skipped


def test_advisory_figures_are_shown_and_never_decide() -> None:
    def with_tail(units: list[GateUnit], p99: float) -> list[GateUnit]:
        return [replace(u, figures={**u.figures, "p99_ttft_ms": p99, "request_goodput": 1000 / p99}) for u in units]

    found = judge(pair_units(with_tail(side(SAME), 100.0), with_tail(side(SAME), 300.0)))
    tails = {entry.figure: entry for entry in found.judged if not entry.gated}
    assert tails["p99_ttft_ms"].loss == pytest.approx(2.0)
    assert tails["request_goodput"].loss == pytest.approx(2.0)
    assert found.outcome == "pass"


def test_goodput_under_different_limits_is_not_compared() -> None:
    def limited(units: list[GateUnit], slo: str) -> list[GateUnit]:
        return [replace(u, figures={**u.figures, "request_goodput": 5.0}, slo=slo) for u in units]

    found = judge(pair_units(limited(side(SAME), "ttft:100"), limited(side(SAME), "ttft:200")))
    assert found.skipped["request_goodput"] == "limits_differ"


def test_each_figure_may_have_its_own_margin() -> None:
    default, single = parse_margins(["5", "ttft:10, tpot:2"])
    rules = Rules(default_margin=default, margin=single)
    assert [rules.margin_of(f) for f in ("output_throughput", "median_ttft_ms", "median_tpot_ms")] == [0.05, 0.1, 0.02]
    assert verdict(side([0.08 + x for x in NOISE], "ttft"), rules)[0] == "pass"
    assert verdict(side([0.08 + x for x in NOISE], "tpot"), rules)[0] == "fail"


@pytest.mark.parametrize("text", ["0", "-1", "100", "many", "ttft:", "ttft:0"])
def test_a_margin_that_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="between 0 and 100"):
        parse_margins([text])


@pytest.mark.parametrize("texts", [["5", "7"], ["ttft:5 ttft:9"], ["ttft:5", "tpot:1", "ttft:5"]])
def test_a_margin_given_twice_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="is given twice; give it once"):
        parse_margins(texts)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_rules_with_a_margin_that_is_no_share_are_refused(share: float) -> None:
    for rules in (Rules(default_margin=share), Rules(margin={"output_throughput": share})):
        with pytest.raises(UsageError, match="between 0 and 100 %"):
            verdict(side([0.0] * 6), rules)


def test_an_unknown_figure_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tpot'"):
        parse_margins(["tpto:3"])


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"device": "l40s"}, "device: h200 against l40s"),
        ({"model": "other"}, "model: qwen3-8b against other"),
        ({"vllm": "0.32.0"}, "vllm: not recorded against 0.32.0"),
        ({"options": '{"max_num_seqs": 9}'}, "options.max_num_seqs: 8 against 9"),
    ],
)
def test_other_environments_are_refused_by_name(changes: dict[str, str], keys: str) -> None:
    moved = [replace(u, environment=dict(u.environment) | changes) for u in side(SAME)]
    with pytest.raises(DataError, match=keys.replace(".", r"\.")):
        pair_units(side(SAME), moved)
    assert len(pair_units(side(SAME), moved, allowed=list(changes))) == 6


def test_other_plans_are_refused() -> None:
    others = [replace(u, seed=u.seed + 6, plan_hash=f"plan-{u.seed + 6}") for u in side(SAME)]
    with pytest.raises(DataError, match=r"has no run of 6 plans \(seed 0, 1, 2, 3, 4, ...\)"):
        pair_units(side(SAME), others)


def test_a_seed_with_another_plan_on_the_other_side_is_refused() -> None:
    """The sides were measured with other requests or traffic, of which common seeds would hide a part."""
    with pytest.raises(DataError, match=r"plan: the candidate has no run of 1 plan \(seed 5\)"):
        pair_units(side(SAME), [*side(SAME[1:]), unit(5, plan_hash="another")])


def test_seeds_of_one_side_only_are_left_out_with_a_note() -> None:
    """A night that was cut short, or six repeats against ten: the common ones are a comparison."""
    before, after = side(SAME), side([0.0] * 8)
    assert len(pair_units(before, after)) == 6
    assert left_out(before, after) == (fact("runs_alone", runs=2, side="candidate", seeds=[6, 7]),)
    note = notes(judge(pair_units(before, after), further_notes=left_out(before, after)))[0]
    assert note == "note: 2 runs of the candidate left out: the other side has no run of seed 6, 7"
    twice = [*before, *(replace(u, anchor_unix_ns=u.anchor_unix_ns + 50) for u in before[:2])]
    assert left_out(twice, before) == (fact("runs_in_excess", runs=2, side="baseline"),)
    assert not left_out(before, before)


def test_a_side_of_two_policies_is_refused() -> None:
    with pytest.raises(DataError, match="mixes the policies v1 and eb"):
        pair_units(side(SAME), [*side(SAME), unit(0, policy="eb")])


def test_restarts_of_one_plan_pair_in_order_of_time() -> None:
    before = [unit(0, anchor_unix_ns=t, run=f"b{t}") for t in (3, 1)]
    after = [unit(0, anchor_unix_ns=t, run=f"c{t}") for t in (2, 4)]
    assert [(p.baseline.run, p.candidate.run) for p in pair_units(before, after)] == [("b1", "c2"), ("b3", "c4")]


def test_copies_of_a_simulated_run_are_one_measurement() -> None:
    copies = [unit(0, virtual=True, anchor_unix_ns=t) for t in range(6)]
    assert len(pair_units(copies, copies)) == 1


def test_sides_measured_one_after_the_other_are_pointed_out() -> None:
    late = [replace(u, anchor_unix_ns=u.anchor_unix_ns + 100) for u in side(SAME)]
    assert "not measured interleaved" in notes(judge(pair_units(side(SAME), late)))[0]
    turns = [replace(u, anchor_unix_ns=2 * u.anchor_unix_ns) for u in side(SAME)]
    back = [replace(u, anchor_unix_ns=2 * u.anchor_unix_ns + 1) for u in side(SAME)]
    assert not judge(pair_units(turns, back)).notes


def in_turns(losses: list[float], second: float) -> list[Pair]:
    """Pairs measured baseline first in even ones, candidate first in odd ones; the second run has ``second`` of the
    TTFT of the first."""
    pairs = []
    for place, (before, after) in enumerate(zip(side(SAME, "ttft"), side(losses, "ttft"), strict=True)):
        first = [before, after] if place % 2 == 0 else [after, before]
        times = [replace(u, anchor_unix_ns=10 * place + at) for at, u in enumerate(first)]
        warm = replace(times[1], figures={**times[1].figures, "median_ttft_ms": 100.0 * second})
        pairs.append(Pair(times[0], warm) if place % 2 == 0 else Pair(warm, times[0]))
    return pairs


def test_an_effect_of_the_order_within_pairs_is_named_with_its_cause() -> None:
    found = judge(in_turns(SAME, 0.05))
    assert found.outcome == "inconclusive"
    assert "whichever side ran second in a pair was better (TTFT median by 95 %)" in worded_reason(found)
    assert "prefix cache" in worded_reason(found)
    assert "measure longer runs" not in worded_reason(found)
    slowing = judge(in_turns(SAME, 1.5))
    assert "whichever side ran second in a pair was worse (TTFT median by 50 %)" in worded_reason(slowing)
    assert "prefix cache" not in worded_reason(slowing)
    assert "second" not in worded_reason(judge(pair_units(side(SAME), side(SAME))))


def test_candidates_that_always_met_a_warm_prefix_cache_are_pointed_out() -> None:
    """With one order throughout, nothing tells the candidate from a cache that holds the pair's prompts already."""
    before = [replace(u, server="http://gpu:8000", cache_unknown=True) for u in side(SAME)]
    after = [replace(u, anchor_unix_ns=u.anchor_unix_ns + 100) for u in before]
    assert any("whose prefix cache" in note for note in notes(judge(pair_units(before, after))))
    elsewhere = [replace(u, server="http://other:8000") for u in after]
    assert not any("whose prefix cache" in note for note in notes(judge(pair_units(before, elsewhere))))
    emptied = [replace(u, cache_unknown=False) for u in after]
    assert not any("whose prefix cache" in note for note in notes(judge(pair_units(before, emptied))))


def test_what_a_server_answered_instead_is_a_note() -> None:
    warned = [
        replace(u, about_server=(warning(OTHER_MODEL, answers={"b": u.seed + 2}, asked="a", completed=8),))
        for u in side(SAME)
    ]
    told = notes(judge(pair_units(warned, warned)))
    assert [note for note in told if note.startswith("note: 2 to 7 of 8 answers did not come from 'a' alone")]


@pytest.mark.parametrize("rules", [Rules(default_margin=0.0), Rules(alpha=0.6), Rules(min_pairs=1)])
def test_rules_that_cannot_work_are_refused(rules: Rules) -> None:
    with pytest.raises(UsageError):
        judge(pair_units(side(SAME), side(SAME)), rules)


def test_a_stored_baseline_is_found_by_its_environment(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "baselines.parquet"
    other = [replace(u, environment=dict(u.environment) | {"device": "l40s"}) for u in side(NOISE)]
    assert save_baseline(side(SAME), path) == 6
    assert save_baseline(other, path) == 12
    assert save_baseline(side(NOISE), path) == 12  # replaces its own rows only
    assert stored_units(path, [unit()]) == side(NOISE)
    assert stored_units(path, other) == other
    assert judge(pair_units(stored_units(path, [unit()]), side(NOISE))).outcome == "pass"


def test_a_missing_baseline_never_passes(tmp_path: Path) -> None:
    path = tmp_path / "baselines.parquet"
    with pytest.raises(DataError, match="no such baseline; store one with"):
        stored_units(path, [unit()])
    save_baseline(side(SAME), path)
    moved = replace(unit(), environment=dict(unit().environment) | {"device": "l40s"})
    with pytest.raises(
        DataError,
        match=r"the nearest differs in device: h200.*: store one with --save-baseline, or compare with --allow device",
    ):
        stored_units(path, [moved])
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        stored_units(path, [unit()])


def test_a_candidate_of_another_policy_takes_the_only_baseline_there_is(tmp_path: Path) -> None:
    path = tmp_path / "baselines.parquet"
    save_baseline(side(SAME), path)
    assert {u.policy for u in stored_units(path, [unit(policy="eb")])} == {"v1"}
    save_baseline(side(SAME, policy="v0"), path)
    with pytest.raises(DataError, match="no baseline of policy eb, only of v1, v0"):
        stored_units(path, [unit(policy="eb")])


def test_a_gated_figure_that_only_some_runs_have_keeps_the_gate_open() -> None:
    """A figure that some runs have must be judged; a figure that no run has is left out."""
    for missing in (None, 0.0):
        found = judge(pair_units(side(SAME), [*side(SAME[1:]), stripped(unit(5), missing)]))
        assert found.outcome == "inconclusive"
        assert "TPOT median cannot be judged" in worded_reason(found)
    none = [stripped(u, None) for u in side(SAME)]
    assert judge(pair_units(none, none)).outcome == "pass"
    slower = [stripped(unit(0, tokens=1.0), None), *side([0.5] * 6)[1:]]
    assert judge(pair_units(side(SAME), slower)).outcome == "fail"


def stripped(one: GateUnit, tpot: float | None) -> GateUnit:
    return replace(one, figures={**one.figures, "median_tpot_ms": tpot})


def test_a_smaller_alpha_needs_more_pairs() -> None:
    rules = Rules(alpha=0.01)
    found = judge(pair_units(side([0.0] * 8), side([0.5] * 8)), rules)
    assert "8 pairs where the test needs 9" in worded_reason(found)
    assert judge(pair_units(side([0.0] * 9), side([0.5] * 9)), rules).outcome == "fail"


def test_seeds_that_change_no_figure_in_virtual_time_are_copies() -> None:
    """A replayed trace: the plans differ in what their tokens are, hence in their hash."""
    copies = [replace(unit(seed, virtual=True), lengths="equal") for seed in range(8)]
    (pair,) = pair_units(copies, copies)
    assert pair.copies == 7
    assert "7 pairs left out as copies" in notes(judge([pair]))[0]
    real = [replace(u, virtual=False) for u in copies]
    assert len(pair_units(real, real)) == 8
    others = [replace(u, lengths=f"{u.seed}") for u in copies]
    assert len(pair_units(others, others)) == 8
    random = [replace(u, figures={**u.figures, "median_ttft_ms": 100.0 + u.seed}) for u in copies]
    assert len(pair_units(copies, random)) == 8


def test_runs_repeated_until_it_was_clear_are_judged_by_the_rule_for_that(tmp_path: Path) -> None:
    """Six pairs that all lose fail the fixed test; the sequential test needs seven."""
    losses = [0.10, 0.11, 0.12, 0.13, 0.14, 0.15]
    fixed = judge(pair_units(side([0.0] * 6), side(losses)))
    looked = judge(pair_units(side([0.0] * 6), side(losses, until_clear=True)))
    assert (fixed.outcome, looked.outcome) == ("fail", "inconclusive")
    assert any("--repeats auto" in note for note in notes(looked))
    more = judge(pair_units(side([0.0] * 7), side([*losses, 0.16], until_clear=True)))
    assert more.outcome == "fail"

    save_baseline(side([0.0] * 6, until_clear=True), tmp_path / "stored.parquet")
    candidates = side(losses)
    stored = stored_units(tmp_path / "stored.parquet", candidates)
    assert judge(pair_units(stored, candidates)).outcome == "inconclusive", "a stored baseline remembers it"


def test_the_candidates_own_environment_comes_before_one_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "baselines.parquet"
    old, newer, own = (side(NOISE, anchor_unix_ns=t, environment=vllm(v)) for t, v in ((1, "1"), (3, "3"), (2, "2")))
    for units in (old, newer, own):
        save_baseline(units, path)
    assert stored_units(path, side(SAME, environment=vllm("2")), ["vllm"]) == own
    candidate = side(SAME, environment=vllm("4"))
    found = stored_units(path, candidate, ["vllm"])
    assert found == newer
    told = notes(judge(pair_units(found, candidate, ["vllm"])))
    assert "note: the sides differ, as allowed, in vllm: 3 against 4" in told


def vllm(version: str) -> dict[str, str]:
    return dict(unit().environment) | {"vllm": version}


def test_a_baseline_of_another_load_is_kept_and_never_taken(tmp_path: Path) -> None:
    path = tmp_path / "baselines.parquet"
    small, large = (
        side(SAME, load="60 sessions"),
        [replace(u, plan_hash="n400") for u in side(SAME, load="400 sessions")],
    )
    assert save_baseline(small, path) == 6
    assert save_baseline(large, path) == 12
    assert save_baseline(large, path) == 12
    assert stored_units(path, small) == small
    with pytest.raises(DataError, match="no baseline of 8 sessions, only of 60 sessions; 400 sessions; store one"):
        stored_units(path, side(SAME, load="8 sessions"))


def test_baselines_stored_without_a_load_still_serve(tmp_path: Path) -> None:
    path = tmp_path / "baselines.parquet"
    save_baseline(side(SAME), path)
    files.write_table(files.read_table(path).drop_columns(["load"]), path)
    known = side(NOISE, load="60 sessions")
    assert stored_units(path, known) == side(SAME)
    other = [replace(u, plan_hash=f"n400-{u.seed}", load="400 sessions") for u in known]
    assert save_baseline(other, path) == 12  # other plans: the old rows stay
    assert save_baseline(known, path) == 12  # their plans again: the old rows go
    assert stored_units(path, known) == known
