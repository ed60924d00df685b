"""Explanations read from step and decision tables, and comparisons of policies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ebbench.analysis.cases import Group, baseline_group, differing, gain, group_by_policy, ranked
from ebbench.analysis.explain import Explanation, explain
from ebbench.analysis.metrics import Slo
from ebbench.analysis.summary import Summary, summarise
from ebbench.engines.base import EngineResult
from ebbench.records.run import Run, RunWriter
from ebbench.records.schema import DECISIONS, STEPS
from ebbench.runs.conclude import RunContext, conclude
from ebbench.spec.server import EngineOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of
from vllm_eb.policy import parse_policy


def made(path: Path, policy: str, *, seed: int = 0, gap_ms: int | None = None, **tables: pa.Table) -> Run:
    engine, plan = MadeEngine(), plan_of(40, seed=seed)
    if gap_ms is not None:
        engine.GAP_MS = {parse_policy(policy).kind: gap_ms}
    result = engine.run(plan, parse_policy(policy), device_of(), EngineOptions(), None)
    result = EngineResult(result.requests, tables.get("steps", result.steps), tables.get("decisions", result.decisions))
    with RunWriter.create(path) as writer:
        return conclude(writer, RunContext(plan, parse_policy(policy), "sim", device_of(), EngineOptions(), 1), result)[
            0
        ]


def test_time_by_phase_and_mode(tmp_path: Path) -> None:
    explanation = explain(made(tmp_path / "r", "ebplus"))
    facts = explanation.steps
    assert facts is not None
    assert facts.kinds["decode"].share == pytest.approx(0.8)
    assert facts.kinds["prefill"].mean_prefill_tokens == 2000
    assert facts.kinds["decode"].mean_decode_seqs == 8
    assert sum(kind.share for kind in facts.kinds.values()) == pytest.approx(1)
    assert facts.steps == 10
    assert facts.eb_share == pytest.approx(0.8)
    assert facts.eb_timeline[0] == 0
    assert facts.eb_timeline[-1] == 1


def test_explain_reads_the_crossover_from_the_decision_records(tmp_path: Path) -> None:
    facts = explain(made(tmp_path / "r", "ebplus")).decisions
    assert facts is not None
    assert facts.crossover is not None
    assert (facts.crossover.lhs, facts.crossover.rhs) == (4e-5, 5e-6)
    assert (facts.crossover.evaluations, facts.crossover.eb_ahead) == (3, 2)
    assert [(switch.mode, switch.reason) for switch in facts.switches] == [("eb", "mixing_costs_more")]
    assert (facts.k.median, facts.updates) == (5, 1) if facts.k else False
    assert facts.eta is None


def test_a_run_without_steps_and_decisions_has_no_explanation(tmp_path: Path) -> None:
    run = made(tmp_path / "r", "v1", steps=STEPS.empty_table(), decisions=DECISIONS.empty_table())
    assert explain(run) == Explanation("v1", None, None)


def group(tmp_path: Path, policy: str, *gaps_ms: int) -> tuple[list[Summary], list[Explanation]]:
    runs = [made(tmp_path / f"{policy}-{i}", policy, seed=i, gap_ms=gap) for i, gap in enumerate(gaps_ms)]
    return [summarise(run) for run in runs], [explain(run) for run in runs]


def groups(tmp_path: Path, **gaps: tuple[int, ...]) -> tuple[Group, ...]:
    made_ones = [group(tmp_path, policy, *values) for policy, values in gaps.items()]
    return group_by_policy([s for ones, _ in made_ones for s in ones], [t for _, ones in made_ones for t in ones])


def test_gains_are_paired_by_seed(tmp_path: Path) -> None:
    both = groups(tmp_path, eb=(10, 20), v1=(20, 20))
    assert baseline_group(both).policy == "v1"
    found = gain(both[0], both[1])
    assert found is not None
    ratios = np.array([2.0, 1.0])  # twice as fast with seed 0, equal with seed 1
    assert found.mean == pytest.approx(math.sqrt(ratios.prod()) - 1)
    assert found.spread == pytest.approx(ratios.std(ddof=1))
    assert [g.policy for g in ranked(both)] == ["eb", "v1"]


def test_without_v1_the_first_policy_is_the_baseline(tmp_path: Path) -> None:
    assert baseline_group(groups(tmp_path, eb=(10,), v0=(20,))).policy == "eb"


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    from dataclasses import replace

    summary: Any = summarise(made(tmp_path / "r", "v1"))

    def moved(**changes: str) -> Summary:
        return replace(summary, environment=dict(summary.environment) | changes)

    assert differing([summary, replace(summary, policy="eb")]) == []
    assert differing([summary, moved(device="other", scenario="s")]) == ["device", "scenario"]
    options = json.loads(summary.environment["options"]) | {"max_num_seqs": 7, "topology": "dp=2"}
    assert differing([summary, moved(options=json.dumps(options))]) == ["max_num_seqs", "topology"]
    limited = replace(summary, slo=Slo(ttft=100))
    assert differing([limited, summary]) == []
    assert differing([limited, replace(summary, slo=Slo(ttft=200))]) == ["limits (--goodput gives all runs the same)"]


def test_policies_must_have_answered_the_same_plans(tmp_path: Path) -> None:
    from dataclasses import replace

    summary: Any = summarise(made(tmp_path / "r", "v1"))
    other = replace(summary, policy="v0", seed=2, plan_hash="another")
    assert differing([summary, other]) == ["seeds"]
    assert differing([summary, replace(other, seed=summary.seed)]) == ["plan"]
    assert differing([summary, replace(other, policy="v1")]) == []


def test_runs_are_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    (v1, told), (eb, others) = group(tmp_path, "v1", 20, 10), group(tmp_path, "eb", 10, 10)
    both = group_by_policy([*reversed(v1), *eb], [*reversed(told), *others])
    assert both[0].seeds == both[1].seeds == (0, 1)
    assert both[0].explanations == tuple(told)
    found = gain(both[1], both[0])
    assert found is not None
    assert found.mean == pytest.approx(math.sqrt(2 * 1) - 1)  # twice as fast with seed 0, equal with seed 1


def test_copies_have_no_spread(tmp_path: Path) -> None:
    v1, eb = groups(tmp_path, v1=(20, 20), eb=(10, 20))
    assert (v1.copies, eb.copies) == (True, False)
    assert v1.spread(lambda m: m.output_throughput) is None
    assert eb.spread(lambda m: m.output_throughput)


def test_every_instance_switches_by_itself(tmp_path: Path) -> None:
    """Two instances whose evaluations alternate; each switches to exclusive batches at its second evaluation."""
    mode = {"step_id": 0, "kind": "mode", "phase": "decode", "reason": "r"}
    rows = [mode | {"time_ns": t, "instance": t % 2, "mode": "mb" if t < 2 else "eb"} for t in range(6)]
    empty: dict[str, Any] = {field.name: None for field in DECISIONS}
    decisions = pa.Table.from_pylist([empty | row for row in rows], schema=DECISIONS)
    one_only = decisions.set_column(
        decisions.column_names.index("mode"), DECISIONS.field("mode"), [["mb", "mb", "mb", "eb", "mb", "eb"]]
    )
    for table, times in ((decisions, [2, 3]), (one_only, [3])):
        facts = explain(made(tmp_path / str(len(times)), "ebplus", decisions=table)).decisions
        assert facts is not None
        assert [round(switch.time_s * 1e9) for switch in facts.switches] == times
