"""The free constants of a device and model, which a run may replace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCosts:
    """The free constants of a device and model (at most three), with their source and whether they were fitted.

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
