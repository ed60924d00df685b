"""Time of one layer's fused experts by token count, on one GPU or divided among several."""

from __future__ import annotations

import numpy as np

from ebbench.devices import library
from ebbench.devices.attention import Array
from ebbench.devices.geometry import WEIGHT_BITS, ModelGeometry
from ebbench.devices.kerneltables import select
from ebbench.devices.parallel import Parallel
from ebbench.devices.profiles import DeviceProfile
from ebbench.devices.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE

US = 1e-6
_TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536], dtype=float)


def expert_times(
    profile: DeviceProfile, model: ModelGeometry, shape: Parallel
) -> tuple[tuple[Array, Array], tuple[str, ...], tuple[library.Note, ...]]:
    """(token counts, seconds) of one GPU's experts, warnings, and what was taken from the library.

    Tokens are those of all GPUs of the engine.
    With ``ep`` each GPU computes its own experts for the tokens of all GPUs; otherwise its slice of every expert.
    Sources in order of preference: the table of this shape and division; the library's; the table of one
    GPU, divided except for its fixed part; the roofline of the experts used.
    """
    tp, ep = (1, shape.ep) if shape.ep > 1 else (shape.tp, 1)
    found = _measured(profile, model, model.dtype_of_experts, tp, ep)
    if found is not None:
        return found, (), ()
    if (curve := library.experts(profile, model, tp, ep)) is not None:
        return (curve.points, curve.times), (), ((f"experts of {model.name}", curve.origin),)
    parts = tp * ep
    whole = _measured(profile, model, model.dtype_of_experts, 1, 1)
    if whole is not None:
        tokens, times = whole
        fixed = float(times.min())
        warning = (
            f"experts of {model.name} divided among {parts} {profile.name} were not measured: those of one GPU, all "
            f"but their fixed part divided by {parts}"
        )
        return (tokens, fixed + (times - fixed) / parts), (warning, *library.hint(profile)), ()
    warning = f"experts of {model.name} were not profiled on {profile.name}: their time is a roofline estimate"
    return (_TOKENS, _roofline(profile, model) / parts), (warning, *library.hint(profile)), ()


def _measured(profile: DeviceProfile, model: ModelGeometry, dtype: str, tp: int, ep: int) -> tuple[Array, Array] | None:
    table = select(
        "moe",
        device=profile.name,
        dtype=dtype,
        hidden=model.hidden,
        expert_intermediate=model.expert_intermediate,
        experts=model.experts,
        experts_per_token=model.experts_per_token,
        tp=tp,
        ep=ep,
    ).to_pydict()
    if not table["tokens"]:
        return None
    order = np.argsort(table["tokens"])
    return np.array(table["tokens"], dtype=float)[order], np.array(table["time_us"], dtype=float)[order] * US


def _roofline(profile: DeviceProfile, model: ModelGeometry) -> Array:
    share = model.experts_per_token / model.experts
    expert_bytes = model.expert_params * WEIGHT_BITS[model.dtype_of_experts] / 8
    touched = model.experts * (1.0 - (1.0 - share) ** _TOKENS) * expert_bytes
    work = 2.0 * _TOKENS * model.experts_per_token * model.expert_params
    return np.maximum(
        touched / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE),
        work / (profile.bf16_flops_per_s * COMPUTE_SHARE),
    )
