"""When the staggered dispatcher need not wait for its interval. Not in the paper.

Waiting gains nothing in five cases:

- light load: fewer than two arrivals are expected per interval, so no batch would form. A request is sent to an
  idle instance at once;
- one instance under light load: there is no other instance to alternate with and no choice between requests.
  Requests are sent at once;
- a full batch is waiting;
- the instances *decode*: their passes are short and follow each other, so no waiting time on the device can be saved,
  and policies such as EB decide by the engine's own queue. Requests are sent at once;
- the instance *continues*: it starts its next pass by itself, on an unfinished prompt or on sequences in decode.
  Requests that arrive in time join that pass; others wait for the one after it.

With any network delay, a batch sent on such an instance's signal arrives too late. It is therefore sent ahead: after
``lookahead`` times the expected duration of the pass since the last signal, less the network delay. A request that
arrives later and before the pass add may still join if the pass gains by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet

LIGHT_ARRIVALS = 2.0
"""With fewer arrivals expected per interval, no batch would form."""
LIGHT_ARRIVALS_ALONE = 3.0
"""The same for a single instance, and the limit of open requests per unit: with fewer, choosing which requests share a
pass gains nothing."""
ARRIVALS_KEPT, LEAST_ARRIVALS = 64, 8
"""Number of arrivals kept, and the fewest from which a rate is computed."""


class ArrivalRate:
    """Arrival rate over the last arrivals."""

    def __init__(self) -> None:
        self._times_ns: deque[int] = deque(maxlen=ARRIVALS_KEPT)

    def note(self, now_ns: int) -> None:
        """Record an arrival."""
        self._times_ns.append(now_ns)

    def light(self, interval_ns: float, now_ns: int, arrivals: float = LIGHT_ARRIVALS) -> bool:
        """Whether fewer than ``arrivals`` are expected per interval; True before the rate is known."""
        if len(self._times_ns) < LEAST_ARRIVALS:
            return True
        return len(self._times_ns) * interval_ns < arrivals * (now_ns - self._times_ns[0])


class DecodeDetector:
    """Whether the instances decode: any of them did in the last ``window`` passes of each.

    ``expected``: the value assumed until signals arrive.
    """

    def __init__(self, window: int, *, expected: bool = False) -> None:
        self._window = window
        self._passes_since: int | None = 0 if expected else None  # None: never

    def on_signal(self, generates: bool) -> None:
        """Record the ``generates`` flag of a signal."""
        if generates:
            self._passes_since = 0
        elif self._passes_since is not None:
            self._passes_since += 1

    def detected(self, instances: int) -> bool:
        """Whether any of ``instances`` active instances decoded recently."""
        return self._passes_since is not None and self._passes_since < self._window * max(1, instances)


class ContinuingInstances:
    """Instances that continue by themselves, and when a batch for their next pass may be sent."""

    def __init__(self, network_ns: int, lookahead: float) -> None:
        self._network_ns, self._lookahead = network_ns, lookahead
        self._opens_ns: dict[int, int] = {}

    @property
    def reaches_next_pass(self) -> bool:
        """Whether a batch sent on a signal still reaches the pass that add then (no network delay)."""
        return self._network_ns == 0

    def on_signal(self, instance: int, generates: bool, pass_ns: float, now_ns: int) -> None:
        """Record that the instance continues with a pass expected to take ``pass_ns``."""
        ahead_ns = 0
        if not generates and not self.reaches_next_pass:
            ahead_ns = max(0, round(self._lookahead * pass_ns) - self._network_ns)
        self._opens_ns[instance] = now_ns + ahead_ns

    def add(self, instance: int, pass_ns: float, now_ns: int) -> None:
        """Record that a batch was sent that takes several passes, the first expected to take ``pass_ns``."""
        self._opens_ns[instance] = now_ns + round(self._lookahead * pass_ns)

    def __contains__(self, instance: int) -> bool:
        return instance in self._opens_ns

    def forget(self, instance: int) -> None:
        """Remove an instance: it does not continue, or its next pass has its batch."""
        self._opens_ns.pop(instance, None)

    def end_of_instant(self) -> None:
        """Without network delay a batch can be sent only at the time of the signal: remove all instances."""
        if self.reaches_next_pass:
            self._opens_ns.clear()

    def open_instances(self, now_ns: int) -> AbstractSet[int]:
        """Instances to which a batch may be sent now."""
        return {instance for instance, opens_ns in self._opens_ns.items() if opens_ns <= now_ns}

    def next_ns(self, now_ns: int) -> int | None:
        """When the next instance can be sent a batch (ns), or None."""
        return min((t for t in self._opens_ns.values() if t > now_ns), default=None)
