"""Marginal cost of a token by batch composition: figure 1 of Zhang et al. (ICML 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.devices.base import CostModel
from ebbench.devices.fit import decode_shape, mixed_shape, prefill_shape

SMALL_TOKENS = 1024
LARGE_TOKENS = 2048
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 20))


@dataclass(frozen=True)
class MarginalCurve:
    """Time (s) per further token between steps of 1,024 and 2,048 tokens.

    ``mixed_s[i]`` is at decode share ``shares[i]``; ``crossover``: the smallest decode share at which a token in a
    mixed batch costs more than one in a pure decode batch; None if it never does.
    """

    context_tokens: int
    shares: tuple[float, ...]
    mixed_s: tuple[float, ...]
    decode_s: float
    prefill_s: float
    crossover: float | None


def marginal_curve(cost: CostModel, context_tokens: int) -> MarginalCurve:
    """Marginal cost over the decode share, for decodes with ``context_tokens`` KV tokens each."""
    span = LARGE_TOKENS - SMALL_TOKENS

    def mixed(share: float) -> float:
        ends = [cost.step_s(mixed_shape(n, share, context_tokens)) for n in (SMALL_TOKENS, LARGE_TOKENS)]
        return (ends[1] - ends[0]) / span

    decode = [cost.step_s(decode_shape(n, context_tokens)) for n in (SMALL_TOKENS, LARGE_TOKENS)]
    prefill = [cost.step_s(prefill_shape(n)) for n in (SMALL_TOKENS, LARGE_TOKENS)]
    curve = tuple(mixed(share) for share in SHARES)
    decode_s = (decode[1] - decode[0]) / span
    return MarginalCurve(
        context_tokens, SHARES, curve, decode_s, (prefill[1] - prefill[0]) / span, _crossing(curve, decode_s)
    )


def _crossing(curve: tuple[float, ...], level: float) -> float | None:
    """First decode share at which the curve rises above the level, interpolated."""
    if curve[0] > level:
        return SHARES[0]
    for i in range(1, len(curve)):
        if curve[i] > level:
            step = (level - curve[i - 1]) / (curve[i] - curve[i - 1])
            return SHARES[i - 1] + step * (SHARES[i] - SHARES[i - 1])
    return None
