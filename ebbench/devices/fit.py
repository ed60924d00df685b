"""Linear calibration of any cost model, on the grid that the EB authors calibrated on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbench.devices.base import CostModel, StepShape
from vllm_eb.calibration import Calibration, CalibrationError, CostGrid, MixedCost

PREFILL_TOKENS = (256, 512, 1024, 2048, 4096)
DECODE_SEQS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
DECODE_CONTEXT_TOKENS = 512
MIXED_TOKENS = 2048
MIXED_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
LEAST_FIXED_S = 1e-6


def prefill_shape(tokens: int, context: int = 0) -> StepShape:
    """One prompt of ``tokens`` after ``context`` cached tokens, completing in this step."""
    return StepShape(((tokens, context),), 0, 0, 1)


def decode_shape(seqs: int, context: int) -> StepShape:
    """``seqs`` decodes with ``context`` KV tokens per sequence."""
    return StepShape((), seqs, seqs * context, seqs)


def mixed_shape(tokens: int, share: float, context: int) -> StepShape:
    """A step of ``tokens`` tokens, of which the share ``share`` are decodes and the rest one prompt."""
    seqs = min(tokens - 1, max(1, round(tokens * share)))
    return StepShape(((tokens - seqs, 0),), seqs, seqs * context, seqs + 1)


def fit_calibration(cost: CostModel, source: str, margin: float) -> Calibration:
    """Least squares of step times over the authors' grid, and beta_mb(r) from mixed steps of 2,048 tokens."""
    prefill_s = [cost.step_s(prefill_shape(x)) for x in PREFILL_TOKENS]
    alpha_p, beta_p = fixed_and_each(PREFILL_TOKENS, prefill_s)
    context = DECODE_CONTEXT_TOKENS
    decode_s = [cost.step_s(decode_shape(n, context)) for n in DECODE_SEQS]
    alpha_d, beta_d = fixed_and_each(DECODE_SEQS, decode_s)
    per_token = [(cost.step_s(mixed_shape(MIXED_TOKENS, r, context)) - alpha_p) / MIXED_TOKENS for r in MIXED_SHARES]
    c, b, a = (float(v) for v in np.polyfit(MIXED_SHARES, per_token, 2))
    return Calibration(
        alpha_p=alpha_p,
        beta_p=beta_p,
        alpha_d=alpha_d,
        beta_d=beta_d,
        mixed=_mixed(a, b, c),
        margin=margin,
        source=source,
    )


GRID_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
GRID_SEQS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
GRID_CONTEXTS = (128, 512, 2048, 8192)
GRID_PROMPT_TOKENS = 512


def cost_grid(cost: CostModel) -> CostGrid:
    """Step times on the grid for the policies that compare costs; prompt tokens come in prompts of 512."""

    def step(tokens: int, seqs: int, context: int) -> float:
        full, rest = divmod(tokens, GRID_PROMPT_TOKENS)
        prompts = ((GRID_PROMPT_TOKENS, 0),) * full + (((rest, 0),) if rest else ())
        return cost.step_s(StepShape(prompts, seqs, seqs * context, seqs + len(prompts)))

    return CostGrid(
        GRID_TOKENS,
        GRID_SEQS,
        GRID_CONTEXTS,
        tuple(step(x, 0, 0) for x in GRID_TOKENS),
        tuple(tuple(step(0, n, c) for c in GRID_CONTEXTS) for n in GRID_SEQS),
        tuple(tuple(tuple(step(x, n, c) for c in GRID_CONTEXTS) for n in GRID_SEQS) for x in GRID_TOKENS),
    )


def fixed_and_each(counts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fixed cost and cost per token or sequence in s: least squares, both at least zero.

    Absolute errors, as used by the authors. With relative errors the short steps would dominate, in which loading the
    weights takes a constant time: on L40S that gives a prefill 9.6 ms of fixed cost, which refills are too long to
    have, and EB with the resulting threshold is up to 9 % slower. The fixed cost is at least LEAST_FIXED_S: without a
    fixed cost of a decode step no threshold is defined.
    """
    x, y = np.asarray(counts, float), np.asarray(times_s, float)
    each, fixed = (float(v) for v in np.polyfit(x, y, 1))
    if fixed < 0.0:
        fixed, each = 0.0, float(x @ y / (x @ x))
    elif each < 0.0:
        fixed, each = float(y.mean()), 0.0
    return max(fixed, LEAST_FIXED_S), each


def _mixed(a: float, b: float, c: float) -> MixedCost | None:
    """The fitted polynomial, or None if it is negative somewhere."""
    try:
        return MixedCost(a, b, c)
    except CalibrationError:
        return None
