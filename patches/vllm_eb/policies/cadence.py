"""Mixed batches with prompts only in every n-th step, as with ``--prefill-schedule-interval`` of vLLM 0.33.

Between two steps that compute prompts, steps hold decodes only. If requests still wait after a step with prompts, since
batch or memory are full, the interval is suspended until a step leaves none waiting: an overloaded server behaves like
v1. ``escape=off`` omits that rule: decodes take precedence however many requests wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, View


@dataclass(frozen=True, kw_only=True)
class CadenceSpec(PolicySpec):
    """``every``: number of steps from one that computes prompts to the next."""

    description = "mixed batches, prompts only in every Nth step (vLLM 0.33's --prefill-schedule-interval); every=N"

    every: int = setting(
        help="steps from one that computes prompts to the next", unit="steps", at_least=1, example=8,
        published="prefill_schedule_interval",
    )  # fmt: skip
    escape: bool = setting(True, "drop the interval while requests wait for a slot or for memory, as vLLM does")

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """vLLM's own steps, some without prompts."""
        return Interval(engine, lengths, self.every, escape=self.escape)


class Interval(Strategy):
    """Chooses between a mixed step and a decode step."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, every: int, *, escape: bool) -> None:
        super().__init__(engine, lengths)
        self._cadence = Cadence(every, escape=escape)

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Record an admission, which may begin an interval."""
        self._cadence.on_prompt(input_tokens, cached_tokens)

    def on_resume(self) -> None:
        """Record a resumed request, which begins an interval."""
        self._cadence.on_resume()

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """A decode step during the interval, else a mixed step."""
        if self._cadence.hold(view):
            return StepChoice("decode", "mb", "within_interval")
        return StepChoice("mixed", "mb", "prompts_join")


class Cadence:
    """Whether prompts must wait in the next step.

    ``every``: steps from one that computes prompts to the next; ``escape``: not while requests wait for a slot or KV.
    """

    def __init__(self, every: int, *, escape: bool = True) -> None:
        self._every, self._escape = every, escape
        self._last_prefill_step = -every
        self._backed_up = False  # requests still waited after the last step that could admit some
        self._open: View | None = None  # the view of that step, until its effect is known
        self._admitted = self._computed = 0  # since that view; the latter without fully cached prompts

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Record the first admission of a request: tokens of its prompt, and how many of them are cached."""
        self._admitted += 1
        self._computed += cached_tokens < input_tokens - 1  # the last token is always computed

    def on_resume(self) -> None:
        """Record that a preempted request was admitted again."""
        self._admitted += 1
        self._computed += 1

    def hold(self, view: View) -> bool:
        """Whether the next step holds decodes only."""
        self._record_step(view)
        waits = view.step_id - self._last_prefill_step < self._every
        holds = waits and view.decodes and not self._backed_up
        self._open = None if holds else view
        self._admitted = self._computed = 0
        return holds

    def _record_step(self, view: View) -> None:
        before = self._open
        if before is None:
            return
        if not view.preempted:  # vLLM admits nothing in a step that preempts, so such a step gives no information
            self._backed_up = self._escape and before.waiting > self._admitted
        if before.prefilling or self._computed:
            self._last_prefill_step = before.step_id


POLICY = CadenceSpec
