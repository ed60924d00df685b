"""EB+: mixed or exclusive batches, chosen online at the predicted crossover (Zhang et al. 2026, 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_eb.adaptive import EstimatingSpec
from vllm_eb.decisions import View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode, ModeSelector
from vllm_eb.policies.eb import OnlineThreshold
from vllm_eb.policy import setting
from vllm_eb.strategy import Change, EngineFacts, Strategy, Values


@dataclass(frozen=True, kw_only=True)
class EbPlus(EstimatingSpec):
    """It leaves exclusive batches when they lag by ``sticky`` margins (-1 and a negative margin: at every chance)."""

    description = "switches online between mixed and exclusive batches at the predicted crossover"
    colour = "#009E73"
    departure = 20

    margin: float | None = setting(
        None, "EB+'s lead in s/token before it changes mode; the device's published value if not given", unit="s/token"
    )
    sticky: float = setting(3.0, "margins that exclusive batches must lag by before EB+ leaves them")

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """Algorithm 1 and a choice of mode after each of its passes."""
        return Switching(self, engine, lengths)


class Switching(OnlineThreshold):
    """As EB while exclusive batches are ahead, as vLLM while mixed ones are; mixed at the start."""

    mode: Mode = "mb"

    def __init__(self, spec: EbPlus, engine: EngineFacts, lengths: Lengths) -> None:
        super().__init__(spec, engine, lengths)
        self._selector = ModeSelector(engine.calibration, spec.margin, spec.sticky, engine.max_num_seqs)

    @property
    def facts(self) -> Values:
        """The base threshold and the smoothed batch."""
        return {**super().facts, "n_obs": self._selector.n_obs}

    def observe(self, view: View) -> None:
        """Take the batch of this step."""
        self._selector.observe(view.decoding + view.prefilling)

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Algorithm 1, then both sides of the crossover."""
        changes = super().update(view, running_ages)
        lengths = self.lengths
        found = self._selector.evaluate(mu_l=lengths.mu_l, mu_o=lengths.mu_o, theta0=self._adaptive.theta0)
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
