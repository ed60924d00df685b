"""Signals at the ends of passes, from engines to dispatchers that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbench.dispatch.base import EndForward
from ebbench.simulation.engine import OnPass
from ebbench.simulation.events import PASS, SIGNAL

if TYPE_CHECKING:
    from ebbench.simulation.loop import EventLoop


class PassSignals:
    """Follows the passes of all engines whose dispatcher wants signals; a signal takes ``network_ns`` to arrive."""

    def __init__(self, loop: EventLoop, network_ns: int) -> None:
        self._loop, self._network_ns = loop, network_ns
        for index, stage in enumerate(loop.stages):
            if stage.dispatcher is not None and stage.dispatcher.wants_signals:
                for place, engine in enumerate(stage.engines):
                    engine.on_pass = self._follower(index, place)

    def _follower(self, index: int, engine: int) -> OnPass:
        def on_pass(start_ns: int, end_ns: int) -> None:
            self._loop.push(end_ns, PASS, (index, engine, end_ns - start_ns))

        return on_pass

    def pass_ended(self, subject: tuple[int, int, int]) -> None:
        """A pass has ended: its engine sends the signal."""
        index, engine, duration_ns = subject
        signal = self._loop.stages[index].report(engine, duration_ns)
        if self._network_ns:
            self._loop.push(self._loop.now_ns + self._network_ns, SIGNAL, (index, signal))
        else:
            self.arrived((index, signal))

    def arrived(self, subject: tuple[int, EndForward]) -> None:
        """A signal has reached its dispatcher, which may dispatch now."""
        index, signal = subject
        dispatcher = self._loop.stages[index].dispatcher
        assert dispatcher is not None
        dispatcher.end_forward(signal, self._loop.now_ns)
        self._loop.poll(index)
