"""Immediate dispatch policies: the instance that they choose."""

from __future__ import annotations

import numpy as np
import pytest

from ebbench.dispatch import DispatchRequest, Fleet, make_dispatcher, parse_dispatch
from ebbench.dispatch.base import Order
from ebbench.records.content import CHUNK_TOKENS


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


def test_prefix_affine_returns_to_the_instance_with_the_prefix_unless_the_load_is_unbalanced() -> None:
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
