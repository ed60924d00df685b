"""EB+: chooses between mixed and exclusive batches online (Zhang et al. 2026, 3.5, eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eb.calibration import Calibration
from vllm_eb.decisions import Mode
from vllm_eb.theory import Crossover, crossover

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

    def evaluate(self, *, mu_l: float, mu_o: float, theta0: float) -> Evaluation:
        """Decide the mode from the current estimates (tokens; share of N)."""
        if self.n_obs < self._min_active:
            return self._stay(None, f"fewer than {self._min_active} active sequences")
        sides = crossover(self._calibration, mu_l=mu_l, mu_o=mu_o, n_obs=self.n_obs, theta0=theta0)
        if self._cooldown > 0:
            self._cooldown -= 1
            return self._stay(sides, "cooldown after a switch")
        if self.mode == "mb" and sides.eb_wins(self._margin):
            return self._switch(sides, "eb", "mixing costs more than exclusive phases")
        if self.mode == "eb" and not sides.eb_wins(self._leave_below):
            return self._switch(sides, "mb", "exclusive phases do not gain the margin")
        return self._stay(sides, "within the margin" if abs(sides.advantage) <= abs(self._margin) else "mode confirmed")

    def _stay(self, sides: Crossover | None, reason: str) -> Evaluation:
        return Evaluation(sides, self.n_obs, self._margin, self.mode, False, reason)

    def _switch(self, sides: Crossover, mode: Mode, reason: str) -> Evaluation:
        self.mode, self._cooldown = mode, self._cooldown_evaluations
        return Evaluation(sides, self.n_obs, self._margin, mode, True, reason)
