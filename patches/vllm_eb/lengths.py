"""Mean lengths of the requests seen so far, kept current while an engine runs. Lengths are in tokens."""

from __future__ import annotations

MU_L_WEIGHT = 0.05  # per admitted prompt
MU_O_WEIGHT = 0.2  # per update, of the mean over the completions since the last one
# Before anything was seen, as the authors' code assumes.
INITIAL_MU_L, INITIAL_MU_O = 512.0, 100.0


class Lengths:
    """Smoothed mean prompt ``mu_l``, the part of it that is not in the prefix cache ``mu_new``, mean answer ``mu_o``.

    Prompts count one by one, answers in groups of ``update_every``.
    """

    def __init__(self, update_every: int) -> None:
        self._update_every = update_every
        self.mu_l, self.mu_o = INITIAL_MU_L, INITIAL_MU_O
        self.mu_new = INITIAL_MU_L
        self._prompts = self._updates = 0
        self._answers = self._answer_tokens = 0  # since the last update

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """A prompt of that many tokens, so many of them cached, was admitted for the first time."""
        weight = MU_L_WEIGHT if self._prompts else 1.0
        self.mu_l += weight * (input_tokens - self.mu_l)
        self.mu_new += weight * (input_tokens - cached_tokens - self.mu_new)
        self._prompts += 1

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot after that many output tokens: what refills wait for, whatever the reason."""
        self._answers += 1
        self._answer_tokens += output_tokens

    @property
    def update_due(self) -> bool:
        """Whether M completions have passed since the last update."""
        return self._answers >= self._update_every

    def update(self) -> None:
        """Take the answers since the last update into ``mu_o``."""
        weight = MU_O_WEIGHT if self._updates else 1.0
        self.mu_o += weight * (self._answer_tokens / self._answers - self.mu_o)
        self._updates += 1
        self._answers = self._answer_tokens = 0
