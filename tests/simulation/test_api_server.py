"""The simulated API server: FIFO queues of each process, its core and its tokenizer, between clients and engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.config.topology import TopologySpec, parse_topology
from ebbench.devices.profiles import find_profile
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.simulation.engine import Coasting
from ebbench.simulation.front_end import FrontEnd, FrontEndCosts, WayCosts, find_api_server, front_end_costs
from ebbench.simulation.state import RequestState
from ebbench.spec.server import EngineOptions
from tests.cluster import cluster_worlds as cluster
from tests.simulation.worlds import World, plan, worlds
from vllm_eb.policy import parse_policy

DATACENTER = "datacenter"
REQUESTS, ANSWER = 4, 12  # of the queue's own tests
OPTIONS = EngineOptions(max_num_seqs=16, max_num_batched_tokens=512, num_kv_blocks=4000)


def costs(token_us: float, request_us: float = 0.0, prompt_token_us: float = 0.0) -> FrontEndCosts:
    return FrontEndCosts(token_us=token_us, request_us=request_us, prompt_token_us=prompt_token_us, source="test")


def front_end_of(name: str) -> WayCosts:
    found = find_api_server(name).front_end
    assert found is not None
    return found


def in_a_file(folder: Path, token_us: float, request_us: float, prompt_token_us: float) -> str:
    path = folder / "costs.toml"
    path.write_text(
        f'token_us = {token_us}\nrequest_us = {request_us}\nprompt_token_us = {prompt_token_us}\nsource = "test"\n'
    )
    return str(path)


@pytest.fixture(scope="module")
def free_of_charge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An API server that takes no time."""
    return in_a_file(tmp_path_factory.mktemp("api"), 0.0, 0.0, 0.0)


class TickingServer:
    """Reference of the recursion: a FIFO server that does one nanosecond of work per tick."""

    def __init__(self) -> None:
        self._queue: deque[list[Any]] = deque()
        self.left: dict[Any, int] = {}
        self._now = 0

    def come(self, time_ns: int, jobs: Sequence[tuple[Any, int]]) -> None:
        """Jobs, each a name and its work in ns, come at this time."""
        self.run(time_ns)
        self._queue.extend([name, work] for name, work in jobs)

    def run(self, until_ns: int) -> None:
        """Work until then, and finish what takes no more work."""
        while self._now < until_ns:
            self._finish()
            if self._queue:
                self._queue[0][1] -= 1
            self._now += 1
        self._finish()

    def _finish(self) -> None:
        while self._queue and self._queue[0][1] == 0:
            self.left[self._queue.popleft()[0]] = self._now


Job = tuple[int, str, tuple[int, ...], int]  # ns since the job before, kind, rows, steps


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Requests that come, single steps and runs of steps, in the order of their times."""
    found: list[Job] = [(0, "enter", (row,), 1) for row in range(REQUESTS)]
    for _ in range(draw(st.integers(1, 8))):
        rows = tuple(draw(st.permutations(range(REQUESTS)))[: draw(st.integers(1, REQUESTS))])
        found.append((draw(st.integers(0, 40)), "stream", rows, draw(st.integers(1, 3))))
    return found


@given(jobs(), st.integers(1, 3), st.integers(0, 7), st.integers(0, 50), st.integers(0, 9), st.booleans())
@settings(max_examples=200, deadline=None)
def test_departures_are_those_of_a_queue_worked_through_tick_by_tick(
    traffic: list[Job], count: int, token_ns: int, request_ns: int, prompt_ns: int, together: bool
) -> None:
    """Steps given one by one or together, with any number of processes."""
    state = RequestState(plan([(3, ANSWER)] * REQUESTS, concurrency=REQUESTS))
    servers = FrontEnd(costs(token_ns / 1e3, request_ns / 1e3, prompt_ns / 1e3), count, state)
    assert state.client_ns is not None
    slow = [TickingServer() for _ in range(count)]
    entered, expected = {}, {}
    now_ns = 0
    for gap_ns, kind, rows, steps in traffic:
        now_ns += gap_ns
        if kind == "enter":
            entered[rows[0]] = servers.enter(rows[0], now_ns)
            slow[rows[0] % count].come(now_ns, [(rows[0], request_ns)])
            continue
        array = np.array(rows)
        slots = state.next_slot[array]
        if max(slots - state.first_slot[array]) + steps > ANSWER:
            break
        ends_ns = [now_ns + 11 * step for step in range(steps)]
        for step, end_ns in enumerate(ends_ns):
            for row, slot in zip(rows, slots.tolist(), strict=True):
                slow[row % count].come(end_ns, [(("token", slot + step), token_ns)])
                expected[slot + step] = row % count
        if together:
            servers.stream_steps(ends_ns, array, slots)
        else:
            for step, end_ns in enumerate(ends_ns):
                servers.stream(end_ns, array, slots + step)
        state.next_slot[array] = slots + steps
        now_ns = ends_ns[-1]
    for server in slow:
        server.run(now_ns + 100_000)
    tokenizers = [TickingServer() for _ in range(count)]
    for row in entered:
        tokenizers[row % count].come(slow[row % count].left[row], [(row, 3 * prompt_ns)])
    for tokenizer in tokenizers:
        tokenizer.run(now_ns + 100_000)
    assert entered == {row: tokenizers[row % count].left[row] for row in entered}
    for slot, process in expected.items():
        assert state.client_ns[slot] == slow[process].left["token", slot]
    assert np.count_nonzero(state.client_ns >= 0) == len(expected)


@given(world=worlds(), count=st.integers(1, 3), slow=st.booleans())
@settings(max_examples=120, deadline=None)
def test_every_request_ends_with_all_its_tokens_in_order(world: World, count: int, slow: bool) -> None:
    options = replace(world.options, api_server=DATACENTER, api_server_count=count)
    result = replace(world, options=options).run()
    found = find_api_server(DATACENTER)
    steps = {id_: step["end_ns"] for step in result.steps.to_pylist() for id_ in step["request_ids"]}
    for request in result.requests.to_pylist():
        assert request["status"] == "ok"
        assert request["output_tokens"] == request["output_tokens_planned"] == len(request["itl_ns"]) + 1
        assert request["first_token_ns"] + sum(request["itl_ns"]) == request["last_token_ns"] == request["end_ns"]
        assert all(gap >= found.token_ns for gap in request["itl_ns"])  # one core streams one token at a time
        assert request["scheduled_ns"] >= request["sent_ns"] + found.request_ns + found.tokenizing_ns(
            request["input_tokens"]
        )
        assert request["end_ns"] >= steps[request["request_id"]] + found.token_ns


@given(world=worlds())
@settings(max_examples=100, deadline=None)
def test_an_api_server_that_takes_no_time_changes_nothing(world: World, free_of_charge: str) -> None:
    off = world.run()
    free = replace(world, options=replace(world.options, api_server=free_of_charge)).run()
    assert free.requests.equals(off.requests)
    assert free.steps.equals(off.steps)
    assert free.decisions.equals(off.decisions)


@given(world=worlds(), seed=st.integers(0, 5), api_server=st.sampled_from(["off", DATACENTER]))
@settings(max_examples=60, deadline=None)
def test_decodes_made_in_a_row_and_one_by_one_are_the_same(world: World, seed: int, api_server: str) -> None:
    """Departures of earlier tokens lie between the steps and release new requests, which enter later."""
    options = replace(
        world.options, api_server=api_server, front_end_ms=float(seed), enable_prefix_caching=False, warmup=seed
    )
    coasting = replace(world, options=options).run()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Coasting, "make_steps", lambda *_: False)
        stepping = replace(world, options=options).run()
    assert coasting.requests.equals(stepping.requests)
    assert coasting.steps.equals(stepping.steps)


def test_a_lone_request_waits_for_its_prompt_and_its_tokens() -> None:
    world = World(plan([(100, 3)], concurrency=1), "v1", replace(OPTIONS, async_scheduling=False))
    off = world.run().requests.to_pylist()[0]
    on = replace(world, options=replace(world.options, api_server=DATACENTER)).run().requests.to_pylist()[0]
    found = find_api_server(DATACENTER)
    handled_ns = found.request_ns + found.tokenizing_ns(100)
    assert on["scheduled_ns"] == off["scheduled_ns"] + handled_ns
    assert on["first_token_ns"] == off["first_token_ns"] + handled_ns + found.token_ns
    assert on["itl_ns"] == off["itl_ns"]


def test_a_front_end_delays_a_request_and_none_of_its_tokens() -> None:
    world = World(plan([(100, 3)], concurrency=1), "v1", OPTIONS)
    off = world.run().requests.to_pylist()[0]
    on = replace(world, options=replace(world.options, front_end_ms=5.0)).run().requests.to_pylist()[0]
    tokenizing_ns = round(100 * 1e3 * front_end_of("datacenter").prompt_token_us)
    assert on["scheduled_ns"] == off["scheduled_ns"] + 5_000_000 + tokenizing_ns
    assert on["first_token_ns"] == off["first_token_ns"] + 5_000_000 + tokenizing_ns
    assert on["itl_ns"] == off["itl_ns"]
    assert on["end_ns"] - on["first_token_ns"] == off["end_ns"] - off["first_token_ns"]


def test_prompts_are_tokenized_one_by_one_and_otherwise_wait_together() -> None:
    costs = front_end_costs(replace(OPTIONS, front_end_ms=5.0))
    servers = FrontEnd(costs, 1, RequestState(plan([(1000, 2), (2000, 2)], concurrency=2)))
    each = round(1e6 * costs.prompt_token_us)
    assert [servers.enter(row, 0) for row in (0, 1)] == [5_000_000 + each, 5_000_000 + 3 * each]


def test_a_tokenizer_leaves_the_core_to_other_jobs() -> None:
    """It is a thread beside the event loop: the second request is handled, and a token leaves, while it works."""
    state = RequestState(plan([(1000, 2), (10, 2)], concurrency=2))
    servers = FrontEnd(costs(token_us=10.0, request_us=100.0, prompt_token_us=1.0), 1, state)
    assert [servers.enter(row, 0) for row in (0, 1)] == [1_100_000, 1_110_000]
    servers.stream(250_000, np.array([0]), np.array([0]))
    assert state.client_ns is not None
    assert state.client_ns[0] == 260_000


@pytest.mark.parametrize(
    ("device", "given_ms", "latency_ms"),
    [("h200", None, 13.0), ("h200", 4.0, 4.0), ("h200", 0.0, 0.0), ("rtx-pro-6000", None, 0.0),
     ("rtx-pro-6000", 4.0, 4.0)],
)  # fmt: skip
def test_the_front_end_is_that_of_the_machine_unless_given(
    device: str, given_ms: float | None, latency_ms: float
) -> None:
    found = front_end_costs(replace(OPTIONS, front_end_ms=given_ms), find_profile(device))
    assert found.latency_us / 1e3 == latency_ms
    assert not found.streams


def test_an_api_server_has_the_front_end_of_its_machine() -> None:
    alone = find_api_server(DATACENTER)
    found = front_end_costs(replace(OPTIONS, api_server=DATACENTER), find_profile("h100"))
    assert found.token_us == alone.token_us
    assert found.tokenizing_ns(100) > alone.tokenizing_ns(100)
    assert found.latency_ns == 13_000_000


def test_two_processes_pass_on_what_one_is_too_slow_for(tmp_path: Path) -> None:
    """64 streams of 10 ms steps make 6,400 tokens/s; a process that needs 200 us per token passes 5,000 on."""
    slow = in_a_file(tmp_path, 200.0, 0.0, 0.0)
    world = World(plan([(8, 400)] * 64, concurrency=64), "v1", replace(OPTIONS, max_num_seqs=64))

    def tokens_per_s(**settings: Any) -> float:
        result = replace(world, options=replace(world.options, **settings)).run()
        rows = result.requests.to_pylist()
        return sum(row["output_tokens"] for row in rows) / (max(row["end_ns"] for row in rows) / 1e9)

    alone = tokens_per_s()
    assert alone < 6_400
    one = tokens_per_s(api_server=slow)
    assert one <= 5_000
    assert tokens_per_s(api_server=slow, api_server_count=2) == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("topology", ["dp=3", "1p1d", "2p2d"])
@pytest.mark.parametrize("first_token", ["decode", "prefill"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_topologies_lose_nothing_behind_api_servers(
    topology: str, first_token: str, concurrency: int | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    lengths = [(int(a), int(b)) for a, b in zip(rng.integers(1, 400, 40), rng.integers(1, 30, 40), strict=True)]
    spec = parse_topology(topology)
    if spec.disaggregated:
        spec = cluster.pools(int(topology[0]), int(topology[2]), first_token=first_token)
    arrivals = None if concurrency else np.cumsum(rng.exponential(0.05, 40)).tolist()
    made = cluster.plan(lengths, arrivals, concurrency or 8)
    slow = in_a_file(tmp_path, 60.0, 500_000.0, 1.0)  # longer than everything else in a request's way
    result, found = _clustered(made, spec, api_server=slow), find_api_server(slow)
    for request in result.requests.to_pylist():
        assert request["status"] == "ok"
        assert request["output_tokens"] == request["output_tokens_planned"]
        assert request["first_token_ns"] + sum(request["itl_ns"]) == request["end_ns"]
        assert min(request["itl_ns"], default=1) > 0
        entries = 2 if spec.disaggregated and first_token == "decode" else 1
        waited_ns = request["first_token_ns"] - request["sent_ns"]
        handled_ns = found.request_ns + found.tokenizing_ns(request["input_tokens"])
        assert waited_ns >= entries * handled_ns + found.token_ns


@pytest.mark.parametrize("topology", ["dp=3", "2p2d"])
def test_topologies_behind_free_api_servers_are_as_without(topology: str, free_of_charge: str) -> None:
    lengths = [(50 + 7 * i, 1 + i % 20) for i in range(30)]
    spec = cluster.pools(2, 2) if topology == "2p2d" else parse_topology(topology)
    made = cluster.plan(lengths, None, 9)
    off, free = (_clustered(made, spec, api_server=name) for name in ("off", free_of_charge))
    assert free.requests.equals(off.requests)
    assert free.steps.equals(off.steps)


def _clustered(made: Any, spec: TopologySpec, **changes: Any) -> EngineResult:
    options = replace(OPTIONS, **changes)
    return SimEngine(spec).run(made, parse_policy("v1"), cluster.device(cluster.FixedAndToken(0.01)), options, None)


def test_costs_come_with_their_source_and_bad_ones_are_refused(tmp_path: Path) -> None:
    assert find_api_server(DATACENTER).source
    for name in ("off", "auto"):
        assert front_end_costs(EngineOptions(api_server=name)).token_us == 0
    with pytest.raises(UnknownNameError, match="datacenter"):
        find_api_server("datacentre")
    with pytest.raises(InputFileError, match="token_us"):
        find_api_server(in_a_file(tmp_path, -1.0, 0.0, 0.0))
    with pytest.raises(UsageError, match="--api-server datacenter"):
        front_end_costs(EngineOptions(api_server="off", api_server_count=2))
    with pytest.raises(UsageError, match="at least 1"):
        EngineOptions(api_server_count=0)
