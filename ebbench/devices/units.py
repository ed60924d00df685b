"""A unit of several GPUs as a single device: its step times, KV capacity and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.collectives import choose_link
from ebbench.devices.loader import load, resized
from ebbench.devices.parallel import Parallel
from ebbench.devices.request import DeviceRequest
from ebbench.errors import UsageError


@dataclass(frozen=True)
class UnitDevice:
    """One unit: its ``device`` (cost and KV capacity of all its GPUs) and the data for KV transfers.

    ``spare_bytes``: memory of its GPUs that the engine may not use. ``link_bytes_per_s``: None if the device's profile
    has no link.
    """

    device: Device
    spare_bytes: float
    link_bytes_per_s: float | None
    kv_bytes_per_token: int | None


def unit_device(
    device: Device, pool: PoolSpec, default_utilization: float | None, max_num_seqs: int, budget: int, link: str = ""
) -> UnitDevice:
    """The unit of ``pool`` on GPUs like ``device``, connected by ``link`` ("" is the device's default link).

    ``default_utilization``: the share of memory where neither the pool nor the user states one; None: that of vLLM's
    version. Raises UsageError for an unsupported shape. A device made by hand represents a whole unit of any number of
    GPUs.
    """
    request, profile, model = device.request, device.profile, device.geometry
    if request is None or profile is None or model is None:
        return UnitDevice(device, 0.0, None, None)
    given = pool.gpu_memory_utilization or request.gpu_memory_utilization
    utilization = given or default_utilization or request.memory_share
    sized = replace(
        request, gpu_memory_utilization=utilization, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    if pool.lockstep and model.experts:
        raise UsageError(
            f"lockstep is for dense models; the data-parallel units of {model.name} share its experts: write "
            f"ep={pool.tp * pool.dp} instead"
        )
    shape = _shape(pool, link)
    shape.check(model)
    if link or not shape.single:
        choose_link(profile, link)
    if not shape.single and shape != request.parallel:
        unit = _loaded(replace(sized, parallel=shape))
    elif utilization != request.memory_share or not shape.single:
        unit = resized(device, sized)
    else:
        unit = device
    speed = profile.links[choose_link(profile, link)].bytes_per_s if profile.links else None
    spare = profile.memory_bytes * (1 - utilization) * pool.tp
    return UnitDevice(unit, spare, speed, model.kv_bytes_per_token)


def shape_of(topology: TopologySpec) -> Parallel:
    """How the GPUs of one instance of the first pool share the model."""
    return _shape(topology.pools[0], topology.link)


def _shape(pool: PoolSpec, link: str) -> Parallel:
    """How units of the pool share the model; units in lockstep hold all of it, each for itself."""
    return Parallel(pool.tp, 1 if pool.lockstep else pool.dp, pool.ep, link)


@dataclass(frozen=True)
class SavingCost:
    """Steps of a prefill instance: ordinary steps plus ``prompt_s`` per prompt to save its KV."""

    base: CostModel
    prompt_s: float

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step."""
        return self.base.step_s(shape) + self.prompt_s * len(shape.prefill)


def saving_kv(unit: UnitDevice, ms_per_layer: float) -> UnitDevice:
    """The unit as a prefill instance; a device made by hand, whose layers are unknown, is returned unchanged."""
    if unit.device.geometry is None or not ms_per_layer:
        return unit
    cost = SavingCost(unit.device.cost, unit.device.geometry.layers * ms_per_layer * 1e-3)
    return replace(unit, device=replace(unit.device, cost=cost))


@lru_cache(maxsize=8)
def _loaded(request: DeviceRequest) -> Device:
    return load(request)
