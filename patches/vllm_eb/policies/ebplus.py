"""EB+: mixed or exclusive batches, chosen online at the predicted crossover (Zhang et al. 2026, 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_eb.calibration import Calibration
from vllm_eb.policies.eb import EstimatingSpec, OnlineThreshold
from vllm_eb.policy import setting
from vllm_eb.strategy import Change, EngineFacts, Lengths, Mode, Strategy, Values, View
from vllm_eb.theory import NO_DRAFTS, Crossover, Drafts, crossover

# The paper smooths N_obs and names no weight. Ours: a filling batch counts quickly and a draining one slowly, so that
# the dip at the end of each decode phase does not look like light traffic.
RISE_WEIGHT, FALL_WEIGHT = 0.3, 0.05


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the crossover: both sides, the required margin and the result."""

    crossover: Crossover | None
    n_obs: float
    margin: float
    mode: Mode
    switched: bool
    reason: str


class ModeSelector:
    """Mode and smoothed batch size: exclusive where eq. 8 holds, mixed everywhere else.

    ``margin``: delta of eq. 8 in s/token, None for the device's. The others are additions of this project, without
    effect by default: ``sticky`` (margins by which exclusive batches must be behind to be left), ``min_active``
    (sequences below which the mode stays) and ``cooldown`` (evaluations after a change during which the mode stays).
    """

    def __init__(
        self,
        calibration: Calibration,
        margin: float | None,
        max_num_seqs: int,
        *,
        sticky: float | None = None,
        min_active: int = 1,
        cooldown: int = 0,
    ) -> None:
        self._calibration = calibration
        self._margin = calibration.margin if margin is None else margin
        self._leave_below = self._margin if sticky is None else -sticky * abs(self._margin)
        self._min_active, self._cooldown_evaluations = min_active, cooldown
        self.mode: Mode = "mb"
        self.n_obs = float(max_num_seqs)
        self._cooldown = 0

    def observe(self, active_seqs: int) -> None:
        """Record the number of sequences in the batch, once per scheduled step."""
        weight = RISE_WEIGHT if active_seqs > self.n_obs else FALL_WEIGHT
        self.n_obs += weight * (active_seqs - self.n_obs)

    def evaluate(self, *, mu_l: float, mu_o: float, theta0: float, drafts: Drafts = NO_DRAFTS) -> Evaluation:
        """Decide the mode from the current estimates (tokens; share of N)."""
        if self.n_obs < self._min_active:
            return self._stay(None, "too_few_active")
        sides = crossover(self._calibration, mu_l=mu_l, mu_o=mu_o, n_obs=self.n_obs, theta0=theta0, drafts=drafts)
        if self._cooldown > 0:
            self._cooldown -= 1
            return self._stay(sides, "cooldown")
        if self.mode == "mb" and sides.eb_wins(self._margin):
            return self._switch(sides, "eb", "mixing_costs_more")
        if self.mode == "eb" and not sides.eb_wins(self._leave_below):
            return self._switch(sides, "mb", "exclusive_gains_too_little")
        return self._stay(sides, "within_margin" if abs(sides.advantage) <= abs(self._margin) else "mode_confirmed")

    def _stay(self, sides: Crossover | None, reason: str) -> Evaluation:
        return Evaluation(sides, self.n_obs, self._margin, self.mode, False, reason)

    def _switch(self, sides: Crossover, mode: Mode, reason: str) -> Evaluation:
        self.mode, self._cooldown = mode, self._cooldown_evaluations
        return Evaluation(sides, self.n_obs, self._margin, mode, True, reason)


MOST_ACTIVE = 65_536
MOST_UPDATES = 1_000


@dataclass(frozen=True, kw_only=True)
class EbPlus(EstimatingSpec):
    """Equation 8 decides, at each update of Algorithm 1. ``sticky``, ``min_active`` and ``cooldown`` are additions of
    this project that make EB+ change less often; by default they do nothing."""

    description = "switches online between mixed and exclusive batches at the predicted crossover"

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

    def load_doubt(self, open_at_most: int, max_num_seqs: int) -> tuple[str, Values] | None:
        """Doubt about a load of fewer sequences than ``min_active``: EB+ then stays mixed, as it begins."""
        most = min(open_at_most, max_num_seqs) if open_at_most else max_num_seqs
        if most >= self.min_active:
            return None
        return "never-active-enough", {"active": most, "min_active": self.min_active}

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
        evaluated = self._selector.evaluate(mu_l=lengths.mu_l, mu_o=lengths.mu_o, theta0=theta, drafts=lengths.drafts)
        values: dict[str, float | int | None] = {"margin": evaluated.margin}
        if evaluated.crossover is not None:
            sides = evaluated.crossover
            values |= {
                "lhs": sides.lhs,
                "rhs": sides.rhs,
                "r": sides.r,
                "beta_mb": sides.beta_mb,
                "beta_eb": sides.beta_eb,
            }
        return (*changes, Change("mode", evaluated.reason, values, evaluated.mode if evaluated.switched else None))


POLICY = EbPlus
