"""How many prompt tokens a step computes, where fewer than the engine's budget cost less per token.

Times of matrix products do not grow evenly: on some GPUs a prompt token costs 5 % less in steps of 2,048 tokens than in
steps of 16,384. But a small step costs more again, so a refill that is cut into steps of the cheapest size, with a
small rest, loses what they gain. An exclusive refill is therefore divided into equal steps, as many as cost least
together: of all divisions into so many steps the even one is the cheapest where the cost is convex (Jensen 1906). The
tokens of a refill are known on average only, so its last step takes whatever is left.
"""

from __future__ import annotations

import math

from vllm_eb.costs import StepCosts

SIZES = (1024, 2048, 4096, 8192)  # tokens
SIZE_GAIN = 0.01  # share by which smaller steps must be cheaper


def cheapest_size(costs: StepCosts, most: int) -> int | None:
    """Prompt tokens per step, fewer than ``most``, at which prompts cost least per token.

    None if that is less than SIZE_GAIN cheaper than steps of ``most`` tokens.
    """
    sizes = [size for size in SIZES if size < most]
    best = min(sizes, key=lambda size: costs.prefill_s(size) / size, default=most)
    cheaper = costs.prefill_s(best) / best < (1.0 - SIZE_GAIN) * costs.prefill_s(most) / most
    return best if cheaper else None


def even_steps(costs: StepCosts, tokens: float, most: int) -> int:
    """Number of equal steps, of at most ``most`` tokens, in which ``tokens`` > 0 prompt tokens cost least.

    The fewest possible if that is less than SIZE_GAIN dearer.
    """
    fewest = max(1, math.ceil(tokens / most))
    counts = {fewest}
    for size in SIZES:
        if size < most:
            counts |= {max(fewest, math.floor(tokens / size)), max(fewest, math.ceil(tokens / size))}

    def cost_s(count: int) -> float:
        return count * costs.prefill_s(tokens / count)

    best = min(sorted(counts), key=cost_s)
    return best if cost_s(best) < (1.0 - SIZE_GAIN) * cost_s(fewest) else fewest


class PromptSteps:
    """Token budgets of steps with prompts; None: the engine's budget of ``most`` tokens.

    How many prompt tokens a step computes, where fewer than the engine's budget cost less per token.

    Times of matrix products do not grow evenly: on some GPUs a prompt token costs 5 % less in steps of 2,048 tokens
    than in steps of 16,384. But a small step costs more again, so a refill that is cut into steps of the cheapest size,
    with a small rest, loses what they gain. An exclusive refill is therefore divided into equal steps, as many as cost
    least together: of all divisions into so many steps the even one is the cheapest where the cost is convex (Jensen
    1906). The tokens of a refill are known on average only, so its last step takes whatever is left.
    """

    def __init__(self, costs: StepCosts, most: int) -> None:
        self._costs, self._most = costs, most
        self.cheapest = cheapest_size(costs, most)
        """Tokens per step at which prompts cost least; None if no size is cheaper than full steps."""
        self._size, self._steps_left = 0, 0

    def begin(self, tokens: float) -> None:
        """Divide an exclusive refill of about ``tokens`` prompt tokens, which begins with the next step."""
        if self.cheapest is not None and tokens > 0:
            self._steps_left = even_steps(self._costs, tokens, self._most)
            self._size = math.ceil(tokens / self._steps_left)

    def next_budget(self) -> int | None:
        """Most tokens of the next step of an exclusive refill."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return self._size
        return None if self._steps_left == 0 else self.cheapest
