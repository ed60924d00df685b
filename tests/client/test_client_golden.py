"""Golden accuracy: against the server's own ledger, with no tolerance on counts and accounting."""

from __future__ import annotations

import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess
from tests.client.client_runs import column, plan_of, run


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_token_is_accounted_for(endpoint: str, workers: int) -> None:
    plan = plan_of(40, concurrency=16, input_tokens=7, output_tokens=9)
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=2)) as server:
        result = run(server.url, plan, workers=workers, endpoint=endpoint, id_prefix="x-")
        ledger = {entry.request_id: entry for entry in server.ledger()}

    assert column(result, "request_id") == plan.table.column("request_id").to_pylist()
    assert set(column(result, "status")) == {"ok"}
    assert len(ledger) == 40
    for row in result.requests.to_pylist():
        entry = ledger["x-" + row["request_id"]]
        assert row["output_tokens"] == entry.tokens == 9
        assert row["input_tokens"] == entry.prompt_tokens
        assert len(row["itl_ns"]) == 8
        assert row["first_token_ns"] + sum(row["itl_ns"]) == row["last_token_ns"]
        assert row["intended_ns"] <= row["sent_ns"] < row["first_byte_ns"] <= row["first_token_ns"]
    assert not result.interrupted
