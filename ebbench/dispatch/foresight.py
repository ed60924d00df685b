"""When the staggered dispatcher need not wait for its interval. None of this is in the paper.

Five cases in which waiting gains nothing:

- light load: fewer than two arrivals are expected in an interval, so no batch would form. A request is then sent to an
  idle instance at once; under light load the policy becomes immediate dispatch to an idle instance.
- one instance under light load: there are no instances to alternate between and no requests to choose from. Requests
  are then sent at once.
- a full batch is there already.
- the instances *generate answers*: their passes are short and one follows the other, so there is no wait on the device
  to save, and a queue of their own is what policies such as EB decide by. Requests then go out at once.
- the instance *goes on*: it starts its next pass by itself, on a prompt that is not finished or on sequences it is
  generating. What reaches it in time shares that pass; what does not, waits for the next one.

What is sent on the signal of such an instance comes too late if the way takes any time. It is therefore sent ahead:
when ``lookahead`` of the time that its pass is expected to take has passed since the last signal, less the time of the
way. A request that comes after that and before the pass begins may still join, where the pass gains by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet

LIGHT_ARRIVALS = 2.0
"""With fewer arrivals expected in an interval there is no batch to wait for."""
LIGHT_ARRIVALS_ALONE = 3.0
"""The same for a single instance, and how many requests may be open on each of its units: with fewer, choosing which
requests share a pass gains nothing."""
ARRIVALS_KEPT, LEAST_ARRIVALS = 64, 8
"""Arrivals kept, and the fewest from which a rate is computed."""


class ArrivalRate:
    """Arrivals over the last few."""

    def __init__(self) -> None:
        self._times_ns: deque[int] = deque(maxlen=ARRIVALS_KEPT)

    def note(self, now_ns: int) -> None:
        """Count an arrival."""
        self._times_ns.append(now_ns)

    def light(self, interval_ns: float, now_ns: int, arrivals: float = LIGHT_ARRIVALS) -> bool:
        """Whether fewer than ``arrivals`` are expected in an interval. Nothing known yet counts as light."""
        if len(self._times_ns) < LEAST_ARRIVALS:
            return True
        return len(self._times_ns) * interval_ns < arrivals * (now_ns - self._times_ns[0])


class Generation:
    """Whether the instances generate answers: any of them did in the last ``window`` passes of each.

    ``expected`` is what is taken to be so until signals say otherwise.
    """

    def __init__(self, window: int, *, expected: bool = False) -> None:
        self._window = window
        self._passes_since: int | None = 0 if expected else None  # None: never

    def signalled(self, generates: bool) -> None:
        """A pass has ended."""
        if generates:
            self._passes_since = 0
        elif self._passes_since is not None:
            self._passes_since += 1

    def seen(self, instances: int) -> bool:
        """Whether they do, ``instances`` of them being active."""
        return self._passes_since is not None and self._passes_since < self._window * max(1, instances)


class GoingOn:
    """Instances that run on by themselves, and when a batch for their next pass may leave."""

    def __init__(self, network_ns: int, lookahead: float) -> None:
        self._network_ns, self._lookahead = network_ns, lookahead
        self._opens_ns: dict[int, int] = {}

    @property
    def in_time(self) -> bool:
        """Whether what is sent on a signal still reaches the pass that begins then."""
        return self._network_ns == 0

    def signalled(self, instance: int, generates: bool, pass_ns: float, now_ns: int) -> None:
        """The instance has ended a pass and goes on with one that should take ``pass_ns``."""
        ahead_ns = 0
        if not generates and not self.in_time:
            ahead_ns = max(0, round(self._lookahead * pass_ns) - self._network_ns)
        self._opens_ns[instance] = now_ns + ahead_ns

    def begins(self, instance: int, pass_ns: float, now_ns: int) -> None:
        """A batch was sent that takes more than one pass, the first of which should take ``pass_ns``."""
        self._opens_ns[instance] = now_ns + round(self._lookahead * pass_ns)

    def __contains__(self, instance: int) -> bool:
        return instance in self._opens_ns

    def forget(self, instance: int) -> None:
        """It goes on no more, or was sent a batch, which is enough for its next pass."""
        self._opens_ns.pop(instance, None)

    def end_of_moment(self) -> None:
        """Without delay on the way, only the very moment of the signal counts."""
        if self.in_time:
            self._opens_ns.clear()

    def open_to(self, now_ns: int) -> AbstractSet[int]:
        """Those a batch may leave for now."""
        return {instance for instance, opens_ns in self._opens_ns.items() if opens_ns <= now_ns}

    def next_ns(self, now_ns: int) -> int | None:
        """When the next one opens."""
        return min((t for t in self._opens_ns.values() if t > now_ns), default=None)
