"""Interface of a dispatcher: the events that it receives and the orders that it returns.

Terms of Tian et al. (2025): an *instance* runs forward passes; a *DP unit* is the smallest target of a request. A
data-parallel replica is an instance with one unit; a DP+EP instance has several units, which wait for each other in
every pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class DispatchRequest(NamedTuple):
    """A request as a dispatcher sees it.

    ``tokens``: prompt tokens, the length of Algorithm 2. ``total_tokens``: prompt plus output tokens as far as known,
    the length of Algorithm 3. ``prefix``: one hash per leading block of the prompt; each covers all blocks before it.
    """

    key: int
    tokens: int
    total_tokens: int
    prefix: tuple[int, ...] = ()


class Order(NamedTuple):
    """Send request ``key`` to ``unit``; ``unit`` None refuses it (flow control)."""

    key: int
    unit: int | None


class UnitReport(NamedTuple):
    """State of one DP unit at the end of a forward pass.

    ``received``: requests received since the start, which separates tokens in transit from queued ones.
    ``queued_tokens``: prompt tokens held and not scheduled. ``kv_tokens``: KV tokens in use.
    """

    unit: int
    received: int
    queued_tokens: int
    kv_tokens: int


class EndForward(NamedTuple):
    """A forward pass of ``instance`` has ended after ``duration_ns`` (the EndForward signal of section 4.1).

    ``continues``: the instance starts the next pass at once, on requests it holds. ``generates``: some of these are
    sequences in decode, so passes follow each other. ``units`` is empty if the end was inferred from streams.
    """

    instance: int
    duration_ns: int
    continues: bool = False
    generates: bool = False
    units: tuple[UnitReport, ...] = ()


class Dispatcher(Protocol):
    """Decides where and when requests are sent. Times are monotonic ns and never decrease."""

    wants_signals: bool
    """Whether :meth:`end_forward` has an effect; if not, callers may skip it."""
    wants_prefix: bool
    """Whether ``DispatchRequest.prefix`` is used."""

    @property
    def wants_units(self) -> bool:
        """Whether ``EndForward.units`` is used now; if not, callers may leave it empty."""
        ...

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """Add a request that has arrived."""
        ...

    def poll(self, now_ns: int) -> list[Order]:
        """Orders to carry out now. Call it after every other event and at :meth:`next_ns`."""
        ...

    def next_ns(self, now_ns: int) -> int | None:
        """When to poll again without a further event; None: only after an event."""
        ...

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """Record the end of a forward pass."""
        ...

    def prefilled(self, key: int, now_ns: int) -> None:
        """Record that the first token of a dispatched request was seen: its prompt is computed."""
        ...

    def ended(self, key: int, now_ns: int) -> None:
        """Record that a dispatched request has ended, successfully or not."""
        ...

    def withdraw(self, key: int) -> None:
        """Remove a request that has not been dispatched."""
        ...

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """Set the instances that take requests from now on (health checks, scaling)."""
        ...

    @property
    def waiting(self) -> int:
        """Number of requests held back."""
        ...
