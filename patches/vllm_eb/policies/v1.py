"""vLLM v1 unchanged: mixed batches by vLLM's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_eb.policy import PolicySpec


@dataclass(frozen=True, kw_only=True)
class V1(PolicySpec):
    """A policy without settings and without controller."""

    description = "mixed batches: vLLM v1, untouched"
    colour = "#0072B2"
    departure = 0
    native = True

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """The baseline."""
        return (cls.kind,)


POLICY = V1
