"""Errors of the fluid approximation: table 8 of the EB paper (appendix B.3), measured against the exact chain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.devices.costs import published_calibration
from ebbench.devices.profiles import find_model, find_profile
from ebbench.errors import UsageError
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import GPUS, MAIN_MODEL, gpu_title
from ebbench.papers.table import PaperTable, Published, each, no_runs
from ebbench.runs.store import RunStore
from vllm_eb.calibration import Calibration
from vllm_eb.policies.deferred import DeferredModel, exact_chain
from vllm_eb.theory import base_threshold

# Table 8 of the EB paper (appendix B.3): the errors of the fluid approximation, measured against the exact chain.

BATCHES = (64, 256, 1024)
MEAN_INPUT, MEAN_OUTPUT = 512, 256  # tokens
PHASES = 4000  # simulated, for the fluctuation
_PRINTED = {
    "fluctuation": ("stochastic fluctuation", "N^-1/2, a few percent", "yes"),
    "discretisation": ("discretisation and overshoot", "bounded", "no"),
    "rounding": ("integer rounding", "1/N", "yes"),
    "continuous": ("continuous-time limit", "p0, below the first", "no, with p0"),
}
"""Printed orders by error of FluidErrors."""


@dataclass(frozen=True)
class FluidErrors:
    """Relative errors of a decode phase's time.

    ``fluctuation``: standard deviation of one phase's time. The others are errors of the expected time, one step of the
    approximation after the other. ``loss``: throughput at the paper's threshold relative to the exact chain's best one.
    """

    fluctuation: float
    discretisation: float
    rounding: float
    continuous: float
    loss: float

    @property
    def total(self) -> float:
        """All steps together: the closed form's expected time against the exact chain's."""
        return (1 + self.discretisation) * (1 + self.rounding) * (1 + self.continuous) - 1


def fluid_errors(cost: Calibration, batch: int, p0: float, mean_input: float) -> FluidErrors:
    """Errors at the threshold theta0 of Prop. 3.1, for geometric answers of hazard ``p0`` per iteration.

    From the exact chain (random completions, whole iterations, a whole number of slots) to its mean path that stops at
    any instant, then at any share of the batch, and with exp(-p0 t) in place of (1-p0)^t.
    """
    theta = base_threshold(p0, cost.alpha_p, cost.alpha_d)
    threshold = max(1, round(theta * batch))
    model = DeferredModel(batch, p0, cost.alpha_p, cost.alpha_d, cost.beta_d, cost.beta_p * mean_input)
    chain = exact_chain(model)
    at = threshold - 1
    exact_s = float(cost.alpha_d * chain.e_n1[at] + cost.beta_d * (batch - chain.e_x_s[at]) / p0)

    def path_s(share: float) -> float:
        return cost.alpha_d * math.log1p(-share) / math.log1p(-p0) + cost.beta_d * batch * share / p0

    closed_s = (cost.alpha_d * -math.log1p(-theta) + cost.beta_d * batch * theta) / p0
    steps_s = (exact_s, path_s(threshold / batch), path_s(theta), closed_s)
    discretisation, rounding, continuous = (after / before - 1 for before, after in pairwise(steps_s))
    phases_s = _phase_times(cost, batch, p0, threshold)
    loss = float(chain.throughput[at] / chain.throughput.max() - 1)
    fluctuation = float(phases_s.std() / phases_s.mean())
    return FluidErrors(fluctuation, discretisation, rounding, continuous, loss)


def _phase_times(cost: Calibration, batch: int, p0: float, threshold: int) -> NDArray[np.float64]:
    """Times (s) of simulated decode phases that end when ``threshold`` requests have ended."""
    draws = np.random.default_rng(0)
    running, spent_s = np.full(PHASES, batch), np.zeros(PHASES)
    while (decoding := running > batch - threshold).any():
        spent_s += np.where(decoding, cost.alpha_d + cost.beta_d * running, 0.0)
        running = np.where(decoding, running - draws.binomial(running, p0), running)
    return spent_s


def _section(options: PaperOptions, _store: RunStore, device: str) -> Section:
    model, p0 = options.model(), 1 / MEAN_OUTPUT
    cost = published_calibration(find_profile(device), find_model(model))
    if cost is None:
        raise UsageError(f"no linear costs of {model} on {device} are published, from which the errors would follow")
    by_batch = [fluid_errors(cost, batch, p0, MEAN_INPUT) for batch in BATCHES]
    columns = labels("source", "printed error", "vanishes as N grows")
    columns += tuple(Column(f"N = {batch:,}", "change", ours=True, show=_percent) for batch in BATCHES)
    rows: list[tuple[Value, ...]] = [
        (*printed, *(f"±{_percent(errors.fluctuation)[1:]}" if name == "fluctuation" else getattr(errors, name)
                     for errors in by_batch))
        for name, printed in _PRINTED.items()
    ]  # fmt: skip
    rows.append(("expected time, all together", "", "", *(errors.total for errors in by_batch)))
    rows.append(("requests/s lost", "", "", *(errors.loss for errors in by_batch)))
    theta = base_threshold(p0, cost.alpha_p, cost.alpha_d)
    return Section(f"{gpu_title(device)}, {model}: theta0 = {theta:.3f}", columns, tuple(rows))


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


TABLE8 = PaperTable(
    "table8", ("device", "model"), each(_section, lambda options: product(options.devices or GPUS)),
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)), facts=globals(), runs=no_runs,
)  # fmt: skip
