"""KV block accounting with vLLM's rules.

``CountingKv`` only counts free blocks; it is exact if no cached block can be hit. ``CachingKv`` tracks each block:
content, references and position in the eviction queue; ``StatesKv`` does so where layers keep a state. ``StreamKv``
tracks how many blocks of each request or session are cached.

All allocate blocks to requests (``KvBlocks``). Those that count also take blocks without an owner, which makes long
decodes fast to simulate.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from ebbench.devices.geometry import KvLayout
from ebbench.records.plan import Plan
from ebbench.simulation.state import Ints, RequestState


class IdentityNeeded(Exception):  # noqa: N818 - control flow, not an error
    """Counting is no longer exact: a preempted request may find its own blocks in the cache."""


class KvBlocks(ABC):
    """A KV manager as the scheduler uses it; by default no cached block is ever found.

    ``free`` includes cached blocks that no request uses; ``_blank`` of them, which are taken first, cache nothing.
    """

    def __init__(self, total: int) -> None:
        self.total = self.free = self._blank = total

    def _take_blank(self, count: int) -> int:
        """Take ``count`` blocks, those without cached content first; returns how many are to be taken of the others."""
        self.free -= count
        rest = count - self._blank
        if rest <= 0:
            self._blank -= count
            return 0
        self._blank = 0
        return rest

    def lookup(self, row: int, known_tokens: int) -> Sequence[int]:
        """Cached blocks of the longest prefix of the request; at least its last token remains to be computed."""
        return ()

    def evictable(self, hits: Sequence[int]) -> int:
        """How many of ``hits`` count as free now and would no longer do so."""
        return 0

    def adopt(self, row: int, hits: Sequence[int]) -> None:  # noqa: B027 - without a cache there are no hits
        """Reference the hit blocks for a request that is being admitted."""

    @abstractmethod
    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Give each row its number of new blocks, in order. The caller has checked that they are free."""

    def publish(self, row: int, tokens: int) -> None:  # noqa: B027 - without a cache nothing is looked up
        """Make the full blocks among the first ``tokens`` tokens available to prefix lookups."""

    @abstractmethod
    def release(self, row: int, known_tokens: int) -> None:
        """Free all blocks of a request, of which the content of ``known_tokens`` tokens is known."""


class CountingKv(KvBlocks):
    """Counts blocks. With prefix caching, a release before the end of a request raises IdentityNeeded."""

    def __init__(self, state: RequestState, total: int, *, caching: bool) -> None:
        super().__init__(total)
        self._held, self._done, self._caching = state.held_blocks, state.done, caching

    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KvBlocks."""
        self.take(sum(blocks))

    def take(self, count: int) -> None:
        """Take ``count`` blocks without an owner. The caller has checked that they are free."""
        self.free -= count

    def release(self, row: int, known_tokens: int) -> None:
        """Add the blocks to the free count."""
        if self._caching and not self._done[row]:
            raise IdentityNeeded
        self.free += int(self._held[row])


class LaidOutKv(CountingKv):
    """Counts blocks of a pool from which layers that keep all tokens, a window or a state draw (``layout``).

    A request's blocks depend on its length and on how much of it is computed for good. With ``caching`` a preempted
    request finds those of its blocks again that were not taken since; nothing else is found by content. Blocks that
    leave a window are counted as free, not by their place in the queue: which of a request's are taken is a little off.
    """

    def __init__(self, state: RequestState, total: int, layout: KvLayout, block_size: int, *, caching: bool) -> None:
        super().__init__(state, total, caching=False)
        self.layout, self._block_size = layout, block_size
        self._keeps = caching and not any(group.chunk or group.per_sequence for group in layout.groups)
        keeps_all = [group.tables for group in layout.groups if not (group.window or group.per_sequence)]
        self._full_tables = sum(keeps_all) or 1
        self._kept: dict[int, _Kept] = {}
        self._taken = 0  # blocks from the head of the free queue so far

    def take(self, count: int) -> None:
        """See CountingKv; a negative count gives blocks back that have left a window."""
        self.free -= count
        self._taken += max(count, 0)

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """The blocks of tokens that a preempted request has in the cache in all layers, by their number."""
        kept = self._kept.get(row)
        if kept is None:
            return []
        last = kept.tokens - max(self._taken - kept.behind, 0) // self._full_tables * self.layout.groups[0].block_tokens
        cached_tokens = (
            min(last, known_tokens - 1) // self.layout.scheduler_block_tokens * self.layout.scheduler_block_tokens
        )
        return list(range(max(cached_tokens, 0) // self._block_size))

    def adopt(self, row: int, hits: Sequence[int]) -> None:
        """Forget what was kept: the request holds it again, and did not take it from the head of the queue."""
        kept = self._kept.pop(row, None)
        if kept is not None and hits:
            self._taken -= kept.blocks

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        held = int(self._held[row])
        if self._keeps and not self._done[row]:
            self._kept[row] = _Kept(known_tokens, self._taken + self.free, held)
        self.free += held


@dataclass(frozen=True)
class _Kept:
    """What a preempted request left in the cache: its first ``tokens`` tokens, in ``blocks`` blocks that are taken once
    ``behind`` blocks were taken in all."""

    tokens: int
    behind: int
    blocks: int


class CachingKv(KvBlocks):
    """Tracks blocks with cached content individually, and counts the others: hash to block, references, and a queue of
    free blocks in eviction order.

    Rules of vLLM 0.32 (block_pool.py): new blocks come from the head of the free queue and lose their cached content; a
    freed block with cached content goes to the tail, one without to the head; a request frees its last block first, so
    that the ends of prefixes are evicted before their beginnings.

    So free blocks without content come first, and nothing tells one of them from another: ``_blank`` counts them. A
    block has a number while its content can be looked up.

    A free block that is hit leaves a stale entry in the queue, which ``_left`` counts. Stale entries always precede the
    block's valid entry: only a block with cached content can be hit, and it goes to the tail.
    """

    def __init__(self, state: RequestState, total: int, block_size: int) -> None:
        super().__init__(total)
        self._state, self._block_size = state, block_size
        self._queue: deque[int] = deque()
        self._left: dict[int, int] = {}
        self._numbers = itertools.count()
        self._references: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        # A list if several blocks hold the same content: the oldest is first and is the one found.
        self._by_key: dict[int, int | list[int]] = {}
        self._held: dict[int, int] = {}  # by row: its blocks, of which the first have content in ``_named``
        self._named: dict[int, list[int]] = {}

    def free_contents(self) -> list[int | None]:
        """Keys of what the free blocks cache, in the order in which they will be taken; None: nothing."""
        left = dict(self._left)
        cached = [self._key_of[block] for block in self._queue if not _passed_over(block, left)]
        return [None] * self._blank + cached

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """See KvBlocks."""
        hits: list[int] = []
        for key in self._state.block_keys(row, 0, (known_tokens - 1) // self._block_size, self._block_size):
            block = self._by_key.get(key)
            if block is None:
                break
            hits.append(block if isinstance(block, int) else block[0])
        return hits

    def evictable(self, hits: Sequence[int]) -> int:
        """See KvBlocks."""
        return sum(not self._references[block] for block in hits)

    def adopt(self, row: int, hits: Sequence[int]) -> None:
        """See KvBlocks."""
        self._touch(hits)
        self._held[row], self._named[row] = len(hits), list(hits)

    def _touch(self, hits: Sequence[int]) -> None:
        """Add a reference to each block; those that were free are no longer."""
        for block in hits:
            if not self._references[block]:
                self._left[block] = self._left.get(block, 0) + 1
                self.free -= 1
            self._references[block] += 1
        if len(self._queue) > 4 * self.total:
            left = self._left
            self._queue = deque(block for block in self._queue if not _passed_over(block, left))

    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KvBlocks."""
        self._take(sum(blocks))
        held = self._held
        for row, count in zip(rows, blocks, strict=True):
            held[row] = held.get(row, 0) + count

    def publish(self, row: int, tokens: int) -> None:
        """See KvBlocks."""
        named, full = self._named.get(row), tokens // self._block_size
        first = len(named) if named else 0
        if full > first:
            keys = self._state.block_keys(row, first, full - first, self._block_size)
            self._named.setdefault(row, []).extend(self._name(keys))

    def _name(self, keys: Iterable[int]) -> list[int]:
        """Make blocks without content, which are held, available to lookups of ``keys``."""
        numbers, references, key_of, by_key = self._numbers, self._references, self._key_of, self._by_key
        blocks: list[int] = []
        for key in keys:
            block = next(numbers)
            blocks.append(block)
            references[block], key_of[block] = 1, key
            holder = by_key.setdefault(key, block)
            if isinstance(holder, list):
                holder.append(block)
            elif holder != block:
                by_key[key] = [holder, block]
        return blocks

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        if row in self._held:
            self.publish(row, known_tokens)
        named = self._named.pop(row, [])
        self._give_back(named[::-1], self._held.pop(row, 0) - len(named))

    def _give_back(self, named: Sequence[int], blank: int) -> None:
        """Drop the references to ``named``, of which those that nobody holds are free then, in this order, and free so
        many blocks without content."""
        self._blank += blank
        self.free += blank
        references, queue = self._references, self._queue
        for block in named:
            references[block] -= 1
            if not references[block]:
                queue.append(block)
                self.free += 1

    def _take(self, blocks: int) -> None:
        """Take so many blocks from the head of the queue, without their cached content."""
        blocks = self._take_blank(blocks)
        pop, left, key_of, by_key = self._queue.popleft, self._left, self._key_of, self._by_key
        while blocks:
            block = pop()
            if left and _passed_over(block, left):
                continue
            del self._references[block]
            key = key_of.pop(block)
            if by_key[key] == block:
                del by_key[key]
            else:
                self._forget(block, key)
            blocks -= 1

    def _forget(self, block: int, key: int) -> None:
        """Remove one of several blocks with the same content."""
        holders = self._by_key[key]
        assert isinstance(holders, list)
        others = [holder for holder in holders if holder != block]
        self._by_key[key] = others if len(others) > 1 else others[0]


def _passed_over(block: int, left: dict[int, int]) -> bool:
    """Whether the next entry of a block in the queue is stale; decrements its count in ``left``."""
    places = left.get(block)
    if places is None:
        return False
    if places == 1:
        del left[block]
    else:
        left[block] = places - 1
    return True


NO_BLOCK = -1  # instead of the number of one that holds a content


class _Tables:
    """Block tables of a running request. ``states``: of layers that keep a state, by place in order, the blocks that
    are held, one per table if the state can be looked up, else (). ``full``: of layers that keep all, the blocks per
    table whose content can be looked up, the first ``named``; () if there are none.

    ``places``: of a table of states; ``full_places``: blocks of a table that keeps all; ``seen``: places of ``states``
    that were looked at to be named; ``resumed``: places up to which the prompt may be resumed.
    """

    __slots__ = ("full", "full_places", "named", "places", "resumed", "seen", "states")

    def __init__(self, hit: Sequence[int], states: int, full: int, resumed: int) -> None:
        """``hit``: blocks of the cached prefix, one of each table of states, then those of every other table."""
        self.resumed = resumed
        self.states: dict[int, Sequence[int]] = {}
        self.full: Sequence[list[int]] = ()
        self.places = self.full_places = self.named = self.seen = 0
        if hit:
            self.places = self.full_places = self.named = self.seen = blocks = self.blocks_of(hit, states, full)
            self.states[blocks - 1] = hit[:states]
            self.full = [list(hit[start : start + blocks]) for start in range(states, len(hit), blocks)]

    @staticmethod
    def blocks_of(hit: Sequence[int], states: int, full: int) -> int:
        """Blocks per table of a cached prefix."""
        return (len(hit) - states) // full if hit else 0


class StatesKv(CachingKv):
    """Tracks the blocks of layers that keep all tokens and of layers that keep a state, and what each holds.

    Rules of vLLM 0.32 (``MambaManager``, mode align): a state lies in the block in which its tokens end, and each
    drafted token has a block beside it. A state that has moved on gives its block back once the step is computed.
    Others find it only if a chunk ended there, at the end of a block where a request may resume: the prompt's last,
    with ``recomputes`` (a drafter that computes the last block of a prefix again) the one before it, and ``junction``,
    up to which other layers had a prefix without a state. No request resumes from a state that the same step computes.

    ``marked``: vLLM takes the layers of states for a drafter's.
    """

    def __init__(
        self, state: RequestState, total: int, layout: KvLayout, block_size: int, *, recomputes: bool, marked: bool
    ) -> None:
        super().__init__(state, total, layout.state_block_tokens)
        self.layout, self._unit, self._recomputes, self._marked = layout, block_size, recomputes, marked
        self._states = sum(group.tables for group in layout.groups if group.by_block)
        self._full = sum(group.tables for group in layout.groups) - self._states
        self._drafts = next(group.drafts for group in layout.groups if group.by_block)
        self._tables: dict[int, _Tables] = {}
        self._short: set[int] = set()  # rows within their first blocks, which have no tables yet
        self._hit: list[int] = []  # blocks of the prefix that was looked up last
        self._fresh: set[int | None] = set()  # keys of states that the step being scheduled computes
        self.junction = np.zeros(state.count, np.int64)
        # By row: tokens, and slots, up to which it neither needs nor gives back blocks. Without drafts both are equal,
        # but for a row that holds a state beside that of its last token: it gives one back, so it has no such tokens.
        self.quiet_tokens, self._quiet_slots = np.zeros(state.count, np.int64), np.zeros(state.count, np.int64)

    def step_begins(self) -> None:
        """Let states of the step before be used."""
        self._fresh.clear()

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """See KvBlocks; the number of blocks counts, in the scheduler's size."""
        size, dropped = self._block_size, int(self._recomputes)
        most = (known_tokens - 1 + dropped) // size
        if not most:
            self._hit = []
            return []
        keys = list(self._state.block_keys(row, 0, most, size))
        full = max(sum(1 for _ in takewhile(self._holds_full, keys)) - dropped, 0)
        if not full:
            self.junction[row], self._hit = 0, []
            return []
        hit = next((count for count in range(full, 0, -1) if self._holds_state(keys[count - 1])), 0)
        self.junction[row] = full * size if full > hit else 0
        of_states = [self._find(keys[hit - 1], table) for table in range(self._states)] if hit else []
        tables = range(self._states, self._states + self._full)
        self._hit = of_states + [self._find(key, table) for table in tables for key in keys[:hit]]
        return [0] * (hit * size // self._unit)

    def _holds_full(self, key: int) -> bool:
        return all(self._find(key, self._states + table) != NO_BLOCK for table in range(self._full))

    def _holds_state(self, key: int) -> bool:
        return all(self._find(key, table) != NO_BLOCK for table in range(self._states))

    def _key(self, key: int, table: int) -> int:
        return key * (self._states + self._full) + table

    def _find(self, key: int, table: int) -> int:
        block = self._by_key.get(self._key(key, table), NO_BLOCK)
        return block if isinstance(block, int) else block[0]

    def evictable(self, hits: Sequence[int]) -> int:
        """Always 0: :meth:`fits` counts them."""
        return 0

    def fits(self, tokens: int, slots: int) -> bool:
        """Whether a request with the prefix looked up last can have room for ``tokens``: ``slots`` with its drafts."""
        hit, seen, pinned = self._hit, 0, 0
        if hit:
            if any(self._key_of[block] in self._fresh for block in hit[: self._states]):
                return False
            seen, pinned = _Tables.blocks_of(hit, self._states, self._full), super().evictable(hit)
        new = self._states * min(self._end(tokens) - seen, 1 + self._drafts)
        return new + self._full * (-(-slots // self._block_size) - seen) + pinned <= self.free

    def _end(self, tokens: int) -> int:
        """Places in a table of states with a state after so many tokens."""
        return -(-tokens // self._block_size) + self._drafts

    def admit(self, row: int, tokens: int, slots: int, known_tokens: int) -> None:
        """Give a request the prefix looked up last, and room for its first chunk; see :meth:`grow`."""
        if not (self._hit or self._drafts) and known_tokens < self._block_size >= slots:
            self._short.add(row)
            self._take(self._states + self._full)
            self.quiet_tokens[row] = self._quiet_slots[row] = self._block_size
            self._state.held_blocks[row] = self._states + self._full
            return
        if self._hit:
            self._touch(self._hit)
        tables = self._open(row)
        before, tables.places, tables.full_places = tables.places, self._end(tokens), -(-slots // self._block_size)
        new = range(max(before, tables.places - self._drafts - 1), tables.places)
        for place in new:
            tables.states[place] = ()
        self._take(self._states * len(new) + self._full * (tables.full_places - before))
        self._note(row, tables, known_tokens)

    def _open(self, row: int) -> _Tables:
        """Tables of a request that is admitted with the prefix looked up last, or is no longer short."""
        short, dropped = row in self._short, int(self._recomputes)
        resumed = (int(self._state.prompt[row]) - 1 + dropped) // self._block_size - dropped
        tables = self._tables[row] = _Tables(() if short else self._hit, self._states, self._full, resumed)
        if short:
            self._short.remove(row)
            tables.places = tables.full_places = 1
            tables.states[0] = ()
        return tables

    def grow(self, row: int, tokens: int, slots: int, processed: int, known_tokens: int) -> bool:
        """Give a request room for ``tokens``, ``slots`` with drafts of the step after; returns whether enough blocks
        are free, after it has given back what it no longer needs: ``processed`` tokens are computed for good. Of its
        tokens ``known_tokens`` are known and computed with this step."""
        tables, end, full = self._tables.get(row), self._end(tokens), -(-slots // self._block_size)
        if tables is None:
            tables = self._open(row)
        self._retire(tables, processed)
        longer, fuller = end > tables.places, full > tables.full_places
        if longer or fuller:
            need = self._states * longer
            if fuller:
                need += self._full * (full - tables.full_places)
            if need > self.free:
                return False
            if longer:
                self._move(tables, end)
            tables.full_places = max(full, tables.full_places)
            self._take(need)
        self._note(row, tables, known_tokens)
        return True

    def _move(self, tables: _Tables, end: int) -> None:
        """Lengthen the tables of states to ``end`` places by one block; those of drafts move along."""
        states, before, skipped = tables.states, tables.places, end - self._drafts - 1
        tables.places = end
        moving = range(before - self._drafts, min(before, skipped))
        for place, moved in enumerate(moving, max(before, skipped)):
            states[place] = states.pop(moved)
        states[end - 1] = ()

    def _note(self, row: int, tables: _Tables, tokens: int) -> None:
        """Let what is computed with so many tokens be found, and note what the row holds."""
        whole = tokens // self._block_size
        if whole > tables.named:
            self._name_full(row, tables, whole)
        if whole > tables.seen or whole == tables.resumed > 0:
            self._name_states(row, tables, tokens)
        held = len(tables.states)
        moving = held > 1 + self._drafts
        self.quiet_tokens[row] = 0 if moving else (tables.places - self._drafts) * self._block_size
        self._quiet_slots[row] = tables.full_places * self._block_size
        self._state.held_blocks[row] = self._states * held + self._full * tables.full_places

    def _name_full(self, row: int, tables: _Tables, whole: int) -> None:
        keys = list(self._state.block_keys(row, tables.named, whole - tables.named, self._block_size))
        tables.full = tables.full or [[] for _ in range(self._full)]
        for number, table in enumerate(tables.full, self._states):
            table += self._name(self._key(key, number) for key in keys)
        tables.named = whole

    def _name_states(self, row: int, tables: _Tables, tokens: int) -> None:
        size, prompt = self._block_size, int(self._state.prompt[row])
        whole, dropped = tokens // size, int(self._recomputes)
        ends = {
            (prompt - 1) // size - dropped,
            prompt // size - dropped if dropped else 0,
            int(self.junction[row]) // size,
        }
        for end in ends:
            if tables.seen < end <= whole:
                self._name_state(row, tables, end)
        tables.seen = max(tables.seen, whole)
        if whole == tables.resumed > 0 and not (self._marked and tokens % size):
            self._name_state(row, tables, whole)  # vLLM looks at it again while it is held

    def _name_state(self, row: int, tables: _Tables, end: int) -> None:
        """Let the state at the end of block ``end``, if it is held, be found by steps to come."""
        blocks = tables.states.get(end - 1)
        if blocks is not None and not blocks:
            (key,) = self._state.block_keys(row, end - 1, 1, self._block_size)
            tables.states[end - 1] = blocks = self._name(self._key(key, number) for number in range(self._states))
        self._fresh.update(self._key_of[block] for block in blocks or ())

    def changes(self, rows: Ints, tokens: Ints, slots: Ints) -> npt.NDArray[np.bool_]:
        """Which rows need or give back blocks when they have room for ``tokens`` and ``slots``."""
        return (tokens > self.quiet_tokens.take(rows)) | (slots > self._quiet_slots.take(rows))

    def _retire(self, tables: _Tables, processed: int) -> None:
        """Give back states that were moved on from; that of the last token and those of drafts after it are kept."""
        states = tables.states
        if len(states) > 1 + self._drafts:
            upto = (processed - 1) // self._block_size
            passed = [place for place in reversed(states) if place < upto]
            if passed:
                gone = [states.pop(place) for place in passed]
                named = self._by_table(gone)
                self._give_back(named, self._states * len(gone) - len(named))

    def _by_table(self, states: Iterable[Sequence[int]]) -> list[int]:
        """Those blocks of states that can be looked up, one table after the other."""
        return [block for table in zip(*filter(None, states), strict=True) for block in table]

    def publish(self, row: int, tokens: int) -> None:
        """Do nothing: done where blocks are given."""

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        if row in self._short:
            if known_tokens < self._block_size:
                self._short.remove(row)
                self._give_back((), self._states + self._full)
                return
            self._open(row)
        tables = self._tables.pop(row, None)
        if tables is None:
            return
        whole = known_tokens // self._block_size
        if whole > tables.named:
            self._name_full(row, tables, whole)
        named = self._by_table(reversed(tables.states.values())) if tables.seen else []
        for table in tables.full:
            named += reversed(table)
        held = self._states * len(tables.states) + self._full * tables.full_places
        self._give_back(named, held - len(named))


# KV blocks of plans in which no two simultaneously open requests share content.
#
# A cached block can then be hit only by the preempted request itself or by the next turn of its session, and the
# cached blocks of a content stream are always its beginning: the stream's first block is freed last, and the next
# request of the stream takes all remaining ones. So each stream has one contiguous run of cached blocks in the queue,
# which evictions shorten from its end, and counts are equivalent to the block identities of
# `ebbench.simulation.kv.CachingKv`; tests compare the two.


class CachedRun:
    """Cached blocks 0 to ``blocks`` of one content stream, all free. 0: taken again, or evicted."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks


class StreamKv(CountingKv):
    """Counts free blocks and the cached blocks per content stream. Raises IdentityNeeded if that is not exact."""

    def __init__(self, state: RequestState, total: int, block_size: int) -> None:
        super().__init__(state, total, caching=True)
        self._block_size = block_size
        self._content, self._last_of_content = state.content, state.last_of_content
        self._queue: deque[CachedRun] = deque()  # in eviction order; a run is evicted from its end
        self._unused: CachedRun | None = None  # the queue's last run, if no request will look its blocks up
        self._cached: dict[int, CachedRun] = {}

    def lookup(self, row: int, known_tokens: int) -> Sequence[int]:
        """See KvBlocks; blocks are numbered within their stream."""
        run = self._cached.get(self._content[row]) if self._cached else None
        if run is None:
            return ()
        if run.blocks > (known_tokens - 1) // self._block_size:
            raise IdentityNeeded  # the last of them would remain cached and be computed again
        return range(run.blocks)

    def evictable(self, hits: Sequence[int]) -> int:
        """See KvBlocks: all of them, since no other request uses them."""
        return len(hits)

    def adopt(self, row: int, hits: Sequence[int]) -> None:
        """See KvBlocks."""
        if hits:
            self._cached.pop(self._content[row]).blocks = 0
            self.free -= len(hits)

    def take(self, count: int) -> None:
        """See CountingKv."""
        count = self._take_blank(count)
        queue = self._queue
        while count:
            run = queue[0]
            if run.blocks > count:
                run.blocks -= count
                return
            count -= run.blocks
            run.blocks = 0
            queue.popleft()

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        blocks = int(self._held[row])
        self.free += blocks
        last = self._last_of_content[row] and self._done[row]
        if last and not self._queue:
            self._blank += blocks  # no cached block will be looked up, so that the order of evictions does not matter
            return
        cached = known_tokens // self._block_size
        self._blank += blocks - cached
        if not cached:
            return
        if last and self._unused is not None and self._unused.blocks:
            self._unused.blocks += cached  # no later request shares these: one run of neighbours
            return
        run = CachedRun(cached)
        if last:
            self._unused = run
        else:
            self._cached[self._content[row]] = run
            self._unused = None
        self._queue.append(run)


def streams_take_turns(plan: Plan) -> bool:
    """Whether requests that share content belong to one session, so that they run one after the other.

    Requests that fill the prefix cache before the run are sessions of their own.
    """
    table = plan.table
    if table["hash_ids"].null_count < len(plan) or {"after", "primed_tokens"} & {*table.column_names}:
        return False
    sessions = table.select(["content", "session"]).group_by(["content", "session"]).aggregate([])
    return len(sessions) == len(table["content"].unique())
