"""Algorithms 1 to 3 of Tian et al. (2025) against a second, direct implementation of their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbench.dispatch import DispatchRequest
from ebbench.dispatch.algorithms import (
    AdaptiveInterval,
    ChunkPacking,
    DecodeLoad,
    Hit,
    allocate_decode,
    outlier_bound,
)

LENGTHS = st.lists(st.integers(1, 5000), max_size=12)
CAPACITY = st.lists(st.integers(-2000, 4000), min_size=1, max_size=5)


def requests(lengths: list[int], first: int = 0) -> list[DispatchRequest]:
    return [DispatchRequest(first + i, length, length) for i, length in enumerate(lengths)]


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.integers(1, 9),
)
def test_interval_is_the_mean_of_the_window_plus_the_way_over_the_active(
    times: list[int], window: int, network_ns: int, active: int
) -> None:
    control = AdaptiveInterval(window, network_ns, default_ns=5_000_000, active=active)
    assert control.interval_ns == round((5_000_000 + network_ns) / active)
    for i, measured in enumerate(times):
        control.end_forward(measured)
        kept = times[max(0, i + 1 - window) : i + 1]
        assert math.isclose(control.mean_ns, sum(kept) / len(kept))
        assert control.interval_ns == round((sum(kept) / len(kept) + network_ns) / active)


def test_interval_follows_the_topology_at_once_and_survives_an_empty_one() -> None:
    control = AdaptiveInterval(4, 0, 12_000_000, active=4)
    control.topology(3)
    assert control.interval_ns == 4_000_000
    control.topology(0)
    assert control.interval_ns == 4_000_000
    control.topology(1)
    assert control.interval_ns == 12_000_000


class Allocation(NamedTuple):
    """``assigned``: (request, unit) in the order of assignment. ``left``: requests for the next cycle, in order."""

    assigned: list[tuple[DispatchRequest, int]]
    left: list[DispatchRequest]


def allocate_prefill(
    pending: Sequence[DispatchRequest],
    new: Sequence[DispatchRequest],
    available: Mapping[int, int],
    hit: Hit | None = None,
) -> Allocation:
    """Algorithm 2, PBAA: pending before new, longest first, each to the unit it leaves the most capacity.

    ``available``: C_avail per unit, prompt tokens that still fit its next forward pass. ``hit`` makes it cache-aware.
    Requests of equal length keep their order.
    """
    packing = ChunkPacking(available, hit)
    assigned: list[tuple[DispatchRequest, int]] = []
    left: list[DispatchRequest] = []
    for queue in (pending, new):
        for request in sorted(queue, key=lambda a: -a.tokens):
            unit = packing.place(request)
            if unit is None:
                left.append(request)
            else:
                assigned.append((request, unit))
    return Allocation(assigned, left)


@given(LENGTHS, LENGTHS, CAPACITY)
def test_prefill_allocation_is_the_greedy_of_algorithm_2(
    pending: list[int], new: list[int], capacity: list[int]
) -> None:
    old, fresh = requests(pending), requests(new, first=100)
    found = allocate_prefill(old, fresh, dict(enumerate(capacity)))
    left, expected, available = [], [], list(capacity)
    for queue in (old, fresh):
        for request in sorted(queue, key=lambda a: a.tokens, reverse=True):
            best = max(range(len(available)), key=lambda d: (available[d] - request.tokens, -d))
            if available[best] > 0:
                expected.append((request, best))
                available[best] -= request.tokens
            else:
                left.append(request)
    assert found.assigned == expected
    assert found.left == left


@given(LENGTHS, LENGTHS, CAPACITY)
def test_prefill_allocation_loses_and_doubles_nothing(pending: list[int], new: list[int], capacity: list[int]) -> None:
    everyone = requests(pending) + requests(new, first=100)
    found = allocate_prefill(requests(pending), requests(new, first=100), dict(enumerate(capacity)))
    assert sorted([request for request, _ in found.assigned] + found.left) == sorted(everyone)
    # A unit is given nothing once its capacity is used up, so at most its last request overdraws it.
    for unit, available in enumerate(capacity):
        given_to = [request.tokens for request, place in found.assigned if place == unit]
        assert not given_to or sum(given_to[:-1]) < available


def test_cache_aware_allocation_counts_only_what_is_not_cached() -> None:
    hits = {(0, 1): 900}
    found = allocate_prefill(
        requests([1000]), [], {0: 1000, 1: 600}, hit=lambda request, unit: hits.get((request.key, unit), 0)
    )
    assert found.assigned == [(DispatchRequest(0, 1000, 1000), 1)]  # 600 - 100 is more than 1000 - 1000


@given(
    st.lists(st.integers(1, 10**5), max_size=12),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), min_size=1, max_size=9),
)
def test_decode_allocation_skips_outliers_and_takes_the_least_loaded(
    lengths: list[int], loads: list[tuple[int, int]]
) -> None:
    state = [list(load) for load in loads]
    expected = []
    for request in sorted(requests(lengths), key=lambda a: a.total_tokens, reverse=True):
        q1, q3 = np.percentile([kv for _, kv in state], [25, 75])
        safe = [i for i, (_, kv) in enumerate(state) if kv <= q3 + 1.5 * (q3 - q1) + 1e-9] or list(range(len(state)))
        chosen = min(safe, key=lambda i: (state[i][0], state[i][1], i))
        expected.append((request, chosen))
        state[chosen][0] += 1
        state[chosen][1] += request.total_tokens
    assert allocate_decode(requests(lengths), {i: DecodeLoad(*load) for i, load in enumerate(loads)}) == expected


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_outlier_bound_is_numpys(kv: list[int]) -> None:
    q1, q3 = np.percentile(kv, [25, 75])
    assert math.isclose(outlier_bound(kv, 1.5), q3 + 1.5 * (q3 - q1), rel_tol=1e-12, abs_tol=1e-6)


def test_mask_off_leaves_the_least_batch() -> None:
    loads = {
        0: DecodeLoad(0, 10**6),
        1: DecodeLoad(1, 10),
        2: DecodeLoad(1, 11),
        3: DecodeLoad(1, 12),
        4: DecodeLoad(1, 13),
    }
    request = requests([5])
    assert allocate_decode(request, loads)[0][1] == 1
    assert allocate_decode(request, loads, multiplier=math.inf)[0][1] == 0
