"""SGLang's prefill delayer: exclusive batches whose prefill waits until there are slots for a batch of the usual size.

SGLang computes prompts apart from decodes, and prompts come first. Its prefill delayer (``--enable-prefill-delayer``,
managers/prefill_delayer.py; one engine's part of the rule is built here) holds a prefill back while

- fewer slots are free than the largest prefill of late had requests (slot condition), or
- with ``ratio``: fewer requests wait than ``min(ratio * running, largest prefill)`` (queue condition), for at most
  ``wait`` seconds.

The first time either holds, the prefill goes ahead nevertheless. A prefill is let through where less than the share
``usage`` of the KV cache is in use, and after ``passes`` decode steps of waiting.

"The largest prefill of late" has had three forms. ``watermark=lifetime``, the first, was the largest ever: one large
batch, after a pause say, raised it for good, and with ``passes=0`` (no bound, as it was then) waiting requests starved
while slots stood empty. ``decay`` lowered it by 0.2 % per scheduling pass, which brings small values to nothing.
``window``, the present form and the default here, is the largest of the last 16 attempts: a prefill counts with its
requests, one held back with those that it would have had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Strategy

ATTEMPTS = 16
DECAY = 0.998


@dataclass(frozen=True, kw_only=True)
class Delayer(PolicySpec):
    """Settings carry SGLang's defaults; ``usage`` and ``ratio`` are off there unless given."""

    description = "exclusive batches, a prefill waits for slots for a batch of the usual size (SGLang's delayer)"
    colour = "#882255"
    departure = 55

    passes: int = setting(30, "steps that a prefill waits at most; 0: no bound", unit="steps", at_least=0)
    watermark: Literal["window", "decay", "lifetime"] = setting(
        "window", "the largest prefill: of the last 16 attempts, ever with decay, or ever (SGLang's first form)"
    )
    usage: float = setting(0.0, "share of the KV cache in use below which nothing waits", unit="share", at_least=0)
    ratio: float = setting(0.0, "waiting requests needed per running one; 0: not asked", unit="share", at_least=0)
    wait: float = setting(5.0, "longest wait for that many", unit="s", above=0)

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """With SGLang's defaults."""
        return (cls.kind,)

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """v0 with prefills held back."""
        return DelayedPrefill(self, engine, lengths)


class LargestPrefill:
    """How many requests the largest prefill of late had."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._attempts: deque[int] = deque(maxlen=ATTEMPTS)
        self._largest = 0.0

    def attempt(self, requests: int, *, held_back: bool = False) -> None:
        """A prefill of so many requests was made, or held back."""
        self._attempts.append(requests)
        if not held_back:
            self._largest = max(self._largest, requests)

    def step(self) -> None:
        """A scheduling pass."""
        if self._form == "decay":
            self._largest *= DECAY

    @property
    def requests(self) -> int:
        """In the form asked for."""
        return max(self._attempts, default=0) if self._form == "window" else int(self._largest)


class DelayedPrefill(Strategy):
    """Asked before each refill of exclusive batches."""

    def __init__(self, spec: Delayer, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths)
        self._spec = spec
        self._largest = LargestPrefill(spec.watermark)
        self._admitted = 0  # in the step before this one
        self._delayed, self._since_s = 0, 0.0
        self._first = True

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """It was part of the prefill just made."""
        self._admitted += 1

    def on_resume(self) -> None:
        """It was part of the prefill just made."""
        self._admitted += 1

    def observe(self, view: View) -> None:
        """Note what the last step let in."""
        self._largest.step()
        if self._admitted:
            self._largest.attempt(self._admitted)
            self._admitted = 0

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether the prefill may be made now."""
        if not self._waits(view, idle):
            self._delayed = 0
            return True
        if self._first:
            self._first = False
            return True
        if not self._delayed:
            self._since_s = view.now_s
        self._delayed += 1
        self._largest.attempt(refill, held_back=True)
        if self._spec.passes and self._delayed >= self._spec.passes:
            self._delayed = 0
            return True
        return False

    def _waits(self, view: View, idle: int) -> bool:
        spec, largest = self._spec, self._largest.requests
        if 1.0 - view.free_blocks / self.engine.num_blocks < spec.usage:
            return False
        if idle < largest:
            return True
        wanted = min(int(spec.ratio * (view.decoding + view.prefilling)), largest)
        waited_s = view.now_s - self._since_s if self._delayed else 0.0
        return view.waiting < wanted and waited_s < spec.wait


POLICY = Delayer
