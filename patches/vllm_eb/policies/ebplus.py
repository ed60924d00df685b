"""EB+: mixed or exclusive batches, chosen online at the predicted crossover (Zhang et al. 2026, 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_eb.adaptive import EstimatingSpec
from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.decisions import Mode
from vllm_eb.modes import ModeSelector
from vllm_eb.policies.eb import OnlineThreshold
from vllm_eb.policy import setting
from vllm_eb.strategy import Change, EngineFacts, Strategy, Values

MOST_ACTIVE = 65_536
MOST_UPDATES = 1_000


@dataclass(frozen=True, kw_only=True)
class EbPlus(EstimatingSpec):
    """Equation 8 decides, at each update of Algorithm 1. ``sticky``, ``min_active`` and ``cooldown`` are additions of
    this project that make EB+ change less often; by default they do nothing."""

    description = "switches online between mixed and exclusive batches at the predicted crossover"
    colour = "#009E73"
    departure = 20

    margin: float | None = setting(
        None, "advantage in s/token at which EB+ changes mode; default: the device's published value", unit="s/token"
    )
    sticky: float | None = setting(
        None, "ours: margins that exclusive batches must be behind before EB+ leaves them; default: eq. 8 both ways",
        unit="margins",
    )  # fmt: skip
    min_active: int = setting(
        1, "ours: active sequences (smoothed) below which EB+ keeps its mode", unit="sequences", at_least=1,
        at_most=MOST_ACTIVE,
    )  # fmt: skip
    cooldown: int = setting(
        0, "ours: updates after a change of mode during which EB+ keeps it", unit="updates", at_least=0,
        at_most=MOST_UPDATES,
    )  # fmt: skip
    crossover_theta: Literal["base", "used"] = setting(
        "base", "threshold of the crossover: base (paper: theta0) or used (published code: smoothed, within its bounds)"
    )

    def load_warning(self, open_at_most: int, max_num_seqs: int) -> tuple[str, str, str] | None:
        """With fewer sequences than it asks for it stays as it began: mixed."""
        most = min(open_at_most, max_num_seqs) if open_at_most else max_num_seqs
        if most >= self.min_active:
            return None
        return (
            "never-active-enough",
            f"At most {most:,} sequences are active, so with min_active={self.min_active} EB+ never chooses and stays "
            "in mixed batches, as v1.",
            f"Use min_active={most} or less, or more open requests.",
        )

    @classmethod
    def candidates(cls, targets_s: Mapping[str, float]) -> tuple[str, ...]:
        """With its defaults."""
        return (cls.kind,)

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Algorithm 1, followed by a choice of mode after each update."""
        return Switching(self, engine, lengths)


class Switching(OnlineThreshold):
    """EB while exclusive batches are ahead, vLLM's rules while mixed ones are; starts mixed."""

    mode: Mode = "mb"

    def __init__(self, spec: EbPlus, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(spec, engine, lengths)
        self._crossover_theta = spec.crossover_theta
        self._selector = ModeSelector(
            engine.calibration, spec.margin, engine.max_num_seqs,
            sticky=spec.sticky, min_active=spec.min_active, cooldown=spec.cooldown,
        )  # fmt: skip

    @property
    def facts(self) -> Values:
        """``theta0``, the base threshold, and ``n_obs``, the smoothed batch size."""
        return {**super().facts, "n_obs": self._selector.n_obs}

    def observe(self, view: View) -> None:
        """Record the batch size of this step."""
        self._selector.observe(view.decoding + view.prefilling)

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Run Algorithm 1, then compare both sides of the crossover."""
        changes = super().update(view, running_ages)
        lengths = self.lengths
        theta = self._adaptive.theta0 if self._crossover_theta == "base" else self._adaptive.theta
        found = self._selector.evaluate(mu_l=lengths.mu_l, mu_o=lengths.mu_o, theta0=theta)
        values: dict[str, float | int | None] = {"margin": found.margin}
        if found.crossover is not None:
            sides = found.crossover
            values |= {
                "lhs": sides.lhs,
                "rhs": sides.rhs,
                "r": sides.r,
                "beta_mb": sides.beta_mb,
                "beta_eb": sides.beta_eb,
            }
        return (*changes, Change("mode", found.reason, values, found.mode if found.switched else None))


POLICY = EbPlus
