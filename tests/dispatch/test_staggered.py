"""Staggered dispatch: when it sends, to which instance, and the effect of each switch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.dispatch import DispatchRequest, EndForward, Fleet, Order, UnitReport, make_dispatcher, parse_dispatch
from ebbench.dispatch.staggered import StaggeredDispatcher, StaggeredSettings

MS = 1_000_000
PAPER = StaggeredSettings(
    chunk_tokens=1000, default_forward_ns=100 * MS, bypass=False, sizing=False, overdraw="on", aged_cycles=None
)


def staggered(
    instances: int, base: StaggeredSettings = PAPER, units: int = 1, **changes: object
) -> StaggeredDispatcher:
    return StaggeredDispatcher(Fleet([units] * instances), replace(base, **changes))  # type: ignore[arg-type]


def request(key: int, tokens: int = 100) -> DispatchRequest:
    return DispatchRequest(key, tokens, tokens)


def done(instance: int, unit: int, received: int, duration_ms: float = 100, queued: int = 0) -> EndForward:
    return EndForward(instance, round(duration_ms * MS), units=(UnitReport(unit, received, queued, 0),))


def test_dispatch_needs_the_interval_and_a_ready_instance() -> None:
    sbs = staggered(2)
    sbs.arrive(request(0), 0)
    assert sbs.poll(0) == [Order(0, 0)]  # nothing was sent before: due, and instance 0 is ready
    sbs.arrive(request(1), 10 * MS)
    assert sbs.poll(10 * MS) == []
    assert sbs.next_ns(10 * MS) == 50 * MS  # I = 100 ms / 2
    assert sbs.poll(50 * MS) == [Order(1, 1)]
    sbs.arrive(request(2), 60 * MS)
    assert sbs.poll(100 * MS) == []  # the interval is over, but no unit has signalled
    sbs.end_forward(done(1, 1, 1), 110 * MS)
    assert sbs.poll(110 * MS) == [Order(2, 1)]


def test_a_batch_goes_to_one_instance_packed_over_its_units() -> None:
    sbs = staggered(2, units=2)
    for key, tokens in enumerate((100, 900, 300, 200)):
        sbs.arrive(request(key, tokens), 0)
    assert sbs.poll(0) == [Order(1, 0), Order(2, 1), Order(3, 1), Order(0, 1)]


def test_capacity_counts_what_is_in_transit_and_what_is_queued() -> None:
    sbs = staggered(1, interval=False)
    sbs.arrive(request(0, 900), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    # Signalled before the request came: still in transit, 100 tokens are free; then queued, then gone.
    sbs.end_forward(done(0, 0, received=0), MS)
    sbs.arrive(request(1, 150), MS)
    assert sbs.poll(MS) == [Order(1, 0)]
    sbs.end_forward(done(0, 0, received=2, queued=1050), 2 * MS)
    sbs.arrive(request(2, 10), 2 * MS)
    assert sbs.poll(2 * MS) == []
    sbs.end_forward(done(0, 0, received=2), 3 * MS)
    assert sbs.poll(3 * MS) == [Order(2, 0)]


def generating(instance: int) -> EndForward:
    return EndForward(instance, 10 * MS, continues=True, generates=True, units=(UnitReport(instance, 1, 1000, 0),))


@pytest.mark.parametrize(("bypass", "sent"), [(True, [Order(1, 1), Order(2, 0)]), (False, [])])
def test_instances_that_generate_are_sent_requests_at_once(bypass: bool, sent: list[Order]) -> None:
    """EB refills once its queue is long enough; a dispatcher that waits for an empty queue keeps it short for ever."""
    sbs = staggered(2, bypass=bypass)
    sbs.arrive(request(0, 1000), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    sbs.end_forward(generating(0), 2 * MS)
    sbs.arrive(request(1, 1000), 3 * MS)
    sbs.arrive(request(2, 1000), 3 * MS)
    assert sbs.poll(3 * MS) == sent
    assert sbs.wants_units is not bypass
    assert (sbs.next_ns(3 * MS) is None) is bypass


def test_a_pool_that_generates_no_more_is_staggered_again() -> None:
    sbs = staggered(1, bypass=True, window=3)
    sbs.end_forward(generating(0), 0)
    for passes in range(1, 4):
        assert not sbs.wants_units
        sbs.end_forward(done(0, 0, received=0), passes * 100 * MS)
    assert sbs.wants_units
    sbs.arrive(request(0, 1000), 400 * MS)
    assert sbs.poll(400 * MS) == [Order(0, 0)]
    sbs.arrive(request(1, 1000), 401 * MS)
    assert sbs.poll(401 * MS) == []


def test_requests_left_over_from_a_pass_are_sent_first_in_the_next() -> None:
    sbs = staggered(1, interval=False)
    sbs.arrive(request(0, 1000), 0)
    sbs.arrive(request(1, 400), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    sbs.arrive(request(2, 900), MS)
    sbs.end_forward(done(0, 0, received=1), 100 * MS)
    assert sbs.poll(100 * MS) == [Order(1, 0), Order(2, 0)]


def test_watchdog_frees_a_silent_instance_after_five_forward_times() -> None:
    sbs = staggered(1)
    sbs.arrive(request(0), 0)
    sbs.poll(0)
    sbs.arrive(request(1), MS)
    assert sbs.poll(499 * MS) == []
    assert sbs.next_ns(499 * MS) == 500 * MS
    assert sbs.poll(500 * MS) == [Order(1, 0)]
    blind = staggered(1, watchdog=False)
    blind.arrive(request(0), 0)
    blind.poll(0)
    blind.arrive(request(1), MS)
    assert blind.poll(10_000 * MS) == []


def test_zero_queue_makes_ready_without_a_signal() -> None:
    for zero_queue, expected in ((True, [Order(1, 0)]), (False, [])):
        sbs = staggered(1, zero_queue=zero_queue)
        sbs.arrive(request(0), 0)
        sbs.poll(0)
        sbs.ended(0, 90 * MS)
        sbs.arrive(request(1), 91 * MS)
        assert sbs.poll(200 * MS) == expected


def test_flow_control_refuses_after_the_limit_and_not_before() -> None:
    sbs = staggered(1, interval=False, cycle_limit=2, default_forward_ns=MS)
    sbs.arrive(request(0, 1000), 0)
    sbs.arrive(request(1, 1000), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    orders = []
    for cycle in range(1, 4):
        sbs.end_forward(done(0, 0, received=1, duration_ms=1, queued=1000), cycle * 10 * MS)
        orders.append(sbs.poll(cycle * 10 * MS))
    assert orders == [[], [Order(1, None)], []]
    assert sbs.waiting == 0


@pytest.mark.parametrize("bypass", [True, False])
def test_bypass_serves_an_idle_instance_at_once_under_light_load(bypass: bool) -> None:
    sbs = staggered(2, bypass=bypass)
    for key, now in ((0, 0), (1, 4000 * MS)):
        sbs.arrive(request(key), now)
        assert sbs.poll(now) == [Order(key, key)]
        sbs.ended(key, now + 5 * MS)
    # 10 ms after the last dispatch the interval of 50 ms is not over, but one arrival in two seconds makes no batch.
    sbs.arrive(request(2), 4010 * MS)
    assert sbs.poll(4010 * MS) == ([Order(2, 0)] if bypass else [])


def many_come(sbs: StaggeredDispatcher) -> None:
    """Eight arrivals at time 0 that were withdrawn: a rate is known."""
    for key in range(100, 108):
        sbs.arrive(request(key), 0)
        sbs.withdraw(key)


@pytest.mark.parametrize("ended", [False, True])
def test_an_idle_instance_waits_for_the_interval_unless_all_are_idle(ended: bool) -> None:
    sbs = staggered(2, bypass=True)
    many_come(sbs)
    for key in range(8):
        sbs.arrive(request(key), key * MS)
        assert sbs.poll(key * MS) == ([Order(0, 0)] if key == 0 else [])
    if ended:
        sbs.ended(0, 9 * MS)
    assert len(sbs.poll(10 * MS)) == (7 if ended else 0)


def test_a_full_batch_does_not_wait_for_the_interval() -> None:
    sbs = staggered(2, bypass=True)
    many_come(sbs)
    sbs.arrive(request(0), 0)
    sbs.poll(0)
    for key in range(1, 11):
        sbs.arrive(request(key, 90), MS)
    assert sbs.poll(MS) == []  # 900 tokens would not fill the chunk of 1,000
    sbs.arrive(request(11, 100), 2 * MS)
    assert {order.unit for order in sbs.poll(2 * MS)} == {1}


def test_without_overdraw_a_prompt_goes_only_where_it_fits() -> None:
    sbs = staggered(1, overdraw="off", interval=False)
    sbs.arrive(request(0, 700), 0)
    sbs.arrive(request(1, 400), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    sbs.end_forward(done(0, 0, received=1), 100 * MS)
    assert sbs.poll(100 * MS) == [Order(1, 0)]
    long = staggered(1, overdraw="off", interval=False)
    long.arrive(request(0, 5000), 0)
    assert long.poll(0) == [Order(0, 0)]  # it fits into no pass: computed in chunks over several passes


@pytest.mark.parametrize(("aged", "served"), [(3, True), (None, False)])
def test_aged_requests_are_not_overtaken_for_ever(aged: int | None, served: bool) -> None:
    sbs = staggered(1, aged_cycles=aged, interval=False, overdraw="off", default_forward_ns=MS)
    sbs.arrive(request(0, 500), 0)
    sent: list[Order] = []
    for cycle in range(12):  # two full chunks arrive for each one sent, so longer requests always remain
        now = cycle * 10 * MS
        for key in (2 * cycle + 1, 2 * cycle + 2):
            sbs.arrive(request(key, 1000), now)
        sbs.end_forward(done(0, 0, received=len(sent), duration_ms=1), now)
        sent += sbs.poll(now)
    assert (Order(0, 0) in sent) is served


def test_a_topology_change_changes_the_dispatch_interval() -> None:
    sbs = staggered(2)
    sbs.arrive(request(0), 0)
    assert sbs.poll(0) == [Order(0, 0)]
    sbs.topology([1], 10 * MS)
    assert sbs.interval.interval_ns == 100 * MS
    sbs.arrive(request(1), 10 * MS)
    assert sbs.poll(100 * MS) == [Order(1, 1)]
    sbs.topology([0, 1], 110 * MS)
    sbs.arrive(request(2), 110 * MS)
    assert sbs.poll(200 * MS) == [Order(2, 0)]
    sbs.topology([], 210 * MS)
    sbs.arrive(request(3), 210 * MS)
    assert sbs.poll(10_000 * MS) == []
    assert sbs.next_ns(10_000 * MS) is None


def test_withdrawn_requests_are_never_sent() -> None:
    sbs = staggered(1)
    for key in range(3):
        sbs.arrive(request(key), 0)
    sbs.withdraw(1)
    assert [order.key for order in sbs.poll(0)] == [0, 2]
    assert sbs.waiting == 0


def random_end(rng: random.Random, instance: int, units: int, received: list[int]) -> EndForward:
    """The end of a forward pass, with any state of its units."""
    reports = tuple(
        UnitReport(u, received[u], rng.choice((0, 0, 500)), rng.randrange(5000))
        for u in range(instance * units, (instance + 1) * units)
    )
    return EndForward(instance, rng.randrange(MS, 20 * MS), rng.random() < 0.5, rng.random() < 0.3, reports)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    instances=st.integers(1, 4),
    units=st.integers(1, 3),
    spec=st.sampled_from(
        ["sbs", "sbs:bypass=off", "sbs:interval=off", "sbs:packing=off", "sbs:signal=off", "sbs:overdraw=on",
         "sbs:cache_aware=on", "sbs:sizing=off", "sbs:patience=off", "sbs:patience=0",
         "sbs:adaptive=off", "sbs:network_ms=3", "sbs:cycle_limit=3", "round-robin",
         "least-outstanding", "power-of-two", "prefix-affine", "iqr"]
    ),
)  # fmt: skip
def test_every_request_is_ordered_exactly_once_whatever_happens(
    seed: int, instances: int, units: int, spec: str
) -> None:
    """Random arrivals, signals, losses of signals, ends, withdrawals and topology changes against any dispatcher."""
    rng = random.Random(seed)
    fleet = Fleet([units] * instances)
    dispatcher = make_dispatcher(parse_dispatch(spec), fleet, chunk_tokens=2000, default_forward_ns=10 * MS)
    now, key = 0, 0
    arrived, refused, withdrawn = set[int](), set[int](), set[int]()
    placed: dict[int, int] = {}
    received = [0] * (units * instances)
    active = set(range(instances))

    def poll() -> None:
        for order in dispatcher.poll(now):
            assert order.key in arrived - set(placed) - refused - withdrawn
            if order.unit is None:
                refused.add(order.key)
            else:
                assert order.unit // units in active
                placed[order.key] = order.unit
                received[order.unit] += 1

    for _ in range(120):
        now += rng.randrange(1, 4 * MS)
        event = rng.random()
        if event < 0.4:
            dispatcher.arrive(DispatchRequest(key, rng.randrange(1, 3000), 3000, tuple(range(rng.randrange(4)))), now)
            arrived.add(key)
            key += 1
        elif event < 0.7:
            dispatcher.end_forward(random_end(rng, rng.randrange(instances), units, received), now)
        elif event < 0.9 and placed:
            gone = rng.choice(sorted(placed))
            dispatcher.prefilled(gone, now)
            dispatcher.ended(gone, now)
        elif event < 0.95 and arrived - set(placed) - refused - withdrawn:
            victim = rng.choice(sorted(arrived - set(placed) - refused - withdrawn))
            withdrawn.add(victim)
            dispatcher.withdraw(victim)
        else:
            active = {i for i in range(instances) if rng.random() < 0.8}
            dispatcher.topology(active, now)
        poll()
    # Liveness: with all units back, all requests ended, and time passing, every remaining request is placed or refused.
    active = set(range(instances))
    dispatcher.topology(active, now)
    for _ in range(200):
        for open_key in placed:
            dispatcher.ended(open_key, now)
        poll()
        if not dispatcher.waiting:
            break
        now = dispatcher.next_ns(now) or now + MS
    assert not dispatcher.waiting
    assert arrived == set(placed) | refused | withdrawn
    for open_key in placed:
        dispatcher.ended(open_key, now)
    assert all(unit.open_requests == unit.in_flight_tokens == 0 for unit in fleet.units)
    assert fleet.idle == set(range(instances))


def test_signals_alone_keep_the_loop_going_when_ends_are_reported_late() -> None:
    sbs = staggered(2)
    for key in range(40):
        sbs.arrive(request(key, 500), 0)
    now, sent = 0, 0
    received = [0, 0]
    while sent < 40:
        for order in sbs.poll(now):
            assert order.unit is not None
            received[order.unit] += 1
            sent += 1
        now += 10 * MS
        sbs.end_forward(done(now // (10 * MS) % 2, now // (10 * MS) % 2, received[now // (10 * MS) % 2]), now)
        assert now < 60_000 * MS


def test_a_batch_is_sent_ahead_by_the_length_of_the_pass_that_runs() -> None:
    """Passes take 10 ms + 0.1 ms per token: one of 200 tokens is three quarters over after 22.5 ms."""
    for queued, opens_ms in ((200, 22.5), (1000, 82.5)):
        sbs = staggered(1, bypass=True, sizing=True, lookahead=0.75, network_ns=1)
        for key in range(10):
            tokens = 100 * (key + 1)
            sbs.arrive(request(key, tokens), key * 1000 * MS)
            assert sbs.poll(key * 1000 * MS) == [Order(key, 0)]
            sbs.ended(key, key * 1000 * MS + 200 * MS)
            sbs.end_forward(done(0, 0, key + 1, duration_ms=10 + tokens / 10), key * 1000 * MS + 200 * MS)
        sbs.arrive(request(10, 1000 + queued), 19_000 * MS)
        assert sbs.poll(19_000 * MS) == [Order(10, 0)]
        report = (UnitReport(0, 11, queued, 0),)
        sbs.end_forward(EndForward(0, 110 * MS, continues=True, units=report), 20_000 * MS)
        for key in (11, 12):  # with the running request, too many for a light load
            sbs.arrive(request(key, 100), 20_000 * MS)
        assert sbs.poll(20_000 * MS) == []
        opens_ns = sbs.next_ns(20_000 * MS)
        assert opens_ns is not None
        assert abs(opens_ns - 20_000 * MS - opens_ms * MS) < MS


def test_unknown_names_and_values_are_refused_with_the_remedy() -> None:
    with pytest.raises(Exception, match="did you mean 'round-robin'"):
        parse_dispatch("round-robbin")
    with pytest.raises(Exception, match="did you mean 'packing'"):
        parse_dispatch("sbs:paking=off")
    with pytest.raises(Exception, match="write on or off"):
        parse_dispatch("sbs:packing=maybe")
    with pytest.raises(Exception, match="takes no settings"):
        parse_dispatch("round-robin:x=1")


@pytest.mark.parametrize("text", ["sbs", "sbs:packing=off", "sbs:cycle_limit=100,network_ms=1.5", "iqr:multiplier=2"])
def test_names_read_back(text: str) -> None:
    assert parse_dispatch(parse_dispatch(text).name) == parse_dispatch(text)
