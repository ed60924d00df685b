"""The free constants of a device and model, which a run may replace."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HostCosts:
    """The free constants of a device and model (at most four), with their source and whether they were fitted.

    With several GPUs per unit the engine sends every step to a process per GPU: ``workers_step_s`` and
    ``workers_sequence_s`` are added.

    ``mixed_excess`` scales the part of a mixed attention call that exceeds its pure parts; 1 is as profiled.
    ``request_s`` is not a free constant: `ebbench calibrate` measures it together with a grid of step times.
    ``doubt``: what speaks against the constants, said where the host decides; "" for nothing.
    """

    step_s: float
    sequence_s: float
    mixed_excess: float = 1.0
    source: str = "default, not fitted"
    request_s: float = 0.0
    fitted: bool = True
    doubt: str = ""
    workers_step_s: float = 0.0
    workers_sequence_s: float = 0.0

    def with_workers(self, tp: int) -> HostCosts:
        """The constants of a unit of ``tp`` GPUs, without a part that depends on them."""
        several = tp > 1
        step_s = self.step_s + several * self.workers_step_s
        sequence_s = self.sequence_s + several * self.workers_sequence_s
        doubt = self.doubt if several or not self.workers_sequence_s else ""
        return replace(
            self, step_s=step_s, sequence_s=sequence_s, doubt=doubt, workers_step_s=0.0, workers_sequence_s=0.0
        )
