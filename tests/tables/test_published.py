"""The reference tables are read as printed, and every published cell has a run of ours behind it."""

from __future__ import annotations

import pytest

from ebbench.errors import UsageError
from ebbench.papers.deferred_prefill import implied_constants
from ebbench.papers.eb.shifts import TRAFFIC, table3_cells
from ebbench.papers.eb.workloads import table2_cell
from ebbench.papers.fidelity.cases import all_cases
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import ASYNC_SCHEDULING, protocol_cells
from ebbench.papers.published import best_sizes, pick, rows
from ebbench.papers.registry import TABLES, find_table
from ebbench.runs.prepare import plan_of
from vllm_eb.policies.deferred import DeferredModel, exact_chain


def test_published_numbers_are_found_by_their_labels() -> None:
    where = {"gpu": "RTX PRO 6000", "model": "Qwen3-8B", "workload": "ShareGPT"}
    assert pick("table2_throughput_rps", "eb_rps", **where) == 19.68
    assert pick("table2_throughput_rps", "eb_rps", gpu="L40S", model="Qwen3-8B", workload="ShareGPT") is None


def test_the_published_gain_follows_from_the_published_rates() -> None:
    """Guards the transcription: the table's own difference column must follow from its rates, to its rounding."""
    for row in rows("table2_throughput_rps"):
        gain = 100 * (float(row["eb_rps"]) / float(row["v1_rps"]) - 1)
        assert gain == pytest.approx(float(row["diff_percent_vs_v1"]), abs=0.8)


def test_best_sizes_are_those_of_tables_14_to_16() -> None:
    assert best_sizes("rtx-pro-6000", "eb", "numinamath", "qwen3-8b") == (256, 4096)
    assert best_sizes("h200", "v1", "balanced", "qwen3-8b") == (512, 10240)
    assert best_sizes("rtx-pro-6000", "ebplus", "sharegpt", "qwen3-8b") == (1536, 14336), "others take eb's"
    assert best_sizes("l40s", "v1", "sharegpt", "llama-3.1-8b") == best_sizes(
        "rtx-pro-6000", "v1", "sharegpt", "qwen3-8b"
    ), "what was not published takes the nearest that was"


@pytest.mark.parametrize("name", ["3", "table3", "Table-3", "table_3"])
def test_a_table_goes_by_several_spellings(name: str) -> None:
    assert find_table(name).name == "table3"


def test_every_row_of_table_3_has_its_run() -> None:
    published = {row["scenario"] for row in rows("table3_traffic_and_nonstationary")}
    assert published == set(TRAFFIC)
    cells = find_table("3").cells(PaperOptions())
    assert len(set(cells)) == 90, "four scenarios of one run and one of five, five policies, two GPUs"
    runs = table3_cells(PaperOptions(), "h200", "qwen3-8b", "concurrency_shift", "v1")
    assert [plan_of(cell).phases[0].max_concurrency for cell in runs] == [32, 512, 1024, 256, 2048]
    assert sum(len(plan_of(cell)) for cell in runs) == 10_000


def test_tables_and_fidelity_make_the_same_runs() -> None:
    """One protocol a cell: the same plan, policy, settings and warm-up, whichever command asks."""
    for case in all_cases():
        if case.group == "table 3":
            cells = table3_cells(PaperOptions(), case.device, case.model, case.name, case.scheduler)
        elif case.group == "table 2 and figure 5":
            cells = (table2_cell(PaperOptions(), case.device, case.model, case.name.lower(), case.scheduler),)
        else:
            continue
        assert tuple(cells) == protocol_cells(case.protocol, case.device, case.model)
        assert {cell.server.warmup for cell in cells} == {case.protocol.warmup}
        assert {cell.server.async_scheduling for cell in cells} == {ASYNC_SCHEDULING}


def test_no_two_tables_share_a_name() -> None:
    names = [table.name for table in TABLES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["1", "table1", "Table-1"])
def test_a_number_that_several_papers_have_is_refused_with_all_of_them(name: str) -> None:
    with pytest.raises(UsageError, match="eb-table1, deferred-1, sbs-table1"):
        find_table(name)


@pytest.mark.parametrize("row", rows("deferred_table1"), ids=lambda row: row["model"])
def test_implied_constants_give_back_the_published_rates(row: dict[str, str]) -> None:
    """They were solved from them, with the exact chain in place of the paper's approximation."""
    cost = implied_constants(row)
    assert min(cost.c_p, cost.c_d, cost.prompt_s, cost.t_d) > 0
    model = DeferredModel(int(row["batch_limit"]), 1 / 201, cost.c_p, cost.c_d, cost.t_d, cost.prompt_s)
    chain = exact_chain(model)
    assert chain.throughput[0] == pytest.approx(float(row["default_throughput_rps"]), rel=1e-6)
    best = int(row["k_experiment"])
    assert chain.throughput[best - 1] == pytest.approx(float(row["throughput_experiment_rps"]), rel=1e-6)
    assert chain.best_k == pytest.approx(int(row["k_numeric"]), abs=2)
