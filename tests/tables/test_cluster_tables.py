"""Tables of several instances: cells, figures of a run, and the sentences about them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.engines.base import EngineResult
from ebbench.papers.eb.disaggregation import explained
from ebbench.papers.options import PaperOptions
from ebbench.papers.staggered import (
    MODEL,
    SHARES,
    SHORT_3K,
    UNIT,
    FiguresOverLoad,
    capacity_rps,
    deployed,
    pass_s,
    prefill_cell,
)
from ebbench.records.manifest import plan_hash
from ebbench.records.schema import DECISIONS, REQUESTS, STEPS
from ebbench.runs.conclude import pool_figures
from ebbench.runs.key import result_key
from ebbench.runs.prepare import plan_of
from ebbench.runs.store import Measured, RunStore, run_missing
from ebbench.spec.run import RunSpec, simulated

CELL = simulated(
    "reference:workloads/short-prompts.toml", "v1", UNIT, MODEL, 64, 3072, scenario="poisson", num_prompts=60,
    request_rate=50.0, topology=deployed("3p"), async_scheduling=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"topology": deployed("3p1d-deepseek")}, {"dispatch": "sbs"}, {"decode_dispatch": "iqr"},
     {"topology": deployed("3p", network_ms=1.0)},
     {"async_scheduling": True}, {"max_model_len": 1000}, {"policy": "eb"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_any_other_cluster_has_another_key(change: dict[str, object]) -> None:
    assert result_key(CELL.changed(**change)) != result_key(CELL)


def test_a_single_run_does_not_stand_for_a_cluster(tmp_path: Path) -> None:
    """The user's own run answers a cell of one instance, and not one that differs only in its topology."""
    several = CELL.changed(device="h200", model="qwen3-8b")
    single = several.changed(topology=None)
    assert plan_hash(plan_of(single)) == plan_hash(plan_of(several))
    own = RunStore(tmp_path / "own")
    run_missing([single], own, whole=True, workers=1)
    found = own.get(single)
    assert found is not None
    store = RunStore(tmp_path / "store", adopted=[found.path])
    adopted = store.get(single)
    assert adopted is not None
    assert adopted.path == found.path
    assert store.get(several) is None


def test_prompts_are_as_long_as_published() -> None:
    tokens = np.asarray(plan_of(CELL.changed(num_prompts=4000)).table["input_tokens"])
    assert tokens.max() <= 3072
    assert tokens.mean() == pytest.approx(1000, rel=0.05)
    long = CELL.changed(workload="reference:workloads/long-prompts.toml", num_prompts=4000, max_model_len=70_000)
    tokens = np.asarray(plan_of(long).table["input_tokens"])
    assert tokens.min() >= 3072
    assert tokens.max() <= 65_536
    assert tokens.mean() == pytest.approx(6700, rel=0.06)


def test_the_unit_reproduces_the_passes_that_table_1_implies() -> None:
    for chunk, qps, use in ((3072, 70.0, 0.887), (5120, 79.0, 0.88)):
        assert pass_s(chunk) == pytest.approx(8 * chunk * use / (1000 * qps), rel=0.01)


def result(steps: list[dict[str, object]], sent_ns: list[int]) -> EngineResult:
    empty = {"phase": "prefill", "mode": "mb", "request_ids": [], "request_tokens": [], "kv_blocks_total": 100,
             "waiting": 0, "running": 0, "preemptions": 0, "preempted_ids": []}  # fmt: skip
    rows = [{**empty, "step_id": i, "scheduled_ns": s["start_ns"], **s} for i, s in enumerate(steps)]
    requests = [{"request_id": str(i), "status": "ok", "sent_ns": t} for i, t in enumerate(sent_ns)]
    return EngineResult(
        pa.Table.from_pylist(requests, schema=REQUESTS), pa.Table.from_pylist(rows, schema=STEPS),
        DECISIONS.empty_table(), facts={"dispatch_wait_ms": 3.0},
    )  # fmt: skip


def test_figures_of_a_group_are_counted_per_pass() -> None:
    """Two units of one instance, three passes of a second: the first is not counted, one unit is idle in the third."""

    def step(unit: int, start_s: float, tokens: int, decodes: int, blocks: int) -> dict[str, object]:
        start = round(start_s * 1e9)
        return {"instance": unit, "start_ns": start, "end_ns": start + 10**9, "prefill_tokens": tokens,
                "decode_seqs": decodes, "kv_blocks_used": blocks}  # fmt: skip

    steps = [
        step(0, 0, 9, 9, 99),
        step(1, 0, 9, 9, 99),
        step(0, 2, 1000, 3, 10),
        step(1, 2, 500, 1, 30),
        step(0, 4, 200, 0, 20),
    ]
    found = pool_figures(result(steps, [0, 6 * 10**9]), deployed("dp=2,ep=2"), 1000)
    assert found["dispatch_wait_ms"] == 3.0
    assert found["front_busy"] == pytest.approx(2 / 4)  # two passes of a second between 2 s and 6 s
    assert found["front_chunk_utilisation"] == pytest.approx(1700 / 4000)
    assert found["front_kv_mean_tokens"] == pytest.approx(16 * (10 + 30 + 20 + 0) / 4)
    assert found["front_kv_std_tokens"] == pytest.approx(16 * 10)
    assert found["front_kv_peak_tokens"] == 16 * 30
    assert found["front_decode_rate"] == pytest.approx(4 / 4)
    assert found["front_decode_batch"] == pytest.approx(4 / 4)


class Made(RunStore):
    """Answers every cell of a curve with TTFT = 1 s times the share of capacity."""

    def get(self, cell: RunSpec) -> Measured | None:
        rate = cell.plan.request_rate
        assert rate is not None
        return Measured({"mean_ttft_ms": 1e3 * rate / capacity_rps(SHORT_3K)}, (), self.root)


def test_curves_are_straight_between_two_loads_and_know_their_peak(tmp_path: Path) -> None:
    curve = FiguresOverLoad(PaperOptions(), Made(tmp_path), SHORT_3K, "sbs")
    assert curve.at("mean_ttft_ms", 0.4125, 1e-3) == pytest.approx(0.4125, abs=1e-4)
    assert curve.peak(0.8) == pytest.approx(0.8, abs=1e-4)
    assert curve.peak(SHARES[-1] + 0.1) is None
    assert curve.at("mean_ttft_ms", 1.5) is None
    assert FiguresOverLoad(PaperOptions(), RunStore(tmp_path / "none"), SHORT_3K, "sbs").peak(0.8) is None
    assert result_key(prefill_cell(PaperOptions(), SHORT_3K, "sbs", 0.5)) != result_key(
        prefill_cell(PaperOptions(), SHORT_3K, "sbs", 0.525)
    )


def test_winners_are_explained_by_what_was_measured(tmp_path: Path) -> None:
    def made(
        rate: float, busy: float = 0.99, ttft_s: float = 1.0, tpot_ms: float = 20.0, dead: str | None = None
    ) -> Measured:
        figures = {"total_token_throughput": rate, "front_busy": busy, "mean_ttft_ms": 1e3 * ttft_s,
                   "mean_tpot_ms": tpot_ms, "dead": dead}  # fmt: skip
        return Measured(figures, (), tmp_path)

    said = explained({
        "v1_dp4": made(900, tpot_ms=31.0), "2p2d": made(1000, busy=0.97), "1p3d": made(600, ttft_s=7.0),
        "3p1d": made(500, dead="full"), "ebplus_dp4": made(800, tpot_ms=19.0),
    })  # fmt: skip
    assert said.startswith("2P+2D with 1,000 tokens/s: prefill GPUs busy 97 %")
    assert "v1, DP=4 -10.0 % (prompts among the decodes: TPOT 31.0 ms against 20.0)" in said
    assert "1P+3D -40.0 % (prefill is the bottleneck: busy 99 %, first token after 7.0 s)" in said
    assert said.endswith("3P+1D ran out of memory.")


@pytest.mark.parametrize(
    ("name", "extra", "rows"),
    [
        ("table19", ("--device", "h200"), 9),
        ("cluster-policies", ("--device", "h200", "--workload", "prefill-heavy"), 15),
        pytest.param("sbs-figure7", (), 10, marks=pytest.mark.nightly),
        ("long-context", ("--device", "h200", "--model", "qwen3-4b"), 1),
        ("table6", ("--model", "qwen3-8b", "-p", "ebplus"), 1),
    ],
)
def test_tables_are_made_by_one_command(name: str, extra: tuple[str, ...], rows: int, tmp_path: Path) -> None:
    command = [
        "tables",
        name,
        "--run",
        "--runs",
        str(tmp_path),
        "-n",
        "24",
        "--workers",
        "1",
        "-q",
        "-f",
        "csv",
        *extra,
    ]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    table = list(csv.reader(io.StringIO(done.output.split("\n\n")[0])))
    assert len(table) == rows + 1
    assert "runs have not been made" not in done.output


def test_table_20_shows_further_policies_beside_the_published(tmp_path: Path) -> None:
    """``-p`` adds a column per policy with its change against v1, and says which is best in each setting."""
    words = ["tables", "table20", "--device", "h200", "-n", "24", "--workers", "1", "-q", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--run", "-p", "delayer", "-p", "ebplus", "-f", "csv"])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.output.split("\n\n")[0])))
    assert len(rows) == 27
    for row in rows:
        ours, base = float(row["delayer,_dp=4_ours"]), float(row["v1,_dp=4_ours"])
        assert float(row["delayer,_dp=4_vs_v1"]) == pytest.approx(ours / base - 1)
    assert not any(name.startswith("ebplus,") for name in rows[0]), "the table has EB+ already"
    notes = CliRunner().invoke(app, [*words, "-p", "delayer", "-f", "markdown"]).output
    assert notes.count("of the policies, ") + notes.count("no policy gains 1 % over v1") == 9
    assert "runs have not been made" not in notes
