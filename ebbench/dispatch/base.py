"""The interface of a dispatcher: the events it receives and the orders it returns.

Terms of Tian et al. (2025): an *instance* runs forward passes; a *DP unit* is the finest place a request can be sent
to. A data-parallel replica is an instance of one unit; a DP+EP instance has several, which wait for each other in
every pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class DispatchRequest(NamedTuple):
    """A request as a dispatcher sees it.

    ``tokens``: prompt tokens, the length of Algorithm 2; ``total_tokens``: prompt and answer as far as known, the
    length of Algorithm 3. ``prefix``: one hash per leading block of the prompt, naming it together with all before.
    """

    key: int
    tokens: int
    total_tokens: int
    prefix: tuple[int, ...] = ()


class Order(NamedTuple):
    """Send request ``key`` to ``unit``; refuse it (flow control) when ``unit`` is None."""

    key: int
    unit: int | None


class UnitReport(NamedTuple):
    """State of one DP unit at the end of a forward pass.

    ``received``: requests it has received since the start, by which tokens in transit are told from queued ones;
    ``queued_tokens``: prompt tokens it holds and has not scheduled; ``kv_tokens``: KV tokens in use.
    """

    unit: int
    received: int
    queued_tokens: int
    kv_tokens: int


class EndForward(NamedTuple):
    """A forward pass of ``instance`` has ended after ``duration_ns`` (the EndForward signal of section 4.1).

    ``goes_on``: it starts the next pass at once, on what it still holds; ``generates``: some of that are sequences
    generating their answers, so one pass follows the other. ``units`` is empty where the end was inferred from streams
    and nothing else is known.
    """

    instance: int
    duration_ns: int
    goes_on: bool = False
    generates: bool = False
    units: tuple[UnitReport, ...] = ()


class Dispatcher(Protocol):
    """Decides where and when requests go. Times are monotonic nanoseconds and never decrease."""

    wants_signals: bool
    """Whether :meth:`end_forward` changes anything; callers may leave it out otherwise."""
    wants_prefix: bool
    """Whether ``DispatchRequest.prefix`` is looked at."""

    @property
    def wants_units(self) -> bool:
        """Whether ``EndForward.units`` is looked at now; callers may leave it empty otherwise."""
        ...

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """A request has arrived."""
        ...

    def poll(self, now_ns: int) -> list[Order]:
        """What to do now. Call after every other event and when :meth:`next_ns` has come."""
        ...

    def next_ns(self, now_ns: int) -> int | None:
        """When to poll again if nothing else happens; None: only an event can help."""
        ...

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """A forward pass has ended somewhere."""
        ...

    def prefilled(self, key: int, now_ns: int) -> None:
        """The first token of a dispatched request was seen: its prompt is computed."""
        ...

    def ended(self, key: int, now_ns: int) -> None:
        """A dispatched request has ended, however."""
        ...

    def withdraw(self, key: int) -> None:
        """A request that was not dispatched yet is not wanted any more."""
        ...

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """These instances, and no others, take requests from now on (health checks, scaling)."""
        ...

    @property
    def waiting(self) -> int:
        """Requests held back."""
        ...
