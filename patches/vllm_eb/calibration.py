"""The controller's view of a device: four linear coefficients and, where measured, the mixed-batch cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MixedCost:
    """Cost of one token in a mixed batch at decode share r: ``a + b*r + c*r**2`` in s/token (theory.md section 1)."""

    a: float
    b: float
    c: float

    def at(self, r: float) -> float:
        """Seconds per token at decode share ``r`` in [0, 1]."""
        return self.a + (self.b + self.c * r) * r


@dataclass(frozen=True)
class Calibration:
    """Linear cost model, seconds: prefill of x tokens ``alpha_p + beta_p*x``, decode of n ``alpha_d + beta_d*n``.

    ``mixed`` None means not measured. ``alpha_mb`` None means: as ``alpha_p`` (the authors' default).
    ``margin`` is EB+'s default priority margin delta on this device, s/token.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    mixed: MixedCost | None = None
    alpha_mb: float | None = None
    margin: float = 1e-4
    source: str = ""
