"""Bodies of long prompts: written from tables, and built ahead of time within a limit of memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.client import session_plan
from ebbench.client.bodies import _WORDS, PromptTable, RequestBodies, Turn
from ebbench.client.session_plan import LONG_PROMPT_TOKENS, BodiesAhead, plan_sessions
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.plan import token_ids
from ebbench.spec.client import ClientOptions
from tests.client.client_runs import column, plan_of, run

LONG = LONG_PROMPT_TOKENS


@given(st.lists(st.integers(0, 999), min_size=1), st.sampled_from([1000, 100_000]))
def test_a_table_writes_the_json_of_a_list(tokens: list[int], vocab: int) -> None:
    written = PromptTable.of_ids(vocab).json(np.array(tokens, np.int32))
    assert bytes(written) == json.dumps(tokens, separators=(",", ":")).encode()
    words = PromptTable.of_words(_WORDS).json(np.array(tokens, np.int32) % len(_WORDS))
    assert json.loads(bytes(words)).split() == [_WORDS[token % len(_WORDS)] for token in tokens]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_prompt_has_the_tokens_of_its_stream(endpoint: str) -> None:
    bodies = RequestBodies("m", ClientOptions(endpoint=endpoint))  # type: ignore[arg-type]
    body = json.loads(bodies.build(Turn(0, "r", 0, 3000, 6, 77, None, None)))
    if endpoint == "completions":
        assert body["prompt"] == token_ids(77, None, 0, 3000, 30_000).tolist()
    else:
        ids = token_ids(77, None, 0, 3000, len(_WORDS)).tolist()
        assert body["messages"] == [{"role": "user", "content": " ".join(_WORDS[i] for i in ids)}]


def ahead_of(sessions: int, first: int = 0, step: int = 1, tokens: int = LONG) -> tuple[BodiesAhead, RequestBodies]:
    plan = plan_sessions(plan_of(sessions, input_tokens=tokens).table, plan_of(sessions).phases, None)
    bodies = RequestBodies("m", ClientOptions())
    return BodiesAhead(bodies, plan, first, step), bodies


def test_a_body_built_ahead_is_the_one_built_when_due() -> None:
    ahead, bodies = ahead_of(6, first=1, step=2)
    ahead.start(3)
    made = {row: ahead.take(row) for row in range(6)}
    ahead.close()
    assert [row for row, body in made.items() if body is not None] == [1, 3, 5]
    assert made[3] == bodies.build(Turn(3, "r3", 0, LONG, 6, 3, None, None))


def test_bodies_are_built_ahead_up_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_plan, "LIMIT_BYTES", 1)
    ahead, _ = ahead_of(50)
    ahead.start(50)  # returns although only one body fits
    assert list(ahead._built) == [0]
    ahead.take(0)
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: 1 in ahead._built, 10)
    ahead.passed(30)  # another worker has released sessions up to 29
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: set(ahead._built) <= {29, 30} and bool(ahead._built), 10)
    ahead.close()


def test_short_prompts_are_built_before_the_start_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, bodies = ahead_of(5, tokens=LONG - 1)
    body = bodies.build(Turn(2, "r2", 0, LONG - 1, 6, 2, None, None))
    monkeypatch.setattr(session_plan, "SHORT_BYTES", 3 * len(body) - 9)
    ahead.start(5)
    assert ahead.take(2) == body
    assert ahead.take(2) is None
    assert ahead.take(3) is None
    ahead.close()


def test_workers_that_share_sessions_out_build_none_before_the_start() -> None:
    ahead, _ = ahead_of(5, step=2, tokens=5)
    ahead.start(5)
    assert ahead.take(0) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_long_prompts_arrive_whole(workers: int) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1)) as server:
        result = run(server.url, plan_of(20, concurrency=6, input_tokens=20_000), workers=workers)
        assert {entry.prompt_tokens for entry in server.ledger()} == {20_000}
    assert set(column(result, "status")) == {"ok"}
