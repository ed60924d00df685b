"""A device with the refill cost that the paper's threshold tables imply.

Table 11 of the EB paper (tokens/s over k at N = 128) shows the cost of a refill in the runs behind its appendix E: at k
= 8 the server spends most of its time on something that happens once per refill. Fitted with the paper's own linear
coefficients, that is 0.14 s (root mean square error of 7 to 10 % over the 16 points of each column), a hundred times
the published alpha_p of 1.3 ms on H200. With it Prop. 3.1 gives thresholds of 0.2 to 0.5, as table 10 finds; with the
published alpha_p it gives 0.03 to 0.07. We do not know the cause. The tables of appendix E are therefore shown for both
costs.
"""

from __future__ import annotations

from functools import cache

from ebbench.devices.linear import GIVEN

REFILL_S = 0.14


@cache
def slow_refill(device: str, model: str) -> str:
    """The device's linear costs (published ones if available) with REFILL_S as ``alpha_p``, for a Cell."""
    from ebbench.devices import load_device

    loaded = load_device(device, model)
    costs = loaded.calibration
    values = (REFILL_S, costs.beta_p, costs.alpha_d, costs.beta_d)
    return GIVEN + ",".join(f"{value:.6g}" for value in values) + f",{loaded.kv_capacity_tokens}"
