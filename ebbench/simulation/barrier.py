"""DP units of one DP+EP instance: a step lasts as long as its slowest unit.

The expert layers exchange tokens between all units, so no unit can go on before all have come as far (Tian et al.
2025, section 3.3). Each unit has its own scheduler, KV cache and policy; the group starts and ends their steps
together. A unit with nothing to do takes part with an empty batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ebbench.devices.base import CostModel, PassCost, StepShape
from ebbench.simulation.instance import Instance
from ebbench.simulation.step import NS_PER_S, Step

Pass = list[tuple["BarrierUnit", Step]]
NOTHING = StepShape((), 0, 0, 0)


class BarrierUnit(Instance):
    """An instance whose steps are timed by its group."""

    shape = NOTHING

    def _time(self, step: Step, shape: StepShape) -> None:
        self.shape = shape

    @property
    def cost(self) -> CostModel:
        """What times the steps."""
        return self._cost

    def schedule(self, now_ns: int) -> Step | None:
        """Take in what has arrived and schedule a step; None when there is nothing to schedule."""
        self._take_in(now_ns)
        if not len(self.running) and not self.waiting:
            return None
        step = self._schedule(now_ns)
        return None if step.empty else step

    def start(self, step: Step, start_ns: int, end_ns: int) -> None:
        """The group has timed the step."""
        step.start_ns, step.end_ns = start_ns, end_ns
        self._queue.append(step)  # in flight: preemption looks here
        self._note(step)

    def finish(self) -> list[int]:
        """The oldest step has ended; returns the rows that ended with it."""
        return self._update(self._queue.popleft())


class BarrierGroup:
    """One DP+EP instance of several units. Behaves towards the clock as a single instance does.

    Asynchronous scheduling as in a single instance: the next step is scheduled while one runs.
    """

    def __init__(
        self, units: Sequence[BarrierUnit], *, depth: int, on_pass: Callable[[int, int], None] | None = None
    ) -> None:
        self.units = units
        self._depth, self._on_pass = depth, on_pass
        self._passes: deque[tuple[int, Pass]] = deque()  # end and steps, oldest first
        self._blocked = False
        self._device_free_ns = 0

    @property
    def idle(self) -> bool:
        """Whether a new arrival must wake it."""
        return not self._blocked

    def wake(self, now_ns: int) -> tuple[int | None, list[int]]:
        """As :meth:`Instance.wake`: when to be woken again, and the rows that ended."""
        if self._blocked:
            self._blocked = False
            _, steps = self._passes.popleft()
            ended = [row for unit, _ in steps for row in unit.finish()]
            if ended:
                return now_ns, ended
        while len(self._passes) < self._depth and self._schedule(now_ns):
            pass
        if not self._passes:
            return None, []
        self._blocked = True
        return self._passes[0][0], []

    def _pass_s(self, shapes: list[StepShape]) -> float:
        """Seconds of one pass: by the units' cost model where it knows, else as long as the slowest unit's step."""
        cost = self.units[0].cost
        if isinstance(cost, PassCost):
            return cost.pass_s(shapes, len(self.units))
        return max(cost.step_s(shape) for shape in shapes)

    def _schedule(self, now_ns: int) -> bool:
        """Schedule one pass of all units; False when none has anything to do."""
        steps: Pass = []
        for unit in self.units:
            step = unit.schedule(now_ns)
            if step is not None:
                steps.append((unit, step))
        if not steps:
            return False
        start_ns = max(now_ns, self._device_free_ns)
        end_ns = self._device_free_ns = start_ns + round(self._pass_s([unit.shape for unit, _ in steps]) * NS_PER_S)
        for unit, step in steps:
            unit.start(step, start_ns, end_ns)
        self._passes.append((end_ns, steps))
        if self._on_pass is not None:
            self._on_pass(start_ns, end_ns)
        return True
