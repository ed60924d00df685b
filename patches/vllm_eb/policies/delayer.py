"""SGLang's prefill delayer: exclusive batches whose prefill waits until enough slots for a usual batch are free.

SGLang computes prompts in steps without decodes, and before decodes. Its prefill delayer
(``--enable-prefill-delayer``, managers/prefill_delayer.py; here the part of the rule for one engine) delays a prefill
while

- fewer slots are free than the recent largest prefill had requests (slot condition), or
- with ``ratio``: fewer requests wait than ``min(ratio * running, largest prefill)`` (queue condition), for at most
  ``wait`` seconds.

The first time that a condition holds, the prefill is not delayed. Neither is it while the used share of the KV cache is
below ``usage``, nor after ``passes`` decode steps of delay.

SGLang has defined the recent largest prefill in three ways. ``watermark=lifetime``, the first: the largest ever. One
large batch, such as after a pause, raised it permanently, and with ``passes=0`` (no limit, as at that time) waiting
requests starved while slots were free. ``decay``: the same, lowered by 0.2 % per scheduling pass, which lowers small
values to 0. ``window``, the present one and the default here: the largest of the last 16 attempts, where a prefill
counts with its requests, and a delayed one with those that it would have had.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from vllm_eb.policy import PolicyError, PolicySpec, setting
from vllm_eb.strategy import EngineFacts, Lengths, Strategy, View

ATTEMPTS = 16
DECAY = 0.998


@dataclass(frozen=True, kw_only=True)
class Delayer(PolicySpec):
    """Settings have SGLang's defaults; ``usage`` and ``ratio`` are off by default."""

    description = "exclusive batches, a prefill waits for slots for a batch of the usual size (SGLang's delayer)"

    passes: int = setting(
        30, "most steps that a prefill is delayed; 0: no limit", unit="steps", at_least=0,
        published="prefill_delayer_max_delay_passes",
    )  # fmt: skip
    watermark: Literal["window", "decay", "lifetime"] = setting(
        "window", "largest prefill of the last 16 attempts, ever with decay, or ever (SGLang's first definition)"
    )
    usage: float = setting(
        0.0, "used share of the KV cache below which no prefill is delayed", unit="share", at_least=0, at_most=1,
        published="prefill_delayer_token_usage_low_watermark",
    )  # fmt: skip
    ratio: float = setting(0.0, "waiting requests needed per running one; 0: not checked", unit="share", at_least=0)
    wait: float = setting(5.0, "longest delay by ratio", unit="s", above=0)

    def check(self) -> None:
        """Raise PolicyError for ``wait`` without ``ratio``: it limits only delays by ratio."""
        if "wait" in self.given() and not self.ratio:
            raise PolicyError("policy delayer: wait= limits the delay by ratio=; give that too, e.g. ratio=0.5")

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """v0 with delayed prefills."""
        return DelayedPrefill(self, engine, lengths)


class LargestPrefill:
    """Number of requests of the recent largest prefill; ``form``: how it is defined (see the module)."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._attempts: deque[int] = deque(maxlen=ATTEMPTS)
        self._largest = 0.0

    def attempt(self, requests: int, *, delayed: bool = False) -> None:
        """Record a prefill of ``requests`` requests, or one that was delayed."""
        self._attempts.append(requests)
        if not delayed:
            self._largest = max(self._largest, requests)

    def step(self) -> None:
        """Record a scheduling pass."""
        if self._form == "decay":
            self._largest *= DECAY

    @property
    def requests(self) -> int:
        """Number of requests, by the chosen definition."""
        return max(self._attempts, default=0) if self._form == "window" else int(self._largest)


class DelayedPrefill(Strategy):
    """Decides before each refill of exclusive batches whether to delay it."""

    def __init__(self, spec: Delayer, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths)
        self._spec = spec
        self._largest = LargestPrefill(spec.watermark)
        self._admitted = 0  # by the previous step
        self._delayed, self._since_s = 0, 0.0
        self._first = True

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Count an admission of the last prefill."""
        self._admitted += 1

    def on_resume(self) -> None:
        """Count an admission of the last prefill."""
        self._admitted += 1

    def observe(self, view: View) -> None:
        """Record the admissions of the last step."""
        self._largest.step()
        if self._admitted:
            self._largest.attempt(self._admitted)
            self._admitted = 0

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether the prefill is not delayed."""
        if not self._waits(view, idle):
            self._delayed = 0
            return True
        if self._first:
            self._first = False
            return True
        if not self._delayed:
            self._since_s = view.now_s
        self._delayed += 1
        self._largest.attempt(refill, delayed=True)
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
