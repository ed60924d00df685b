"""Attainment surfaces agree with the metric they generalise, and count every planned request."""

from __future__ import annotations

import numpy as np
import pytest

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Slo, measure
from ebbench.analysis.phases import run_surfaces, surface
from ebbench.errors import UsageError
from ebbench.runs.store import Measured

TTFT_MS = (20.0, 60.0, 200.0, 5000.0)
TPOT_MS = (5.0, 12.0, 30.0)


def test_every_cell_equals_the_attainment_of_its_targets(shift_run: Measured) -> None:
    columns = RequestColumns.of(shift_run.run.requests)
    found = surface(columns, TTFT_MS, TPOT_MS)
    for ttft in TTFT_MS:
        for tpot in TPOT_MS:
            assert found.at(ttft, tpot) == pytest.approx(measure(columns, slo=Slo(ttft, tpot)).slo_attainment)


def test_attainment_grows_with_both_targets(shift_run: Measured) -> None:
    grid = np.array(run_surfaces(shift_run.run, TTFT_MS, TPOT_MS)[0].attainment)
    assert (np.diff(grid, axis=0) >= 0).all()
    assert (np.diff(grid, axis=1) >= 0).all()
    assert grid[-1, -1] > grid[0, 0]


def test_phases_add_up_to_the_whole(shift_run: Measured) -> None:
    whole, *phases = run_surfaces(shift_run.run, TTFT_MS, TPOT_MS, by_phase=True)
    assert [phase.phase for phase in phases] == ["prompts", "answers"]
    assert sum(phase.planned for phase in phases) == whole.planned == 300
    together = sum(np.array(phase.attainment) * phase.planned for phase in phases) / whole.planned
    np.testing.assert_allclose(together, whole.attainment)


def test_a_failed_request_meets_nothing_a_one_token_answer_any_tpot(shift_run: Measured) -> None:
    table = shift_run.run.requests
    rows = table.to_pylist()
    rows[0] |= {"status": "failed"}
    rows[1] |= {"output_tokens": 1, "itl_ns": [], "last_token_ns": rows[1]["first_token_ns"]}
    columns = RequestColumns.of(table.from_pylist(rows, schema=table.schema))
    assert surface(columns, [1e12], [1e12]).attainment == ((299 / 300,),)
    assert surface(columns, [1e12], [1e-9]).attainment == ((1 / 300,),), "the one that has no later token"


@pytest.mark.parametrize("targets", [(), (0.0,), (-1.0, 5.0), (float("inf"),)])
def test_targets_must_be_positive(shift_run: Measured, targets: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="ttft targets"):
        run_surfaces(shift_run.run, targets, TPOT_MS)
