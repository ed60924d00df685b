"""First Ctrl-C: release no further session and let open requests finish. Second Ctrl-C: abort them."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import TracebackType

from ebbench.client.messages import Stop
from ebbench.client.senders import Senders


class Interrupts:
    """Context manager that handles SIGINT; ``count`` is the number of signals received."""

    def __init__(self, senders: Senders) -> None:
        self._senders = senders
        self._active = threading.current_thread() is threading.main_thread()
        self.count = 0

    def __enter__(self) -> Interrupts:
        if self._active:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _on_interrupt(self) -> None:
        self.count += 1
        self._senders.send_all(Stop(abort=self.count > 1))
