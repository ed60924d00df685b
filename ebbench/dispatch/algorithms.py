"""Algorithms 1 to 3 of Tian et al. (2025): the queue of held requests, the interval, chunks of a pass, decode units."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ebbench.dispatch.base import DispatchRequest

MAX_STALE_ENTRIES = 64
"""Heap entries of removed requests at which the heap is rebuilt."""


class QueuedRequest(NamedTuple):
    """A request queued at ``since_ns``; ``rank`` and ``order`` define the order."""

    rank: int
    order: int
    request: DispatchRequest
    since_ns: int = 0


class CycleQueue:
    """A queue in the order of Algorithm 2 with O(log n) per request.

    ``longest_first`` False keeps the order of arrival. The earlier of two equally long requests goes first. Not in the
    paper: a request left over in ``aged_cycles`` cycles goes before all others, longest waiting first; otherwise a
    stream of long requests would starve the short ones.
    """

    def __init__(self, *, longest_first: bool, aged_cycles: int | None = None) -> None:
        self._longest_first, self._aged_cycles = longest_first, aged_cycles
        self._order = 0
        self._cycle = 0
        self._pending: list[QueuedRequest] = []  # a heap, like the next list
        self._new: list[QueuedRequest] = []
        self._held: OrderedDict[int, QueuedRequest] = OrderedDict()  # the oldest entry is found in O(1)
        self.tokens = 0  # prompt tokens of all requests held
        # Pending requests, oldest first, with the number of the cycle before the first one they missed.
        self._joined: OrderedDict[int, int] = OrderedDict()
        self._tried: set[int] = set()  # requests tried in this cycle

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: DispatchRequest, now_ns: int = 0) -> None:
        """Add a request that no cycle has tried yet."""
        self._order += 1
        queued = QueuedRequest(-request.tokens if self._longest_first else 0, self._order, request, now_ns)
        self._held[request.key] = queued
        self.tokens += request.tokens
        heapq.heappush(self._new, queued)

    def pop(self) -> QueuedRequest:
        """Remove and return the next request. Raises IndexError if the queue is empty."""
        aged = self._oldest_aged()
        if aged is not None:
            return self._remove(aged)
        for heap in (self._pending, self._new):
            while heap:
                queued = heapq.heappop(heap)
                if self._held.get(queued.request.key) is queued:  # otherwise it was withdrawn
                    self._remove(queued.request.key)
                    return queued
        raise IndexError("the queue is empty")

    def oldest(self, count: int) -> list[QueuedRequest]:
        """The first ``count`` requests in order of arrival; they stay in the queue."""
        return list(islice(self._held.values(), count))

    def drain(self) -> list[DispatchRequest]:
        """Remove and return all requests, in order of arrival."""
        requests = [queued.request for queued in self._held.values()]
        self._held.clear()
        self._new.clear()
        self._pending.clear()
        self._joined.clear()
        self.tokens = 0
        return requests

    def put_back(self, popped: Iterable[QueuedRequest]) -> None:
        """Put back requests that were popped and fit nowhere; they count as pending."""
        for queued in popped:
            self._tried.add(queued.request.key)
            self._held[queued.request.key] = queued
            self.tokens += queued.request.tokens
            heapq.heappush(self._new, queued)

    def withdraw(self, key: int) -> None:
        """Remove a request."""
        if key in self._held:
            self._remove(key)

    def end_cycle(self, *, count: bool) -> None:
        """Mark all remaining requests as pending; ``count`` counts the cycle against their limit."""
        self._cycle += count
        for queued in self._new:
            key = queued.request.key
            if self._held.get(key) is queued:
                heapq.heappush(self._pending, queued)
                self._joined.setdefault(key, self._cycle - count)
        self._new = []
        if len(self._pending) > 2 * len(self._held) + MAX_STALE_ENTRIES:  # most of it was withdrawn
            self._pending = [queued for queued in self._pending if self._held.get(queued.request.key) is queued]
            heapq.heapify(self._pending)
        self._tried.clear()
        self._drop_withdrawn()

    def overdue(self, limit: int | None) -> list[DispatchRequest]:
        """Remove and return requests left over in more than ``limit`` cycles."""
        requests: list[DispatchRequest] = []
        while limit is not None and self._joined:
            key, joined = next(iter(self._joined.items()))
            if self._cycle - joined <= limit:
                break
            requests.append(self._remove(key).request)
            self._drop_withdrawn()
        return requests

    def _oldest_aged(self) -> int | None:
        """The longest waiting request if it is aged and was not tried in this cycle."""
        if self._aged_cycles is None:
            return None
        for key, joined in self._joined.items():
            if self._cycle - joined < self._aged_cycles:
                return None
            if key in self._held and key not in self._tried:
                return key
        return None

    def _remove(self, key: int) -> QueuedRequest:
        queued = self._held.pop(key)
        self.tokens -= queued.request.tokens
        return queued

    def _drop_withdrawn(self) -> None:
        while self._joined:
            oldest = next(iter(self._joined))
            if oldest in self._held:
                break
            del self._joined[oldest]


# Chooses the length of the next pass and its requests. Not in the paper.
#
# A pass of a DP+EP instance lasts as long as its fullest unit, so all its requests wait for the longest prompt.
# Algorithm 2 fills every chunk, longest first, which makes all passes long. Here every pass length gets a value: the
# worth of the requests that fit, over the time that the pass takes. The result is short passes of short prompts and
# long passes of long ones, with units about equally full.
#
# The worth of a request starts at one and grows by one per mean pass that it waits; as requests queue up, its tokens
# are added, since then full units matter. A request that has waited for `patience` mean passes goes first.

LENGTHS = 12
"""Number of pass lengths compared, in equal ratios from the shortest possible to a full chunk."""
CANDIDATES_A_UNIT = 16
"""Oldest requests considered per unit: bounds the work and how far requests overtake each other."""


class WaitingRequest(NamedTuple):
    """A request that may be sent; ``order`` is its order of arrival."""

    tokens: int
    order: int
    worth: float
    request: DispatchRequest
    urgent: bool = False


class PassModel(NamedTuple):
    """``overhead_tokens``: fixed cost of a pass, in tokens of its fullest unit.

    ``token_worth``: worth of a token, in requests. ``overdraw``: whether prompts may exceed the ends of chunks in a
    full pass.
    """

    chunk_tokens: int
    overhead_tokens: float
    token_worth: float = 0.0
    overdraw: bool = False


class _Filled(NamedTuple):
    rate: float
    placed: list[tuple[WaitingRequest, int]]


def candidates(
    queued: Sequence[tuple[DispatchRequest, int]],
    now_ns: int,
    mean_pass_ns: float,
    token_worth: float,
    patience: float | None,
) -> list[WaitingRequest]:
    """Candidates from (request, arrival time in ns), oldest first; the first may be urgent."""
    waiting = []
    for order, (request, since_ns) in enumerate(queued):
        waited = (now_ns - since_ns) / mean_pass_ns
        tokens = max(1, request.tokens)
        urgent = order == 0 and patience is not None and waited > patience
        waiting.append(WaitingRequest(tokens, order, 1 + waited + token_worth * tokens, request, urgent))
    return waiting


def choose_pass(
    waiting: Sequence[WaitingRequest], backlog: Mapping[int, int], model: PassModel, *, only_if_gain: bool = False
) -> list[tuple[DispatchRequest, int]]:
    """(request, unit) for one pass of an instance; ``backlog``: tokens that each unit has to compute before.

    Prompts longer than the chunk go only to units without other work. Empty if no request fits, or, with
    ``only_if_gain``, if the requests do not raise the value of the pass per time.
    """
    if not waiting:
        return []
    chunk = model.chunk_tokens
    committed = max(min(chunk, tokens) for tokens in backlog.values())
    wanted = max((c.tokens for c in waiting if c.urgent), default=min(c.tokens for c in waiting))
    shortest = min(chunk, max(committed, wanted))
    by_density = sorted(waiting, key=lambda c: (not c.urgent, -c.worth / c.tokens))
    lengths = {round(shortest * (chunk / shortest) ** (i / LENGTHS)) for i in range(LENGTHS + 1)}
    best = _fill((), backlog, committed, model) if only_if_gain else _Filled(0.0, [])
    for length in sorted(lengths):
        filled = _fill(by_density, backlog, length, model)
        if filled.placed and filled.rate > best.rate:
            best = filled
    return [(candidate.request, unit) for candidate, unit in best.placed]


def _fill(by_density: Sequence[WaitingRequest], backlog: Mapping[int, int], length: int, model: PassModel) -> _Filled:
    """A pass of ``length`` tokens per unit: the requests with the most worth per token that fit, the longest to the
    emptiest unit, then gaps closed."""
    chunk = model.chunk_tokens
    picked = sorted(_pick(by_density, backlog, length, chunk), key=lambda c: (-c.tokens, c.order))
    loads = [(tokens, unit) for unit, tokens in backlog.items()]
    heapify(loads)
    placed: list[tuple[WaitingRequest, int]] = []
    for candidate in picked:
        load, unit = loads[0]
        after = load + candidate.tokens
        if after <= length or (load == 0 and candidate.tokens > chunk):
            heapreplace(loads, (after, unit))
            placed.append((candidate, unit))
    load_of = {unit: load for load, unit in loads}
    _close_gaps(placed, load_of, by_density, length)
    fullest = max(min(chunk, load) for load in load_of.values())
    worth = sum(c.worth * min(1.0, chunk / c.tokens) for c, _ in placed)
    if model.overdraw and length >= chunk:
        worth += _overdraw(placed, load_of, by_density, chunk)
    worth += sum(min(1.0, chunk / b) + model.token_worth * min(b, chunk) for b in backlog.values() if b > 0)
    return _Filled(worth / (model.overhead_tokens + fullest), placed)


def _overdraw(
    placed: list[tuple[WaitingRequest, int]], load_of: dict[int, int], waiting: Sequence[WaitingRequest], chunk: int
) -> float:
    """Fill the rest of the chunks with prompts that exceed their ends, in order of arrival; returns their worth."""
    taken = {candidate.order for candidate, _ in placed}
    spare = sorted((c for c in waiting if c.order not in taken), key=lambda c: c.order, reverse=True)
    worth = 0.0
    for unit in sorted(load_of, key=load_of.__getitem__):
        gap = chunk - load_of[unit]
        if gap <= 0 or not spare:
            break
        candidate = spare.pop()
        placed.append((candidate, unit))
        load_of[unit] += candidate.tokens
        worth += candidate.worth * min(1.0, gap / candidate.tokens)
    return worth


def _pick(
    by_density: Sequence[WaitingRequest], backlog: Mapping[int, int], length: int, chunk: int
) -> list[WaitingRequest]:
    """The requests with the most worth per token that together fill the units up to ``length`` tokens."""
    room = sum(max(0, length - tokens) for tokens in backlog.values())
    picked = []
    for candidate in by_density:
        need = min(candidate.tokens, chunk)
        if need <= min(room, length):
            picked.append(candidate)
            room -= need
    return picked


def _close_gaps(
    placed: list[tuple[WaitingRequest, int]], load_of: dict[int, int], waiting: Sequence[WaitingRequest], length: int
) -> None:
    """Replace placed requests, shortest first, by the longest remaining one that fits and is worth no less."""
    taken = {candidate.order for candidate, _ in placed}
    spare = sorted(candidate for candidate in waiting if candidate.order not in taken)
    for place in range(len(placed) - 1, -1, -1):
        old, unit = placed[place]
        gap = length - load_of[unit]
        if gap <= 0 or old.urgent or not spare:
            continue
        index = bisect_right(spare, old.tokens + gap, key=attrgetter("tokens")) - 1
        if index < 0 or spare[index].tokens <= old.tokens or spare[index].worth < old.worth:
            continue
        new = spare.pop(index)
        insort(spare, old)
        placed[place] = (new, unit)
        load_of[unit] += new.tokens - old.tokens


# Algorithms 1 to 3 of Tian et al. 2025 (sections 4.1 to 4.3): dispatch interval, and requests of a batch to units.

# Algorithm 1: the dispatch interval from measured forward times (Tian et al. 2025, section 4.1.1).


class AdaptiveInterval:
    """``I = (mean T_fwd + L_net) / N_active`` over a sliding window of forward times, in ns.

    Recomputed after every forward pass and every change of topology. Without active instances the last value holds, as
    in the paper.
    """

    def __init__(self, window: int, network_ns: int, default_ns: int, active: int) -> None:
        self._window, self._network_ns = window, network_ns
        self._times: deque[int] = deque()
        self._total = 0
        self._active = active
        self.mean_ns: float = default_ns
        self.interval_ns = 0
        self._recompute()

    def end_forward(self, measured_ns: int) -> None:
        """OnEndForward: add one measured forward time (ns)."""
        self._times.append(measured_ns)
        self._total += measured_ns
        if len(self._times) > self._window:
            self._total -= self._times.popleft()
        self.mean_ns = self._total / len(self._times)
        self._recompute()

    def topology(self, active: int) -> None:
        """OnTopologyChange: set the number of active instances."""
        self._active = active
        self._recompute()

    def _recompute(self) -> None:
        if self._active > 0:
            self.interval_ns = round((self.mean_ns + self._network_ns) / self._active)


Hit = Callable[[DispatchRequest, int], int]
"""Number of prompt tokens of a request that a unit has in its prefix cache."""


class ChunkPacking:
    """The capacity vector C_avail of Algorithm 2 while requests are placed one by one.

    Without ``hit`` in its basic mode: no prefix is cached anywhere.
    """

    def __init__(self, available: Mapping[int, int], hit: Hit | None = None, whole_chunk: int | None = None) -> None:
        self._capacity = dict(sorted(available.items()))
        self._whole_chunk = whole_chunk
        self._hit = hit

    @property
    def full(self) -> bool:
        """Whether no further request can be placed."""
        return all(capacity <= 0 for capacity in self._capacity.values())

    def place(self, request: DispatchRequest) -> int | None:
        """The unit with the most capacity left after ``request``, or None if that unit had no capacity before.

        A unit takes a request while its C_avail is positive, so a long prompt may exceed it and is then split over
        several passes. With ``whole_chunk`` (not in the paper) only prompts longer than that may exceed it; others go
        to units where they fit into one pass. The lowest unit number wins a tie.
        """
        best, best_after = -1, 0
        for unit, capacity in self._capacity.items():
            after = capacity - request.tokens
            if self._hit is not None:
                after += self._hit(request, unit)
            if best < 0 or after > best_after:
                best, best_after = unit, after
        if best < 0 or self._capacity[best] <= 0:
            return None
        if best_after < 0 and self._whole_chunk is not None and request.tokens <= self._whole_chunk:
            return None
        self._capacity[best] = best_after
        return best


class DecodeLoad(NamedTuple):
    """State of a decode unit: batch size B (sequences) and KV tokens K."""

    requests: int
    kv_tokens: int


def allocate_decode(
    batch: Sequence[DispatchRequest], loads: Mapping[int, DecodeLoad], multiplier: float = 1.5
) -> list[tuple[DispatchRequest, int]]:
    """Algorithm 3: longest request first; units with K above Q3 + multiplier * IQR are excluded; then the least (B, K).

    Quartiles are linearly interpolated (numpy's default). An infinite ``multiplier`` excludes no unit. If all units
    were excluded, none is. The lowest unit number wins a tie.
    """
    state = dict(sorted(loads.items()))
    assigned = []
    for request in sorted(batch, key=lambda a: -a.total_tokens):
        bound = outlier_bound([load.kv_tokens for load in state.values()], multiplier)
        safe = [unit for unit, load in state.items() if load.kv_tokens <= bound] or list(state)
        chosen = min(safe, key=state.__getitem__)
        before = state[chosen]
        state[chosen] = DecodeLoad(before.requests + 1, before.kv_tokens + request.total_tokens)
        assigned.append((request, chosen))
    return assigned


def outlier_bound(kv_tokens: Sequence[int], multiplier: float) -> float:
    """``Q3 + multiplier * (Q3 - Q1)`` of the units' KV tokens."""
    ordered = sorted(kv_tokens)
    q1, q3 = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    # Infinity times a spread of zero is undefined.
    return float("inf") if multiplier == float("inf") else q3 + multiplier * (q3 - q1)


def _quantile(ordered: Sequence[int], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
