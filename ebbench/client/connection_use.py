"""What a run's connections cost: how many there were, and whether requests waited for a server to accept theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.messages import WorkerDone

_OVERTAKEN_BY = 3
"""A request waited for its connection if so many later ones, on connections in use, were answered before it."""
_SLOWER_NS = 50_000_000
_FEWEST = 3
_TIMES_AS_OFTEN = 3.0
"""How much more often that must happen to first requests than to others, which a priority can let wait, too."""


def connection_totals(workers: Iterable[WorkerDone | None]) -> dict[str, int]:
    """Sums over the workers: connections opened, and the most that each held and used at a time."""
    counts = [done.connections for done in workers if done is not None]
    return {name: sum(getattr(one, name) for one in counts) for name in ("opened", "most_held", "most_used")}


def slow_first_uses(requests: pa.Table, first_rows: Sequence[int]) -> tuple[str, ...]:
    """A warning if requests that were the first on their connection waited while others overtook them; else empty.

    ``first_rows``: the rows of ``requests`` on whose connections no response had come before.
    """
    sent_ns, answered_ns = _times(requests)
    first = np.zeros(len(sent_ns), np.bool_)
    first[list(first_rows)] = True
    first, other = first & (sent_ns >= 0), ~first & (sent_ns >= 0)
    slow = _overtaken(sent_ns, answered_ns, first, other)
    if len(slow) < _FEWEST:
        return ()
    slow_others = len(_overtaken(sent_ns, answered_ns, other, other))
    if len(slow) / int(first.sum()) < _TIMES_AS_OFTEN * slow_others / max(1, int(other.sum())):
        return ()
    waits_s = (answered_ns - sent_ns)[slow] / 1e9
    return (
        f"{len(slow)} requests that were the first on their connection waited up to {waits_s.max():.2g} s (median "
        f"{np.median(waits_s):.2g} s) while later ones, on connections in use, were answered: the server, or a proxy "
        "before it, serves few connections at a time (threads, a limit), so their latencies are not those of "
        "generation; give --connections per-request, or a lower load.",
    )


def _times(requests: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """When each request was sent and when its answer began, else when it ended (ns); -1 for one never sent."""
    sent, first, end = (requests.column(name).to_numpy() for name in ("sent_ns", "first_byte_ns", "end_ns"))
    begun = np.where(np.isnan(first.astype(float)), end.astype(float), first.astype(float))
    return np.nan_to_num(sent.astype(float), nan=-1).astype(np.int64), np.nan_to_num(begun, nan=-1).astype(np.int64)


def _overtaken(
    sent_ns: npt.NDArray[np.int64],
    answered_ns: npt.NDArray[np.int64],
    which: npt.NDArray[np.bool_],
    others: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Rows of ``which`` that _OVERTAKEN_BY of ``others`` overtook: sent later, answered _SLOWER_NS or more before."""
    order = np.flatnonzero(others)[np.argsort(sent_ns[others], kind="stable")]
    sent, answered = sent_ns[order], answered_ns[order]
    found = []
    for row in np.flatnonzero(which & (answered_ns - sent_ns > _SLOWER_NS)):
        begin, end = np.searchsorted(sent, (sent_ns[row] + 1, answered_ns[row]))
        if np.count_nonzero(answered[begin:end] < answered_ns[row] - _SLOWER_NS) >= _OVERTAKEN_BY:
            found.append(row)
    return np.array(found, np.int64)
