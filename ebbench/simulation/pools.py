"""Instances of a disaggregated deployment: one side computes prompts, the other generates.

A prefill instance keeps the KV blocks of a computed prompt pinned until they have been transferred. A decode instance
admits a request whose KV was delivered without computing its prompt again; a preempted one has lost it and computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ebbench.simulation.barrier import BarrierUnit
from ebbench.simulation.instance import Instance
from ebbench.simulation.step import Step


class PrefillInstance(Instance):
    """Runs requests of one output token; their blocks outlive them until :meth:`unpin`."""

    def _finish(self, row: int, now_ns: int) -> None:
        state = self._state
        if not state.held_blocks[row]:
            super()._finish(row, now_ns)
            return
        state.done[row] = True
        state.end_ns[row] = now_ns
        if self._controller is not None:
            self._controller.on_finish(int(state.max_output[row]))

    def unpin(self, row: int) -> None:
        """The KV of ``row`` has been transferred."""
        state = self._state
        if state.held_blocks[row]:
            self._kv.release(row, int(state.prompt[row]))
            state.held_blocks[row] = 0


class DecodeInstance(Instance):
    """Takes over delivered KV at admission. ``on_admit`` hears of every first admission."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store: dict[int, int] = {}
        self.on_admit: Callable[[int, int], None] = _ignore

    def deliver(self, row: int, tokens: int) -> None:
        """KV of the first ``tokens`` tokens of ``row`` has arrived; the request may be scheduled."""
        self._store[row] = tokens
        self.add(row)

    def queued_tokens(self) -> int:
        """Tokens to compute before generating: next to none where the KV was delivered."""
        return super().queued_tokens() - sum(self._delivered(row) for row in (*self.waiting, *self._inbox))

    def _delivered(self, row: int) -> int:
        return self._store.get(row, 0)

    def _note_admission(self, row: int, cached_tokens: int, now_ns: int) -> None:
        super()._note_admission(row, cached_tokens, now_ns)
        self.on_admit(row, now_ns)

    def _preempt(self, step: Step, row: int) -> None:
        self._store.pop(row, None)
        super()._preempt(step, row)


class BarrierPrefill(PrefillInstance, BarrierUnit):
    """A prefill unit of a DP+EP instance."""


class BarrierDecode(DecodeInstance, BarrierUnit):
    """A decode unit of a DP+EP instance."""


def _ignore(_row: int, _now_ns: int) -> None:
    """Nobody wants to know."""
