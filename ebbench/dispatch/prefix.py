"""Approximate record of the prompt prefixes that each unit has computed.

Units evict blocks without notice; this record is bounded in the same way, least recently used first. A wrong hit costs
time, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict

from ebbench.dispatch.base import DispatchRequest
from ebbench.records.content import CHUNK_TOKENS


class PrefixMemory:
    """Remembers up to ``capacity_blocks`` prefix blocks per unit."""

    def __init__(self, units: int, capacity_blocks: int = 4096, block_tokens: int = CHUNK_TOKENS) -> None:
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(units)]
        self._capacity, self._block_tokens = capacity_blocks, block_tokens

    def hit_tokens(self, request: DispatchRequest, unit: int) -> int:
        """Leading prompt tokens that ``unit`` has probably computed; at least the last token remains to compute."""
        known = self._blocks[unit]
        count = 0
        for block in request.prefix:
            if block not in known:
                break
            count += 1
        return min(count * self._block_tokens, max(request.tokens - 1, 0))

    def note(self, request: DispatchRequest, unit: int) -> None:
        """Record that ``unit`` gets ``request`` and will hold its prompt."""
        known = self._blocks[unit]
        for block in request.prefix:
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def forget(self, unit: int) -> None:
        """Clear the record of a unit that was restarted."""
        self._blocks[unit].clear()
