"""Sessions of a plan: pauses, sub-agents, patience."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.errors import UsageError
from ebbench.records.plan import Plan, turn_graph
from ebbench.records.schema import PLAN
from ebbench.workloads import build_plan
from ebbench.workloads.sessions import DurationSpec, parse_duration


def chat(**options: object) -> Plan:
    return build_plan("wildchat", source="profile", **{"num_prompts": 20, **options})  # type: ignore[arg-type]


def test_a_plan_without_sessions_has_no_further_columns() -> None:
    assert chat().table.schema.equals(PLAN)


def test_think_time_comes_before_every_later_turn() -> None:
    table = chat(think_time="exponential:mean=5", num_prompts=300).table
    turns, pauses = np.asarray(table["turn"]), np.asarray(table["pause_ns"].fill_null(0))
    assert (pauses[turns == 0] == 0).all()
    assert (pauses[turns > 0] > 0).all()
    assert pauses[turns > 0].mean() / 1e9 == pytest.approx(5, rel=0.1)
    assert table.drop(["pause_ns", "tool_ns"]).equals(chat(num_prompts=300).table)


def test_a_share_of_the_pauses_are_tool_calls() -> None:
    table = chat(think_time="60", tool_time="uniform:mean=1", tool_share=0.75, num_prompts=300).table
    later = np.asarray(table["pause_ns"].drop_null()) / 1e9
    assert (later[later < 60] <= 2).all()
    assert (later < 60).mean() == pytest.approx(0.75, abs=0.03)


@given(count=st.integers(1, 4), turns=st.integers(1, 3), share=st.sampled_from([0.3, 1.0]), seed=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_sub_agents_start_together_and_the_next_turn_joins_them(
    count: int, turns: int, share: float, seed: int
) -> None:
    plan = chat(seed=seed, num_prompts=4, sub_agents=f"count={count},turns={turns},share={share},output=30,input=70")
    bare = chat(seed=seed, num_prompts=4)
    rows, graph = plan.table.to_pylist(), turn_graph(plan.table)
    own = {row["content"] for row in bare.table.to_pylist()}
    main = [place for place, row in enumerate(rows) if row["content"] in own]
    assert [rows[place]["output_tokens"] for place in main] == bare.table["output_tokens"].to_pylist()
    joined = 0
    for place in main:
        if rows[place]["turn"] == 0:
            joined = 0
        waits = [one for one, row in enumerate(rows) if place in graph.followers(one) and row["content"] not in own]
        assert len(waits) in (0, count)
        joined += sum(rows[one]["output_tokens"] for one in waits)
        before = bare.table["input_tokens"][main.index(place)].as_py()
        assert rows[place]["input_tokens"] == before + joined  # their last answers remain in the history
    contents = [row["content"] for row in rows if row["content"] not in own]
    assert all(contents.count(one) == turns for one in contents)


def test_requests_dropped_for_their_length_are_waited_for_no_more() -> None:
    options = {"sub_agents": "count=2,turns=2,input=2500,output=10", "num_prompts": 30}
    whole, cut = chat(**options), chat(**options, max_model_len=2600, drop_too_long=True)
    assert 0 < len(cut) < len(whole)
    graph = turn_graph(cut.table)  # refuses a turn that is not there
    assert len(graph.first_rows) == cut.facts["sessions"]


def test_patience_is_drawn_for_every_request() -> None:
    table = build_plan("balanced", num_prompts=50, abandon_after="2.5").table
    assert table["hang_up_ns"].to_pylist() == [2_500_000_000] * 50


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"think_time": "soon"}, "--think-time 'soon' is no time"),
        ({"think_time": "gamma:mean=3"}, "needs std"),
        ({"think_time": "exponential:mean=3,std=1"}, "takes no std"),
        ({"think_time": "-1"}, "--think-time '-1'"),
        ({"think_time": "3", "tool_time": "1"}, "--tool-share"),
        ({"tool_share": 0.5, "tool_time": "1"}, "needs both"),
        ({"sub_agents": "count=0"}, "count"),
        ({"sub_agents": "depth=2"}, "unknown setting"),
    ],
)
def test_wrong_session_options_are_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        chat(**options)


def test_think_time_between_single_requests_is_refused() -> None:
    with pytest.raises(UsageError, match="every session of this plan is a single request"):
        build_plan("balanced", num_prompts=5, think_time="3")


@pytest.mark.parametrize(
    "text", ["20", "exponential:mean=20", "uniform:mean=20", "lognormal:mean=20,std=30", "gamma:mean=20,std=5"]
)
def test_the_mean_of_every_family_is_the_one_asked_for(text: str) -> None:
    drawn = parse_duration(text, "--think-time").draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(20, rel=0.02)
    assert DurationSpec(mean=20, max=3).draw(np.random.default_rng(0), 3).tolist() == [3, 3, 3]


def test_a_workload_file_describes_its_sessions(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "agents.toml"
    path.write_text(
        'name = "agents"\ndescription = "d"\nnum_prompts = 10\n'
        '[profile.turns]\nmin = 3\nmax = 3\nmean = 3\n[profile.input]\nfamily = "fixed"\nmean = 50\n'
        '[profile.output]\nfamily = "fixed"\nmean = 20\n'
        '[sessions.tool]\nfamily = "exponential"\nmean = 1.5\n[sessions.agents]\ncount = 2\nturns = 2\n',
        encoding="utf-8",
    )
    plan = build_plan(str(path))
    assert len(plan) == 10 * (3 + 2 * 2 * 2)
    assert build_plan(str(path), sub_agents="1").facts["session_shape"]["tool"] == "exponential(mean 1.5 s)"


def test_thinking_comes_before_the_answer_and_stays_in_the_history() -> None:
    plain, thinking = chat(num_prompts=40).table, chat(num_prompts=40, thinking_len=300).table
    tokens = np.asarray(thinking["thinking_tokens"])
    assert tokens.mean() == pytest.approx(300, rel=0.1)
    assert (np.asarray(thinking["output_tokens"]) - tokens).tolist() == plain["output_tokens"].to_pylist()
    session, more = (
        np.asarray(thinking["session"]),
        np.asarray(thinking["input_tokens"]) - np.asarray(plain["input_tokens"]),
    )
    for one in range(40):
        own = session == one
        assert more[own].tolist() == np.concatenate([[0], np.cumsum(tokens[own])[:-1]]).tolist()


def test_thinking_for_recorded_outputs_is_refused() -> None:
    with pytest.raises(UsageError, match="recorded outputs contain their thinking"):
        build_plan("trace:tests/data/mooncake.jsonl", thinking_len=300)
