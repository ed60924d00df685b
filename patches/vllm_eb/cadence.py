"""Mixed batches with prompts only in every n-th step: vLLM 0.33's ``--prefill-schedule-interval``, for any version.

Between two steps that compute prompts, decodes run alone. A step after which requests still wait, as the batch or the
memory is full, switches the interval off until one leaves nobody waiting: a server that cannot keep up is v1.
"""

from __future__ import annotations

from vllm_eb.decisions import View


class Cadence:
    """Whether prompts are to wait in the next step. ``every``: steps from one that computes prompts to the next."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last_prefill_step = -every
        self._backed_up = False  # requests still waited after the last step that could take some
        self._open: View | None = None  # what that step saw, while what it did is not known yet
        self._admitted = self._computed = 0  # since then; the latter without those whose prompts were cached

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time: tokens of its prompt, and how many of them need no computing."""
        self._admitted += 1
        self._computed += cached_tokens < input_tokens - 1  # the last token is computed in any case

    def on_resume(self) -> None:
        """A preempted request was admitted again."""
        self._admitted += 1
        self._computed += 1

    def hold(self, view: View) -> bool:
        """Whether the next step decodes only."""
        self._take_note(view)
        waits = view.step_id - self._last_prefill_step < self._every
        held = waits and view.decoding > 0 and not self._backed_up
        self._open = None if held else view
        self._admitted = self._computed = 0
        return held

    def _take_note(self, view: View) -> None:
        before = self._open
        if before is None:
            return
        if not view.preempted:  # vLLM admits nobody in a step that preempts, and learns nothing from it
            self._backed_up = before.waiting > self._admitted
        if before.prefilling or self._computed:
            self._last_prefill_step = before.step_id
