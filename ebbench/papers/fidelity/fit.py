"""Fits a device's three free constants on the rows of table 3 at c = 32 and 512 only.

Gauss-Newton on the logarithms of throughput and TPOT of v1 and EB: host time per step, host time per sequence, scale of
the mixed-attention excess. EB's row at c = 32 is not used: its TTFT is that of a refill at every free slot, which no
threshold of the published rule gives.

EB's TPOT is used too: its decode steps contain no prompts, so they separate the host time per sequence from the mixed
excess, which v1's rows alone cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ebbench.papers.fidelity.case import FIT_ROWS, Case
from ebbench.papers.fidelity.cases import table3
from ebbench.papers.fidelity.runs import Say, run_cases
from ebbench.spec.host import HostCosts

Array = npt.NDArray[np.float64]

START = np.array([1.0, 10.0, 1.0])  # ms, us, 1
STEP = np.array([0.2, 2.0, 0.1])
ROUNDS = 4


def fit_host(device: str, say: Say, seed: int = 0) -> HostCosts:
    """The fitted constants of one device, from Qwen3-8B's rows."""
    cases = [case for case in table3() if case.device == device and _used(case)]

    def residuals(x: Array) -> Array:
        cells = run_cases(cases, seed, lambda _: None, _host(x))
        chosen = [cell for cell in cells if cell.metric in ("tokens_per_s", "tpot_mean_ms")]
        return np.log([cell.ours / cell.published for cell in chosen])

    return _host(_gauss_newton(residuals, say))


def _used(case: Case) -> bool:
    return case.name in FIT_ROWS and (case.scheduler == "v1" or (case.scheduler == "eb" and case.name == "c=512"))


def _host(x: Array) -> HostCosts:
    step_ms, sequence_us, excess = (float(v) for v in np.round(x, 2))
    source = "fitted on table 3 of Zhang et al. (ICML 2026), rows c = 32 and c = 512, Qwen3-8B"
    return HostCosts(step_ms * 1e-3, sequence_us * 1e-6, excess, source)


def _gauss_newton(residuals: Callable[[Array], Array], say: Say) -> Array:
    x = START.copy()
    best, at = np.inf, x
    for round_number in range(ROUNDS):
        here = residuals(x)
        norm = float(np.sqrt(np.mean(here**2)))
        say(f"round {round_number}: {np.round(x, 3).tolist()}, rms error {norm:.2%}")
        if norm < best:
            best, at = norm, x.copy()
        slopes = np.array([(residuals(x + STEP * unit) - here) / (STEP * unit).sum() for unit in np.eye(3)]).T
        move, *_ = np.linalg.lstsq(slopes, -here, rcond=None)
        x = np.maximum(x + move, 0.0)
    return at
