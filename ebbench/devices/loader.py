"""From two names to a Device: the best cost model there is, and what to know about it."""

from __future__ import annotations

from ebbench.devices.base import CostModel, Device
from ebbench.devices.fit import fit_calibration
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.linear import SOURCE, LinearCost, published_calibration
from ebbench.devices.profiles import (
    DeviceProfile,
    HostCosts,
    find_model,
    find_profile,
    kv_capacity_tokens,
)
from ebbench.devices.roofline import roofline_cost
from ebbench.devices.table import table_cost
from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.calibration import Calibration

COSTS = ("auto", "table", "linear", "roofline")
DEFAULT_HOST = HostCosts(step_s=2e-3, sequence_s=10e-6)


def load_device(
    name: str,
    model: str,
    *,
    cost: str = "auto",
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    eager: bool = False,
) -> Device:
    """A GPU holding a model. ``cost`` is auto (the best there is), table, linear or roofline.

    ``eager`` is a server without CUDA graphs. The other settings only size the KV
    cache; None is the profile's own value.

    Raises UnknownNameError for an unknown device, model or cost, UsageError when the model does not fit or
    the cost model asked for does not exist for this pair.
    """
    if cost not in COSTS:
        raise UnknownNameError("cost model", cost, COSTS)
    profile, geometry = find_profile(name), find_model(model)
    capacity = kv_capacity_tokens(
        profile,
        geometry,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    published = published_calibration(profile, geometry)
    model_cost, provenance, warnings = _cost(cost, profile, geometry, published, eager)
    return Device(
        name=profile.name,
        model=geometry.name,
        cost=model_cost,
        kv_capacity_tokens=capacity,
        calibration=published or fit_calibration(model_cost, provenance, profile.margin_s_per_token),
        provenance=provenance,
        warnings=warnings,
    )


def _cost(
    wanted: str, profile: DeviceProfile, model: ModelGeometry, published: Calibration | None, eager: bool
) -> tuple[CostModel, str, tuple[str, ...]]:
    host = profile.host.get(model.name) or profile.host.get("default") or DEFAULT_HOST
    if wanted in ("auto", "table"):
        built = table_cost(profile, model, host, eager=eager)
        if built is not None:
            return built
    if wanted == "table":
        raise UsageError(f"no kernel tables for {profile.name}; use --cost auto")
    if wanted in ("auto", "linear") and published is not None:
        return _linear(profile, model, published)
    if wanted == "linear":
        raise UsageError(
            f"no published linear calibration of {model.name} on {profile.name}; use --cost roofline or auto"
        )
    text = f"roofline of {profile.gpu}: {profile.provenance}"
    warning = (
        f"{model.name} on {profile.name} was never profiled: step times come from data-sheet bandwidth and "
        "arithmetic rates (roofline), trust them to a factor, not to a percent"
    )
    return roofline_cost(profile, model, host), text, (warning,)


def _linear(
    profile: DeviceProfile, model: ModelGeometry, calibration: Calibration
) -> tuple[CostModel, str, tuple[str, ...]]:
    warnings: tuple[str, ...] = (
        "linear cost model: step time does not grow with context length; good for the controller, coarse for a device",
    )
    if calibration.mixed is None:
        warnings += (
            f"the mixed-batch cost of {model.name} on {profile.name} is not published: a mixed step is taken "
            "to cost the sum of its parts, which flatters mixed batching (v1)",
        )
    return LinearCost(calibration), f"linear coefficients: {SOURCE}", warnings
