"""Chooses the length of the next pass and its requests. Not in the paper.

A pass of a DP+EP instance lasts as long as its fullest unit, so all its requests wait for the longest prompt. Algorithm
2 fills every chunk, longest first, which makes all passes long. Here every pass length gets a value: the worth of the
requests that fit, over the time that the pass takes. The result is short passes of short prompts and long passes of
long ones, with units about equally full.

The worth of a request starts at one and grows by one per mean pass that it waits; as requests queue up, its tokens are
added, since then full units matter. A request that has waited for ``patience`` mean passes goes first.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from ebbench.dispatch.base import DispatchRequest

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
    held: Sequence[tuple[DispatchRequest, int]],
    now_ns: int,
    mean_pass_ns: float,
    token_worth: float,
    patience: float | None,
) -> list[WaitingRequest]:
    """Candidates from (request, arrival time in ns), oldest first; the first may be urgent."""
    found = []
    for order, (request, since_ns) in enumerate(held):
        waited = (now_ns - since_ns) / mean_pass_ns
        tokens = max(1, request.tokens)
        urgent = order == 0 and patience is not None and waited > patience
        found.append(WaitingRequest(tokens, order, 1 + waited + token_worth * tokens, request, urgent))
    return found


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
        index = bisect_right(spare, old.tokens + gap, key=_tokens) - 1
        if index < 0 or spare[index].tokens <= old.tokens or spare[index].worth < old.worth:
            continue
        new = spare.pop(index)
        insort(spare, old)
        placed[place] = (new, unit)
        load_of[unit] += new.tokens - old.tokens


def _tokens(candidate: WaitingRequest) -> int:
    return candidate.tokens
