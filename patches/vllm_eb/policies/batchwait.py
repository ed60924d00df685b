"""TensorRT-LLM's batch wait: prompts wait until a step has enough tokens, for a bounded number of steps.

``batch_wait_timeout_iters`` and ``batch_wait_max_tokens_ratio`` of TensorRT-LLM's PyTorch executor: if a step would
contain prompts and decodes, the prompts wait while the step's tokens, prompts and decodes together, are fewer than
``ratio`` of the token budget, for at most ``iters`` consecutive steps.

Prompt tokens are those that a step could compute: first of partly computed prompts, then of waiting ones in order, as
far as slots and KV blocks suffice. TensorRT-LLM subtracts cached prefixes first; here they count, since vLLM looks them
up on admission.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Mode, PhaseState, StepChoice, Strategy, View


@dataclass(frozen=True, kw_only=True)
class BatchWait(PolicySpec):
    """``iters`` is batch_wait_timeout_iters, ``ratio`` is batch_wait_max_tokens_ratio; off by default there."""

    description = "mixed batches, prompts wait for a fuller step (TensorRT-LLM's batch wait); needs iters= and ratio="

    iters: int = setting(
        help="most steps that prompts wait", unit="steps", at_least=1, example=32, published="batch_wait_timeout_iters"
    )
    ratio: float = setting(
        help="share of the token budget at which they no longer wait", unit="share", above=0, at_most=1, example=0.5,
        published="batch_wait_max_tokens_ratio",
    )  # fmt: skip

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Mixed steps, or decode steps while prompts wait."""
        return FullerSteps(engine, lengths, self.iters, self.ratio)


class FullerSteps(Strategy):
    """Chooses between a mixed step and a decode step."""

    mode: Mode = "mb"

    def __init__(self, engine: EngineFacts, lengths: Lengths, iters: int, ratio: float) -> None:
        super().__init__(engine, lengths)
        self._iters = iters
        self._enough = ratio * engine.max_num_batched_tokens
        self._waited = 0
        self.prompt_tokens_wanted = max(int(self._enough), 1)
        self._mixed = StepChoice("mixed", "mb", "prompts_join")
        self._decode = StepChoice("decode", "mb", "step_not_full")

    def choose(self, view: View, phases: PhaseState) -> StepChoice:
        """A decode step while a mixed one would have too few tokens."""
        few = 0 < view.prompt_tokens < self._enough - self.decode_tokens(view.decoding)
        if few and view.decodes and self._waited < self._iters:
            self._waited += 1
            return self._decode
        if view.prompt_tokens:
            self._waited = 0
        return self._mixed


POLICY = BatchWait
