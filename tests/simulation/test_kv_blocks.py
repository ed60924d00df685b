"""CachingKv against a plain block pool: lists only, every rule of vLLM's block_pool.py written out.

A block of either is known by what it caches: blocks without content are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.simulation.kv import CachingKv
from ebbench.simulation.state import RequestState

SIZE = 4  # tokens per block
STREAMS = 2  # requests with the same remainder share all their tokens
ROWS = 8


@dataclass
class PlainPool:
    """Every block by number: what it caches, how many requests hold it, and the free ones in order."""

    total: int
    free: list[int] = field(init=False)
    cached: dict[int, tuple[int, int]] = field(default_factory=dict)  # block: (stream, place)
    named: list[tuple[tuple[int, int], int]] = field(default_factory=list)  # in the order they were published
    held: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.total))

    def free_contents(self) -> list[int | None]:
        """As the manager's: keys of what the free blocks cache."""
        return [key_of(*self.cached[block]) if block in self.cached else None for block in self.free]

    def lookup(self, row: int, known_tokens: int) -> list[int]:
        hits = []
        place = 0
        while (place + 1) * SIZE < known_tokens:  # the last token is always computed
            holders = [block for content, block in self.named if content == (row % STREAMS, place)]
            if not holders:
                break
            hits.append(holders[0])
            place += 1
        return hits

    def adopt(self, row: int, hits: list[int]) -> None:
        self.free = [block for block in self.free if block not in hits]
        self.held[row] = list(hits)

    def allocate(self, row: int, count: int) -> None:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if block in self.cached:
                self.named.remove((self.cached.pop(block), block))
        self.held.setdefault(row, []).extend(taken)

    def publish(self, row: int, tokens: int) -> None:
        for place, block in enumerate(self.held[row][: tokens // SIZE]):
            if block not in self.cached:
                self.cached[block] = (row % STREAMS, place)
                self.named.append((self.cached[block], block))

    def release(self, row: int, tokens: int) -> None:
        self.publish(row, tokens)
        mine = self.held.pop(row)
        left = [block for block in reversed(mine) if not any(block in other for other in self.held.values())]
        self.free += [block for block in left if block in self.cached]
        self.free[:0] = [block for block in left if block not in self.cached]


def key_of(stream: int, place: int) -> int:
    return stream * 1000 + place


def kv_of(blocks: int) -> CachingKv:
    """The manager under test; of the state it needs only the identities of blocks."""

    def block_keys(row: int, first: int, count: int, _size: int) -> range:
        return range(key_of(row % STREAMS, first), key_of(row % STREAMS, first + count))

    return CachingKv(cast(RequestState, SimpleNamespace(block_keys=block_keys)), blocks, SIZE)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(4, 20),
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 3 * SIZE), st.integers(0, 2)), min_size=1, max_size=60),
)
def test_blocks_are_those_of_a_plain_pool(total: int, operations: list[tuple[int, int, int]]) -> None:
    """A request that holds no blocks is admitted if it fits, one that holds some grows by a block or is released."""
    kv, plain = kv_of(total), PlainPool(total)
    tokens_of: dict[int, int] = {}
    for row, tokens, action in operations:
        if row not in plain.held:
            hits, plain_hits = kv.lookup(row, tokens), plain.lookup(row, tokens)
            assert len(hits) == len(plain_hits)
            assert kv.evictable(hits) == sum(block in plain.free for block in plain_hits)
            need = -(-tokens // SIZE) - len(hits)
            if need + kv.evictable(hits) > kv.free:
                continue
            kv.adopt(row, hits)
            plain.adopt(row, plain_hits)
            kv.allocate((row,), (need,))
            plain.allocate(row, need)
            tokens_of[row] = tokens
        elif action == 0 and kv.free:
            kv.allocate((row,), (1,))
            plain.allocate(row, 1)
            tokens_of[row] = (len(plain.held[row]) - 1) * SIZE + 1
        elif action == 1:
            kv.publish(row, tokens_of[row])
            plain.publish(row, tokens_of[row])
        else:
            kv.release(row, tokens_of[row])
            plain.release(row, tokens_of.pop(row))
        assert kv.free_contents() == plain.free_contents()
        assert kv.free == len(plain.free)


def test_the_oldest_remaining_copy_of_a_block_is_found() -> None:
    """Three requests compute the same prompt at once; their copies are evicted one after the other."""
    kv = kv_of(6)
    for row in (0, 2, 4):
        kv.adopt(row, [])
        kv.allocate((row,), (1,))
    for row in (0, 2, 4):
        kv.release(row, SIZE)
    content = key_of(0, 0)
    assert kv.free_contents() == [None] * 3 + [content] * 3
    kv.allocate((1,), (3,))  # the blocks without cached content
    found = []
    for left in (2, 1, 0):
        found += kv.lookup(6, SIZE + 1)
        kv.allocate((1,), (1,))
        assert kv.free_contents() == [content] * left
    assert len(set(found)) == 3, "each is the one that is taken next"
    assert kv.lookup(6, SIZE + 1) == []
