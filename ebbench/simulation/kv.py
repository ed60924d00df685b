"""KV block accounting with vLLM's rules, in two forms.

``CountingKv`` knows only how many blocks are free; exact as long as no cached block can be hit. ``CachingKv`` knows
each block: its content, its references and its place in the eviction queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from ebbench.simulation.state import RequestState


class IdentityNeeded(Exception):  # noqa: N818 - control flow, not an error
    """Counting is no longer exact: a preempted request may find its own blocks in the cache again."""


class KvBlocks(Protocol):
    """What the scheduler asks of a KV manager. ``free`` counts cached but unreferenced blocks as free."""

    free: int
    total: int

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """Cached blocks that form the longest prefix of the request, its last token always left to compute."""
        ...

    def evictable(self, hits: list[int]) -> int:
        """How many of ``hits`` count as free now and would stop doing so."""
        ...

    def adopt(self, row: int, hits: list[int]) -> None:
        """Reference the hit blocks for a request that is being admitted."""
        ...

    def allocate(self, rows: Iterable[int], blocks: Iterable[int]) -> None:
        """Give each row that many new blocks, in order. The caller has checked that they are there."""
        ...

    def publish(self, row: int, tokens: int) -> None:
        """Make the full blocks among the first ``tokens`` tokens findable by others."""
        ...

    def release(self, row: int, known_tokens: int) -> None:
        """Return all blocks of a request of whose content ``known_tokens`` tokens are known."""
        ...


class CountingKv:
    """Block counts only. With prefix caching on, a release before the end raises IdentityNeeded."""

    def __init__(self, state: RequestState, total: int, *, caching: bool) -> None:
        self.total = self.free = total
        self._held = state.held_blocks
        self._done = state.done
        self._caching = caching

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """No hit: nothing in the plan shares content."""
        return []

    def evictable(self, hits: list[int]) -> int:
        """None."""
        return 0

    def adopt(self, row: int, hits: list[int]) -> None:
        """Nothing to adopt."""

    def allocate(self, rows: Iterable[int], blocks: Iterable[int]) -> None:
        """Take the blocks from the free count."""
        self.free -= sum(blocks)

    def publish(self, row: int, tokens: int) -> None:
        """Nobody can look it up."""

    def release(self, row: int, known_tokens: int) -> None:
        """Return the blocks to the free count."""
        if self._caching and not self._done[row]:
            raise IdentityNeeded
        self.free += int(self._held[row])


class CachingKv:
    """Blocks with identity: hash to block, references, and a free queue in eviction order.

    Rules of vLLM 0.32 (block_pool.py): new blocks come from the head of the free queue and lose what they cached; a
    freed block that caches something goes to the tail, one that does not to the head; a request frees its last block
    first, so that the ends of prefixes are evicted before their beginnings.
    """

    def __init__(self, state: RequestState, total: int, block_size: int) -> None:
        self.total = self.free = total
        self._state, self._block_size = state, block_size
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._references = [0] * total
        self._key_of: list[int | None] = [None] * total
        self._by_key: dict[int, list[int]] = {}  # several blocks may hold the same content; the oldest is found
        self._blocks: dict[int, list[int]] = {}
        self._published: dict[int, int] = {}

    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        return list(self._queue)

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        """See KvBlocks."""
        hits: list[int] = []
        for key in self._state.block_keys(row, 0, (known_tokens - 1) // self._block_size, self._block_size):
            found = self._by_key.get(key)
            if found is None:
                break
            hits.append(found[0])
        return hits

    def evictable(self, hits: list[int]) -> int:
        """See KvBlocks."""
        return sum(not self._references[block] for block in hits)

    def adopt(self, row: int, hits: list[int]) -> None:
        """See KvBlocks."""
        for block in hits:
            if not self._references[block]:
                del self._queue[block]
                self.free -= 1
            self._references[block] += 1
        self._blocks[row] = list(hits)
        self._published[row] = len(hits)

    def allocate(self, rows: Iterable[int], blocks: Iterable[int]) -> None:
        """See KvBlocks."""
        for row, count in zip(rows, blocks, strict=True):
            if not count:
                continue
            own = self._blocks.setdefault(row, [])
            for _ in range(count):
                block, _none = self._queue.popitem(last=False)
                self._forget(block)
                self._references[block] = 1
                own.append(block)
            self.free -= count

    def publish(self, row: int, tokens: int) -> None:
        """See KvBlocks."""
        first = self._published.get(row, 0)
        full = tokens // self._block_size
        if full <= first:
            return
        own = self._blocks[row]
        for block, key in zip(
            own[first:full], self._state.block_keys(row, first, full - first, self._block_size), strict=True
        ):
            self._key_of[block] = key
            self._by_key.setdefault(key, []).append(block)
        self._published[row] = full

    def release(self, row: int, known_tokens: int) -> None:
        """See KvBlocks."""
        own = self._blocks.pop(row, [])
        if own:
            self._blocks[row] = own
            self.publish(row, known_tokens)
            del self._blocks[row]
        self._published.pop(row, None)
        unnamed: list[int] = []
        for block in reversed(own):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self.free += 1
            if self._key_of[block] is None:
                unnamed.append(block)
            else:
                self._queue[block] = None
        for block in reversed(unnamed):  # prepended with their order kept: the tail block comes first of all
            self._queue[block] = None
            self._queue.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is None:
            return
        holders = self._by_key[key]
        holders.remove(block)
        if not holders:
            del self._by_key[key]
        self._key_of[block] = None
