"""From two names to a Device: the best cost model there is, and what to know about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ebbench.devices.base import CostModel, Device
from ebbench.devices.fit import cost_grid, fit_calibration
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.gridcost import GridCost, measured_calibration
from ebbench.devices.linear import SOURCE, LinearCost, published_calibration
from ebbench.devices.profiles import DeviceProfile, HostCosts, find_model, find_profile, kv_capacity_tokens
from ebbench.devices.roofline import roofline_cost
from ebbench.devices.table import TableCost, table_cost
from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.calibration import Calibration

COSTS = ("auto", "table", "linear", "roofline")
DEFAULT_HOST = HostCosts(step_s=2e-3, sequence_s=10e-6)
EAGER_UNKNOWN = "--enforce-eager changes nothing here: only kernel tables know what CUDA graphs save"


class Serving(NamedTuple):
    """How the server runs: host work beside the GPU's or before it, CUDA graphs or not."""

    overlap: bool
    eager: bool


class Built(NamedTuple):
    """A cost model, where it comes from, and what to know about it."""

    cost: CostModel
    provenance: str
    warnings: tuple[str, ...]


def load_device(
    name: str,
    model: str,
    *,
    cost: str = "auto",
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    async_scheduling: bool = True,
    eager: bool = False,
    host: HostCosts | None = None,
) -> Device:
    """A GPU holding a model. ``cost`` is auto (the best there is), table, linear or roofline.

    ``async_scheduling`` is vLLM's (default since 0.14): host work runs beside the GPU's. ``eager`` is a server
    without CUDA graphs. ``host`` replaces the profile's constants. The other settings only size the KV cache;
    None is the profile's own value.

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
    measured = _measured(profile, model, geometry)
    published = measured or published_calibration(profile, geometry)
    constants = host or profile.host.get(geometry.name) or profile.host.get("default") or DEFAULT_HOST
    built = (
        _grid(profile, measured, profile.host.get(geometry.name))
        if measured is not None and cost == "auto"
        else _build(cost, profile, geometry, published, constants, Serving(async_scheduling, eager))
    )
    if eager and not isinstance(built.cost, TableCost):
        built = built._replace(warnings=(*built.warnings, EAGER_UNKNOWN))
    return Device(
        name=profile.name,
        model=geometry.name,
        cost=built.cost,
        kv_capacity_tokens=capacity,
        calibration=measured or _calibration(built, published, profile.margin_s_per_token),
        provenance=built.provenance,
        warnings=built.warnings,
        profile=profile,
        geometry=geometry,
    )


def _measured(profile: DeviceProfile, model: str, geometry: ModelGeometry) -> Calibration | None:
    """The calibration measured on this device for this model, if the profile names one."""
    for name in (model, geometry.name, geometry.hf_id):
        if name in profile.measured:
            return measured_calibration(Path(profile.measured[name]))
    return None


def _grid(profile: DeviceProfile, calibration: Calibration, host: HostCosts | None) -> Built:
    assert calibration.grid is not None  # measured_calibration refuses one without
    cost = GridCost.measured(calibration.grid, host.request_s if host is not None else 0.0)
    return Built(cost, f"step times measured: {calibration.source or profile.provenance}", ())


def _build(
    wanted: str,
    profile: DeviceProfile,
    model: ModelGeometry,
    published: Calibration | None,
    host: HostCosts,
    serving: Serving,
) -> Built:
    if wanted in ("auto", "table"):
        tables = table_cost(profile, model, host, overlap=serving.overlap, eager=serving.eager)
        if tables is not None:
            return Built(*tables)
        if wanted == "table":
            raise UsageError(f"no kernel tables for {profile.name}; use cost auto, which takes the next best model")
    if wanted in ("auto", "linear") and published is not None:
        return _linear(profile, model, published)
    if wanted == "linear":
        raise UsageError(
            f"no linear calibration of {model.name} on {profile.name} is published; use cost auto or roofline"
        )
    return _roofline(profile, model, host)


def _calibration(built: Built, published: Calibration | None, margin: float) -> Calibration:
    """What the controller believes: the published coefficients, completed or replaced by a fit to the cost model."""
    grid = cost_grid(built.cost)
    fitted = fit_calibration(built.cost, f"fitted to the {built.provenance}", margin)
    if published is None:
        return replace(fitted, grid=grid)
    if published.mixed is None and fitted.mixed is not None and not isinstance(built.cost, LinearCost):
        source = f"{published.source}; beta_mb(r) {fitted.source}"
        return replace(published, mixed=fitted.mixed, source=source, grid=grid)
    return replace(published, grid=grid)


def _linear(profile: DeviceProfile, model: ModelGeometry, calibration: Calibration) -> Built:
    warnings: tuple[str, ...] = (
        "linear cost model: step time does not grow with context length; good for the controller, coarse for a device",
    )
    if calibration.mixed is None:
        warnings += (
            f"the mixed-batch cost of {model.name} on {profile.name} is not published: a mixed step is taken "
            "to cost the sum of its parts, which flatters mixed batching (v1)",
        )
    return Built(LinearCost(calibration), f"linear coefficients: {SOURCE}", warnings)


def _roofline(profile: DeviceProfile, model: ModelGeometry, host: HostCosts) -> Built:
    warning = (
        f"{model.name} on {profile.name}: step times come from data-sheet bandwidth and arithmetic rates "
        "(roofline); trust them to a factor, not to a percent"
    )
    return Built(roofline_cost(profile, model, host), f"roofline of {profile.gpu}: {profile.provenance}", (warning,))
