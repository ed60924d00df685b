"""What a signal does to a run: before the first request it cancels the run; then the first one releases no further
session and lets open requests finish, the second aborts them.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from ebbench.client.messages import Stop
from ebbench.client.senders import Senders
from ebbench.process.termination import on_signal


class Interrupts:
    """Context manager of the task that sends a plan.

    The signal handler only wakes the event loop, so that a signal is never an exception inside it. Leaving raises
    nothing: a run that has sent requests ends with what was measured, see ``interrupted``. A signal after that waits
    until the run is stored.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None  # made in the coroutine that sends the plan
        self._task = task
        self._senders: Senders | None = None
        self._stops = 0
        self._signals = on_signal(self._wake)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come."""
        return self._signals.received > 0

    def stop(self, senders: Senders) -> None:
        """From now on stop ``senders`` instead of cancelling the run. Call it before they start."""
        self._senders = senders

    def close(self) -> None:
        """React to no further signal: all requests have ended."""
        self._signals.__exit__(None, None, None)

    def __enter__(self) -> Interrupts:
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._react)

    def _react(self) -> None:
        self._stops += 1
        if self._senders is not None:
            self._senders.send_all(Stop(abort=self._stops > 1))
        elif self._stops == 1:  # once: a second cancellation would break off the end of the workers
            self._task.cancel()
