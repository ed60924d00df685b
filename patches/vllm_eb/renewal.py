"""The threshold for any distribution of answers, from the ages that requests have when a decode phase begins.

The correction of Zhang et al. (theorem 3.2) takes all requests of a phase for fresh ones. In a steady state only a
share ``theta`` is; the others were admitted 1, 2, ... phases ago. Let every phase last ``T`` decode steps and admit
``theta*N`` requests, and let ``S(a)`` be the share of answers that decode for more than ``a`` steps. Then
``theta*N*S(j*T)`` requests of the j-th last refill are left when a phase begins, and all of them fill the batch:

    theta * sum over j >= 0 of S(j*T) = 1

A cycle serves ``theta*N`` requests, whatever ``T`` is with their prompts and all their tokens, in
``alpha_p + alpha_d*T + (beta_p*mu_l + beta_d*mu_o)*theta*N`` seconds. So the best ``T`` makes
``(alpha_p + alpha_d*T) * sum of S(j*T)`` least: a request pays its share of the fixed costs once for each phase that it
decodes in. With a constant hazard this is proposition 3.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALUES_OF_T = 1024  # tried besides those at which answers end: every number up to about 100, then 1 in 100


def renewal_threshold(survival: NDArray[np.float64], alpha_p: float, alpha_d: float) -> float:
    """The best share of idle slots at which to refill, in (0, 1].

    ``survival[a]``: share of the answers longer than ``a`` tokens, not rising, 1 at 0; the first token comes with the
    prefill. ``alpha_p``, ``alpha_d``: fixed costs of a prefill and of a decode step in s.
    """
    steps = survival[1:]  # an answer of n tokens decodes for n - 1 steps
    if not len(steps) or steps[0] <= 0.0:
        return 1.0
    ends = 1 + np.flatnonzero(steps[1:] < steps[:-1])  # a phase that ends just before these answers do costs one more
    lasting = np.unique(np.concatenate([np.geomspace(1, len(steps), VALUES_OF_T).astype(np.int64), ends]))
    phases = np.array([steps[::phase_steps].sum() for phase_steps in lasting.tolist()]) / steps[0]
    best = int(np.argmin((alpha_p + alpha_d * lasting) * phases))
    return float(min(1.0 / phases[best], 1.0))
