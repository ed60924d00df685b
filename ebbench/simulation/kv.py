"""KV block accounting with vLLM's rules, in three implementations.

``CountingKv`` only counts free blocks; it is exact if no cached block can be hit. ``CachingKv`` tracks each block:
content, references and position in the eviction queue. ``StreamKv`` tracks how many blocks of each request
or session are cached.

All three allocate blocks to requests (``KvBlocks``). The two that count also take blocks without an owner, which makes
long decodes fast to simulate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ebbench.devices.geometry import KvLayout
from ebbench.records.plan import Plan
from ebbench.simulation.state import RequestState


class IdentityNeeded(Exception):  # noqa: N818 - control flow, not an error
    """Counting is no longer exact: a preempted request may find its own blocks in the cache."""


class KvBlocks:
    """A KV manager as the scheduler uses it; by default no cached block is ever found.

    ``free`` includes cached blocks that no request uses.
    """

    def __init__(self, total: int) -> None:
        self.total = self.free = total

    def lookup(self, row: int, known_tokens: int) -> Sequence[int]:
        """Cached blocks of the longest prefix of the request; at least its last token remains to be computed."""
        return ()

    def evictable(self, hits: Sequence[int]) -> int:
        """How many of ``hits`` count as free now and would no longer do so."""
        return 0

    def adopt(self, row: int, hits: Sequence[int]) -> None:
        """Reference the hit blocks for a request that is being admitted."""

    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Give each row its number of new blocks, in order. The caller has checked that they are free."""
        raise NotImplementedError

    def publish(self, row: int, tokens: int) -> None:
        """Make the full blocks among the first ``tokens`` tokens available to prefix lookups."""

    def release(self, row: int, known_tokens: int) -> None:
        """Free all blocks of a request, of which the content of ``known_tokens`` tokens is known."""
        raise NotImplementedError


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
        self._keeps = caching and not any(group.chunk for group in layout.groups)
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

    @property
    def _full_tables(self) -> int:
        return sum(group.tables for group in self.layout.groups if not (group.window or group.per_sequence)) or 1

    def adopt(self, row: int, hits: Sequence[int]) -> None:
        """Forget what was kept: the request holds it again, and did not take it from the head of the queue."""
        kept = self._kept.pop(row, None)
        if kept is not None and hits:
            self._taken -= kept.blocks

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        held = int(self._held[row])
        # A state is found again only where it stood at the end of a block; of one that has gone on, nothing is.
        state_block = self.layout.state_block_tokens
        if self._keeps and not self._done[row] and not (state_block and known_tokens % state_block):
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
    """Tracks blocks individually: hash to block, references, and a free queue in eviction order.

    Rules of vLLM 0.32 (block_pool.py): new blocks come from the head of the free queue and lose their cached content; a
    freed block with cached content goes to the tail, one without to the head; a request frees its last block first, so
    that the ends of prefixes are evicted before their beginnings.

    A free block that is hit leaves a stale entry in the queue, which ``_left`` counts. Stale entries always precede the
    block's valid entry: only a block with cached content can be hit, and it goes to the tail.
    """

    def __init__(self, state: RequestState, total: int, block_size: int) -> None:
        super().__init__(total)
        self._state, self._block_size = state, block_size
        self._queue = deque(range(total))
        self._left: dict[int, int] = {}
        self._references = [0] * total
        self._key_of: list[int | None] = [None] * total
        # A list if several blocks hold the same content: the oldest is first and is the one found.
        self._by_key: dict[int, int | list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._published: dict[int, int] = {}

    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        left = dict(self._left)
        return [block for block in self._queue if not _passed_over(block, left)]

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
        for block in hits:
            if not self._references[block]:
                self._left[block] = self._left.get(block, 0) + 1
                self.free -= 1
            self._references[block] += 1
        self._blocks[row] = list(hits)
        self._published[row] = len(hits)
        if len(self._queue) > 4 * self.total:
            self._queue = deque(self.free_queue())
            self._left.clear()

    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KvBlocks."""
        taken = iter(self._take(sum(blocks)))
        for row, count in zip(rows, blocks, strict=True):
            if count == 1:
                self._blocks.setdefault(row, []).append(next(taken))
            elif count:
                self._blocks.setdefault(row, []).extend(islice(taken, count))

    def publish(self, row: int, tokens: int) -> None:
        """See KvBlocks."""
        first = self._published.get(row, 0)
        full = tokens // self._block_size
        if full <= first:
            return
        key_of, by_key = self._key_of, self._by_key
        keys = self._state.block_keys(row, first, full - first, self._block_size)
        for block, key in zip(self._blocks[row][first:full], keys, strict=True):
            key_of[block] = key
            holder = by_key.setdefault(key, block)
            if isinstance(holder, list):
                holder.append(block)
            elif holder != block:
                by_key[key] = [holder, block]
        self._published[row] = full

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        if row in self._blocks:
            self.publish(row, known_tokens)
        own, named = self._blocks.pop(row, []), self._published.pop(row, 0)
        self._queue.extend(self._dropped(own[named - 1 :: -1] if named else []))
        self._queue.extendleft(self._dropped(own[named:]))  # so that the last block comes first

    def _take(self, count: int) -> list[int]:
        """Blocks from the head of the queue, without their cached content."""
        pop, left, key_of, by_key = self._queue.popleft, self._left, self._key_of, self._by_key
        taken: list[int] = []
        while len(taken) < count:
            block = pop()
            if left and _passed_over(block, left):
                continue
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                if by_key[key] == block:
                    del by_key[key]
                else:
                    self._forget(block, key)
            self._references[block] = 1
            taken.append(block)
        self.free -= count
        return taken

    def _forget(self, block: int, key: int) -> None:
        """Remove one of several blocks with the same content."""
        holders = self._by_key[key]
        assert isinstance(holders, list)
        others = [holder for holder in holders if holder != block]
        self._by_key[key] = others if len(others) > 1 else others[0]

    def _dropped(self, blocks: Sequence[int]) -> list[int]:
        """The ``blocks`` without references."""
        references = self._references
        free = []
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                free.append(block)
        self.free += len(free)
        return free


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
        self._blank = total  # free blocks without cached content, which are taken first
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
        self.free -= count
        if count <= self._blank:
            self._blank -= count
            return
        count -= self._blank
        self._blank = 0
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
