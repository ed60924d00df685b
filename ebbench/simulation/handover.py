"""What happens to a request between its prefill and its decode: token accounting, transfer, received copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ebbench.config.topology import TransferSpec
from ebbench.simulation.pools import DecodeInstance, PrefillInstance
from ebbench.simulation.state import RequestState
from ebbench.simulation.transfer import ReceiveStore, Transfer, TransferFabric


class Handover:
    """Joins the two stages. ``before`` and ``after`` are their request states, row by row the same requests."""

    def __init__(
        self,
        before: RequestState,
        after: RequestState,
        sources: Sequence[PrefillInstance],
        targets: Sequence[DecodeInstance],
        fabric: TransferFabric,
        spec: TransferSpec,
        kv_bytes_per_token: float,
    ) -> None:
        self._before, self._after = before, after
        self._sources, self._targets, self.fabric = sources, targets, fabric
        self._from_prefill = spec.first_token == "prefill"
        self._until_finish = spec.held_until == "finish"
        self._kv_bytes = kv_bytes_per_token
        self._target_of: dict[int, int] = {}
        self.on_start: Callable[[Transfer], None] = _nobody
        if not self._until_finish:
            for index, target in enumerate(targets):
                target.on_admit = self._admitted(index)

    @property
    def stores(self) -> list[ReceiveStore]:
        """Receive store of every decode unit."""
        return self.fabric.stores

    def on_target(self, unit: int) -> list[int]:
        """Requests sent to a decode unit and not finished."""
        return [row for row, target in self._target_of.items() if target == unit]

    def prefilled(self, row: int, source: int, now_ns: int) -> bool:
        """The prompt of ``row`` is computed on ``source``. False when that was all that was asked for."""
        after = self._after
        if not self._from_prefill:
            return True
        slot = int(after.first_slot[row])
        after.token_ns[slot] = now_ns
        after.next_slot[row] = slot + 1
        after.target[row] += 1
        if after.max_output[row] > 1:
            return True
        after.done[row] = True
        after.end_ns[row] = now_ns
        self._sources[source].unpin(row)
        return False

    def send(self, row: int, source: int, target: int, now_ns: int) -> list[Transfer]:
        """The KV of ``row`` is ready to go; returns the transfers that start now."""
        self._target_of[row] = target
        size_bytes = float(self._before.prompt[row]) * self._kv_bytes
        return self.fabric.offer(row, source, target, size_bytes, now_ns)

    def arrived(self, transfer: Transfer, now_ns: int) -> list[Transfer]:
        """The KV is there: the sender's blocks are free, the request may be decoded, the next transfers start."""
        row = transfer.row
        self._sources[transfer.source].unpin(row)
        # With the first token still to come, the last prompt token is computed again to get it.
        tokens = int(self._before.prompt[row]) - (0 if self._from_prefill else 1)
        self._targets[transfer.target].deliver(row, tokens)
        return self.fabric.ended(transfer, now_ns)

    def finished(self, row: int, now_ns: int) -> list[Transfer]:
        """The request has ended; returns transfers that its memory made room for."""
        target = self._target_of.pop(row, None)
        return [] if target is None else self.fabric.release(row, target, now_ns)

    def _admitted(self, target: int) -> Callable[[int, int], None]:
        def admitted(row: int, now_ns: int) -> None:
            for transfer in self.fabric.release(row, target, now_ns):
                self.on_start(transfer)

        return admitted


def _nobody(_transfer: Transfer) -> None:
    """Nobody is told of transfers yet."""
