"""Mixed batches with prompts only in every n-th step: vLLM 0.33's ``--prefill-schedule-interval``, for any version.

Between two steps that compute prompts, decodes run alone. A step after which requests still wait, as the batch or the
memory is full, switches the interval off until a step leaves none waiting: a server that cannot keep up is v1.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, PhaseState, StepChoice, Strategy


@dataclass(frozen=True, kw_only=True)
class CadenceSpec(PolicySpec):
    """``every``: steps from one that computes prompts to the next."""

    description = "mixed batches, prompts only in every Nth step (vLLM 0.33's --prefill-schedule-interval); every=N"
    colour = "#56B4E9"
    departure = 10
    without_decisions = (
        "Interval: no prompt was held back, so this is v1. While requests wait for a slot or for memory, prompts "
        "may come in every step; that is vLLM's rule."
    )

    every: int = setting(help="steps from one that computes prompts to the next", unit="steps", at_least=1, example=8)

    @property
    def vllm_option(self) -> str:
        """vLLM's own interval."""
        return f"From vLLM 0.33 on --prefill-schedule-interval {self.every} does it without the plugin."

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """vLLM's steps, some of them without prompts."""
        return Interval(engine, lengths, self.every)


class Interval(Strategy):
    """Chooses between a mixed step and one that decodes only."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, every: int) -> None:
        super().__init__(engine, lengths)
        self._cadence = Cadence(every)

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """It may begin an interval."""
        self._cadence.on_prompt(input_tokens, cached_tokens)

    def on_resume(self) -> None:
        """It begins an interval."""
        self._cadence.on_resume()

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """Decodes only while the interval lasts."""
        if self._cadence.hold(view):
            return StepChoice("decode", "mb", "the interval is not over")
        return StepChoice("mixed", "mb", "prompts may come")


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
        held = waits and view.decodes and not self._backed_up
        self._open = None if held else view
        self._admitted = self._computed = 0
        return held

    def _take_note(self, view: View) -> None:
        before = self._open
        if before is None:
            return
        if not view.preempted:  # vLLM admits no request in a step that preempts, and learns nothing from it
            self._backed_up = before.waiting > self._admitted
        if before.prefilling or self._computed:
            self._last_prefill_step = before.step_id


POLICY = CadenceSpec
