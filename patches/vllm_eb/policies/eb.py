"""Exclusive batching with the threshold of Zhang et al. (ICML 2026), computed online by Algorithm 1 or fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_eb.adaptive import AdaptiveThreshold, EstimatingSpec, Update
from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.policy import PolicyError, setting, settings_of
from vllm_eb.strategy import Change, EngineFacts, Strategy, Values

# Settings that have an effect with a fixed threshold, too; the KV gate depends on output lengths.
USED_WHEN_FIXED = ("update_every", "kv_gate", "order")


@dataclass(frozen=True, kw_only=True)
class Eb(EstimatingSpec):
    """``k`` and ``theta`` fix the threshold (slots, share of N); without them it is computed online."""

    description = "exclusive batches, k* and N* computed online (Zhang et al., ICML 2026); k= or theta= fixes it"
    colour = "#D55E00"
    departure = 40

    k: int | None = setting(None, "idle slots at which to refill; fixes the threshold", unit="slots", at_least=1)
    theta: float | None = setting(
        None, "share of N idle at which to refill; fixes the threshold", unit="share", above=0, below=1
    )

    @property
    def adapts(self) -> bool:
        """Unless k or theta is fixed."""
        return self.k is None and self.theta is None

    def check(self) -> None:
        """Raise PolicyError if both k and theta are given."""
        if self.k is not None and self.theta is not None:
            raise PolicyError("give k or theta, not both")

    def ineffective_settings(self) -> Mapping[str, str]:
        """With a fixed threshold the settings of the estimator have no effect."""
        idle = dict(super().ineffective_settings())
        fixed = next((key for key in ("k", "theta") if getattr(self, key) is not None), None)
        if fixed is not None:
            others = {*settings_of(type(self))} - {fixed, *USED_WHEN_FIXED}
            idle |= dict.fromkeys(others, f"{fixed}={getattr(self, fixed)}")
        return idle

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """With its defaults."""
        return (cls.kind,)

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """The online threshold, or a fixed one."""
        if self.k is not None:
            return FixedThreshold(engine, lengths, self.kv_gate, slots=min(self.k, engine.max_num_seqs))
        if self.theta is not None:
            slots = max(1, int(self.theta * engine.max_num_seqs))
            return FixedThreshold(engine, lengths, self.kv_gate, slots=slots, theta=self.theta)
        return OnlineThreshold(self, engine, lengths)


class ShareThreshold(Strategy):
    """Refills when the requests that could join are at least theta/(1 - theta) times those decoding, with theta = k/N.

    This equals k idle slots, and also applies if the queue is short.
    """

    def __init__(self, engine: EngineFacts, lengths: Lengths, gated: bool) -> None:
        super().__init__(engine, lengths)
        self.gated = gated

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether enough requests could join."""
        slots = self.slots or 1
        return refill * (self.seqs_allowed - slots) >= slots * view.decoding


class FixedThreshold(ShareThreshold):
    """A fixed threshold: ``slots`` of max_num_seqs, or the share ``theta`` of them."""

    def __init__(
        self, engine: EngineFacts, lengths: Lengths, gated: bool, *, slots: int, theta: float | None = None
    ) -> None:
        super().__init__(engine, lengths, gated)
        self._slots, self._theta = slots, slots / engine.max_num_seqs if theta is None else theta

    @property
    def slots(self) -> int:
        """The threshold k."""
        return self._slots

    @property
    def theta(self) -> float:
        """The given share, or k/N."""
        return self._theta


class OnlineThreshold(ShareThreshold):
    """Threshold and batch size from Algorithm 1."""

    def __init__(self, spec: EstimatingSpec, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(engine, lengths, spec.kv_gate)
        self._adaptive = AdaptiveThreshold(
            spec, engine.calibration, lengths, engine.max_num_seqs, engine.capacity_tokens
        )

    @property
    def seqs_allowed(self) -> int:
        """N, the memory-safe batch."""
        return self._adaptive.n_limit

    @property
    def slots(self) -> int:
        """The threshold k."""
        adaptive = self._adaptive
        return max(1, int(adaptive.theta * adaptive.n_limit))

    @property
    def theta(self) -> float:
        """The estimated share."""
        return self._adaptive.theta

    @property
    def facts(self) -> Values:
        """``theta0``, the base threshold."""
        return {"theta0": self._adaptive.theta0}

    def on_finish(self, output_tokens: int) -> None:
        """Record an output length for the hazard estimate."""
        self._adaptive.on_finish(output_tokens)

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Run Algorithm 1 if there are enough samples."""
        update = self._adaptive.update(view.now_s, running_ages)
        return () if update is None else (Change("update", "Algorithm 1", _values(update)),)


def _values(update: Update) -> Values:
    return {
        "p0": update.estimate.p0,
        "eta": update.estimate.eta,
        "samples": update.estimate.samples,
        "zeta": update.zeta,
        "delta_theta": update.delta_theta,
    }


POLICY = Eb
