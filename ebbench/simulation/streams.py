"""KV blocks of plans in which no two simultaneously open requests share content.

A cached block can then be hit only by the preempted request itself or by the next turn of its session, and the cached
blocks of a content stream are always its beginning: the stream's first block is freed last, and the next request of the
stream takes all remaining ones. So each stream has one contiguous run of cached blocks in the queue, which evictions
shorten from its end, and counts are equivalent to the block identities of :class:`ebbench.simulation.kv.CachingKv`;
tests compare the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ebbench.records.plan import Plan
from ebbench.simulation.kv import IdentityNeeded
from ebbench.simulation.state import RequestState

NO_HITS = range(0)


class CachedRun:
    """Cached blocks 0 to ``blocks`` of one content stream, all free. 0: taken again, or evicted."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks


class StreamKv:
    """Counts free blocks and the cached blocks per content stream. Raises IdentityNeeded if that is not exact."""

    def __init__(self, state: RequestState, total: int, block_size: int) -> None:
        self.total = self.free = total
        self._held, self._done, self._block_size = state.held_blocks, state.done, block_size
        self._content, self._last_of_content = state.content, state.last_of_content
        self._blank = total  # free blocks without cached content, which are taken first
        self._queue: deque[CachedRun] = deque()  # in eviction order; a run is evicted from its end
        self._unused: CachedRun | None = None  # the queue's last run, if no request will look its blocks up
        self._cached: dict[int, CachedRun] = {}

    def lookup(self, row: int, known_tokens: int) -> range:
        """See KvBlocks; blocks are numbered within their stream."""
        run = self._cached.get(self._content[row]) if self._cached else None
        if run is None:
            return NO_HITS
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

    def allocate(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KvBlocks."""
        self.take(sum(blocks))

    def take(self, count: int) -> None:
        """See CountedKv."""
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

    def publish(self, row: int, tokens: int) -> None:
        """Do nothing: the blocks cannot be looked up before they are released."""

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        held = int(self._held[row])
        self.free += held
        last = self._last_of_content[row] and self._done[row]
        if last and not self._queue:
            self._blank += held  # no cached block will be looked up, so that the order of evictions does not matter
            return
        cached = known_tokens // self._block_size
        self._blank += held - cached
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
    """Whether requests that share content belong to one session, so that they run one after the other."""
    table = plan.table
    if table["hash_ids"].null_count < len(plan) or "after" in table.column_names:
        return False
    sessions = table.select(["content", "session"]).group_by(["content", "session"]).aggregate([])
    return len(sessions) == len(table["content"].unique())
