"""Smoothed mean lengths of requests, updated while an engine runs. Lengths are in tokens."""

from __future__ import annotations

# Weights as in the authors' code; in the paper mu_l is the mean of the prompts in the window (section 3.4).
MU_L_WEIGHT = 0.05  # per admitted prompt
MU_O_WEIGHT = 0.2  # per update, for the mean over the completions since the last update
# Initial values, as in the authors' code.
INITIAL_MU_L, INITIAL_MU_O = 512.0, 100.0


class Lengths:
    """Smoothed means: prompt ``mu_l``, its part that is not in the prefix cache ``mu_new``, and output ``mu_o``.

    Prompts update one by one, outputs in groups of ``update_every``.
    """

    def __init__(self, update_every: int) -> None:
        self._update_every = update_every
        self.mu_l, self.mu_o = INITIAL_MU_L, INITIAL_MU_O
        self.mu_new = INITIAL_MU_L
        self._prompts = self._updates = 0
        self._answers = self._answer_tokens = 0  # since the last update

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """Record the first admission of a prompt of ``input_tokens``, of which ``cached_tokens`` are cached."""
        weight = MU_L_WEIGHT if self._prompts else 1.0
        self.mu_l += weight * (input_tokens - self.mu_l)
        self.mu_new += weight * (input_tokens - cached_tokens - self.mu_new)
        self._prompts += 1

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot after ``output_tokens``; aborted requests count, since they free a slot
        too."""
        self._answers += 1
        self._answer_tokens += output_tokens

    @property
    def update_due(self) -> bool:
        """Whether ``update_every`` completions have occurred since the last update."""
        return self._answers >= self._update_every

    def update(self) -> None:
        """Update ``mu_o`` with the outputs since the last update."""
        weight = MU_O_WEIGHT if self._updates else 1.0
        self.mu_o += weight * (self._answer_tokens / self._answers - self.mu_o)
        self._updates += 1
        self._answers = self._answer_tokens = 0
