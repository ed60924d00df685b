"""Values in an order with given means and mean roots of stretches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.traffic.arrivals import order_centred, order_with, relative_roots, stretch_centres


def per_stretch(values: np.ndarray, stretch: np.ndarray) -> np.ndarray:
    return np.bincount(stretch, values) / np.bincount(stretch)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 2)), min_size=0, max_size=200),
    st.lists(st.floats(0, 5), min_size=1, max_size=9),
    st.booleans(),
    st.integers(0, 99),
)
def test_values_only_change_places_within_their_group(
    rows: list[tuple[float, int]], levels: list[float], rooted: bool, seed: int
) -> None:
    sizes, groups = np.array([size for size, _ in rows]), np.array([group for _, group in rows], int)
    stretch = np.arange(len(rows)) // 7 % len(levels)
    roots = np.sqrt(levels) if rooted else ()
    order = order_with(stretch, sizes, np.random.default_rng(seed), means=levels, roots=roots, group=groups)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert (groups[order] == groups).all()


@pytest.mark.parametrize("seed", range(3))
def test_stretches_with_a_large_value_differ_from_middling_ones(seed: int) -> None:
    """Every second stretch is heavy-tailed, the others are of nearly equal values; both have the same mean."""
    rng = np.random.default_rng(seed)
    stretch = np.repeat(np.arange(200), 8)
    sigma = np.where(stretch % 2, 0.3, 1.6)
    values = np.exp(rng.standard_normal(1600) * sigma - sigma**2 / 2)
    means, roots = per_stretch(values, stretch), per_stretch(relative_roots(values), stretch)
    shuffled = rng.permutation(values)
    for known, spread_is_kept in ((roots, True), ((), False)):
        found = shuffled[order_with(stretch, shuffled, rng, means=means, roots=known)]
        assert np.abs(per_stretch(found, stretch) - means).mean() < 0.2 * means.mean()
        spreads = [np.log(one).reshape(-1, 8).std(axis=1) for one in (values, found)]
        assert (np.corrcoef(*spreads)[0, 1] > 0.7) == spread_is_kept
        assert (np.abs(per_stretch(relative_roots(found), stretch) - roots).mean() < 0.03) == spread_is_kept


@pytest.mark.parametrize("levels", [[1e-310], [5e-324, 1e-310], [0.0, 2e-308, 5.0], [0.0, 0.0]])
def test_levels_near_zero_are_levels(levels: list[float]) -> None:
    """Also beside one that no place has, as the last here."""
    sizes, stretch = np.array([1e6, 3.0, 2.0, 1.0] * 4), np.arange(16) // 8 % min(len(levels), 2)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        order = order_with(stretch, sizes, np.random.default_rng(0), means=levels, roots=np.sqrt(levels))
    assert sorted(order.tolist()) == list(range(16))
    found = np.bincount(stretch, sizes[order], 2)
    if len(levels) > 1 and levels[1] > levels[0]:
        assert found[1] > found[0]


def test_no_values_have_an_empty_order() -> None:
    none = np.zeros(0, int)
    assert len(order_with(none, [], np.random.default_rng(0), means=[1.0])) == 0
    assert len(order_centred(none, np.zeros(0), [], np.random.default_rng(0))) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), min_size=1, max_size=30),
    st.lists(st.floats(0, 1), min_size=30, max_size=30),
    st.integers(0, 99),
)
def test_values_only_change_places_within_their_stretch(
    rows: list[list[float]], centres: list[float], seed: int
) -> None:
    stretch = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    values, wanted = np.concatenate(rows), np.array(centres[: len(rows)])
    order = order_centred(stretch, values, wanted, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(values)))
    assert (stretch[order] == stretch).all()
    off = [np.abs(wanted - stretch_centres(stretch, one)) for one in (values, values[order])]
    assert (off[1] <= off[0] + 1e-9).all()


def test_the_centre_says_where_the_values_of_a_stretch_lie() -> None:
    first, even, last, none = [8.0, 0, 0, 0], [2.0, 2, 2, 2], [0.0, 0, 0, 8], [0.0, 0, 0, 0]
    stretch = np.repeat(np.arange(4), 4)
    assert stretch_centres(stretch, np.array(first + even + last + none)).tolist() == [0.125, 0.5, 0.875, 0.5]


@pytest.mark.parametrize("size", [8, 16])
def test_stretches_get_their_centres(size: int) -> None:
    """Heavy-tailed values, as gaps are, sorted in every second stretch, get the same centres after a random deal."""
    rng = np.random.default_rng(size)
    stretch = np.repeat(np.arange(300), size)
    rows = np.exp(1.5 * rng.standard_normal((300, size)))
    rows[::2].sort(axis=1)
    wanted = stretch_centres(stretch, rows.ravel())
    dealt = rng.permuted(rows, axis=1).ravel()
    found = dealt[order_centred(stretch, dealt, wanted, rng)]
    assert np.abs(stretch_centres(stretch, dealt) - wanted).mean() > 0.1
    assert np.abs(stretch_centres(stretch, found) - wanted).mean() < 0.02
