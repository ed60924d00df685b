"""Immediate dispatch policies: the instance that they choose."""

from __future__ import annotations

import numpy as np
import pytest

from ebbench.dispatch import DispatchRequest, Fleet, make_dispatcher, parse_dispatch
from ebbench.dispatch.base import EndForward, Order
from ebbench.records import CHUNK_TOKENS


def placed(name: str, instances: int, count: int, units: int = 1) -> list[int]:
    dispatcher = make_dispatcher(parse_dispatch(name), Fleet([units] * instances), chunk_tokens=100)
    found = []
    for key in range(count):
        dispatcher.arrive(DispatchRequest(key, 10, 10), key)
        found += [order.unit for order in dispatcher.poll(key)]
    return found  # type: ignore[return-value]


def test_round_robin_takes_turns_over_instances_first() -> None:
    assert placed("round-robin", 3, 6) == [0, 1, 2, 0, 1, 2]
    assert placed("round-robin", 2, 4, units=2) == [0, 2, 1, 3]


def test_least_outstanding_prefers_instances_that_have_finished_requests() -> None:
    dispatcher = make_dispatcher(parse_dispatch("least-outstanding"), Fleet([1, 1, 1]), chunk_tokens=100)
    for key in range(3):
        dispatcher.arrive(DispatchRequest(key, 10, 10), key)
        dispatcher.poll(key)
    dispatcher.ended(1, 5)
    dispatcher.arrive(DispatchRequest(9, 10, 10), 6)
    assert dispatcher.poll(6) == [Order(9, 1)]


def test_power_of_two_is_balanced_and_seeded() -> None:
    first, second = placed("power-of-two", 8, 4000), placed("power-of-two", 8, 4000)
    assert first == second
    counts = np.bincount(first, minlength=8)
    # Two choices keep the spread within a few requests, where one would leave about sqrt(500).
    assert counts.max() - counts.min() <= 8


def test_prefix_affine_follows_the_prefix_unless_load_is_unbalanced() -> None:
    fleet = Fleet([1, 1, 1])
    dispatcher = make_dispatcher(parse_dispatch("prefix-affine:slack=4"), fleet, chunk_tokens=100)
    prefix = (11, 12, 13)
    tokens = 4 * CHUNK_TOKENS
    dispatcher.arrive(DispatchRequest(0, tokens, tokens, prefix), 0)
    [home] = dispatcher.poll(0)
    dispatcher.arrive(DispatchRequest(1, tokens, tokens, (99, 98)), 1)
    [other] = dispatcher.poll(1)
    assert other.unit != home.unit
    for key in range(2, 6):
        dispatcher.arrive(DispatchRequest(key, tokens, tokens, prefix), key)
        assert dispatcher.poll(key) == [Order(key, home.unit)]
    dispatcher.arrive(DispatchRequest(6, tokens, tokens, prefix), 6)
    assert dispatcher.poll(6)[0].unit != home.unit  # five open there, none elsewhere: unbalanced


@pytest.mark.parametrize("name", ["round-robin", "least-outstanding", "power-of-two", "prefix-affine", "iqr"])
def test_nothing_is_sent_while_no_instance_is_active(name: str) -> None:
    dispatcher = make_dispatcher(parse_dispatch(name), Fleet([1, 1]), chunk_tokens=100)
    dispatcher.topology([], 0)
    dispatcher.arrive(DispatchRequest(0, 10, 10), 1)
    assert dispatcher.poll(1) == []
    dispatcher.topology([1], 2)
    assert dispatcher.poll(2) == [Order(0, 1)]


def longest_first(name: str) -> list[tuple[int, int, int]]:
    """(time, key, unit) of three requests of 10, 300 and 20 tokens that come 1 ms apart after one that was placed."""
    ms = 1_000_000
    dispatcher = make_dispatcher(parse_dispatch(name), Fleet([3]), chunk_tokens=100, default_forward_ns=40 * ms)
    dispatcher.arrive(DispatchRequest(0, 50, 50), 0)
    orders = [(0, order.key, order.unit) for order in dispatcher.poll(0)]
    for key, tokens in ((1, 10), (2, 300), (3, 20)):
        dispatcher.arrive(DispatchRequest(key, tokens, tokens), key * ms)
        orders += [(key * ms, order.key, order.unit) for order in dispatcher.poll(key * ms)]
    due_ns = dispatcher.next_ns(3 * ms)
    if due_ns is not None:
        orders += [(due_ns, order.key, order.unit) for order in dispatcher.poll(due_ns)]
    assert dispatcher.waiting == 0
    return orders  # type: ignore[return-value]


def test_iqr_places_the_requests_of_a_window_longest_first() -> None:
    """As in Algorithm 3: what came within the interval (one instance: a mean pass) is placed at its end, by length."""
    ms = 1_000_000
    orders = longest_first("iqr")
    assert [key for _, key, _ in orders] == [0, 2, 3, 1]
    assert [at for at, _, _ in orders] == [0, 40 * ms, 40 * ms, 40 * ms]


def test_iqr_without_a_window_places_each_as_it_arrives() -> None:
    ms = 1_000_000
    orders = longest_first("iqr:window=off")
    assert [(at, key) for at, key, _ in orders] == [(0, 0), (ms, 1), (2 * ms, 2), (3 * ms, 3)]


def test_the_window_of_iqr_follows_measured_passes() -> None:
    ms = 1_000_000
    dispatcher = make_dispatcher(parse_dispatch("iqr"), Fleet([1, 1]), chunk_tokens=100, default_forward_ns=40 * ms)
    dispatcher.arrive(DispatchRequest(0, 50, 50), 0)
    dispatcher.poll(0)
    dispatcher.end_forward(EndForward(0, 10 * ms), ms)
    dispatcher.arrive(DispatchRequest(1, 50, 50), ms)
    assert dispatcher.next_ns(ms) == 5 * ms, "a mean pass over two instances"
