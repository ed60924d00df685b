"""A DP unit of several GPUs: its step times, KV capacity and memory, from the device of one GPU.

Tensor parallelism divides the GPU's work by ``tp`` and adds two all-reduces a layer; expert parallelism adds two
all-to-alls and spreads the experts' weights over ``ep`` GPUs. Kernels of a slice are taken to be as efficient as those
of the whole, and experts to be evenly loaded: both flatter parallel units a little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbench.config.topology import PREFILL_UTILIZATION, PoolSpec
from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.profiles import DeviceProfile, activation_reserve_bytes
from ebbench.devices.roofline import RooflineCost
from ebbench.devices.table import TableCost
from ebbench.errors import UsageError

# Bytes/s one way between two GPUs of a server, as NCCL gets them: NVLink 4 and 5 at about 80 % of the data sheet,
# PCIe 4 and 5 x16 at about 70 %.
_LINKS = {"h100": 360e9, "h200": 360e9, "b300": 720e9, "rtx-pro-6000": 45e9, "rtx-4090": 22e9, "l40s": 22e9}
_OTHER_LINK = 22e9
_COLLECTIVE_S = 10e-6  # a small all-reduce or all-to-all between the GPUs of a server


@dataclass(frozen=True)
class UnitDevice:
    """What one DP unit is: its ``device`` (cost and KV capacity of all its GPUs) and what transfers need to know.

    ``spare_bytes``: memory of its GPUs that the engine was told not to use.
    """

    device: Device
    spare_bytes: float
    link_bytes_per_s: float
    kv_bytes_per_token: int | None


@dataclass(frozen=True)
class ShardedCost:
    """Step time of one unit of ``tp`` GPUs; ``collectives`` per layer move ``hidden`` values a token."""

    base: CostModel
    tp: int
    layers: int
    collectives: int
    token_bytes: float
    link_bytes_per_s: float

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step, the host's part undivided."""
        tokens = shape.decode_seqs
        for chunk, _ in shape.prefill:
            tokens += chunk
        moved = self.layers * self.collectives * (_COLLECTIVE_S + tokens * self.token_bytes / self.link_bytes_per_s)
        if isinstance(self.base, TableCost):
            host = self.base.host.step_s + self.base.host.sequence_s * (shape.decode_seqs + len(shape.prefill))
            gpu = self.base.gpu_s(shape) / self.tp + moved
            return max(gpu, host) if self.base.overlap else gpu + host
        return self.base.step_s(shape) / self.tp + moved


def unit_device(
    device: Device, pool: PoolSpec, default_utilization: float, max_num_seqs: int, budget: int
) -> UnitDevice:
    """The unit of ``pool`` on GPUs like ``device``. Raises UsageError where the shape cannot be had."""
    utilization = pool.gpu_memory_utilization or default_utilization
    profile, model = device.profile, device.geometry
    if profile is None or model is None:
        return _made_by_hand(device)
    _check(pool, model)
    if pool.tp > 1 or pool.ep > 1:
        _check_divisible(device)
    spare = profile.memory_bytes * (1 - utilization) * pool.tp
    link = _LINKS.get(profile.name, _OTHER_LINK)
    if pool.tp == 1 and pool.ep == 1:
        if utilization == PREFILL_UTILIZATION:
            return UnitDevice(device, spare, link, model.kv_bytes_per_token)
        capacity = _capacity_tokens(profile, model, pool, utilization, max_num_seqs, budget)
        return UnitDevice(replace(device, kv_capacity_tokens=capacity), spare, link, model.kv_bytes_per_token)
    capacity = _capacity_tokens(profile, model, pool, utilization, max_num_seqs, budget)
    cost = ShardedCost(
        base=device.cost,
        tp=pool.tp,
        layers=model.layers,
        collectives=(2 if pool.tp > 1 else 0) + (2 if pool.ep > 1 else 0),
        token_bytes=2 * model.hidden * model.dtype_bytes * (pool.tp - 1) / pool.tp
        if pool.tp > 1
        else model.hidden * model.dtype_bytes * max(model.experts_per_token, 1),
        link_bytes_per_s=link,
    )
    return UnitDevice(replace(device, cost=cost, kv_capacity_tokens=capacity), spare, link, model.kv_bytes_per_token)


def _made_by_hand(device: Device) -> UnitDevice:
    """A device that was not loaded stands for a whole unit, however many GPUs that is."""
    return UnitDevice(device, 0.0, _OTHER_LINK, None)


def _check_divisible(device: Device) -> None:
    """Raise UsageError for a cost model measured on one whole GPU: what of it divides among GPUs is not known."""
    if not isinstance(device.cost, TableCost | RooflineCost):
        raise UsageError(
            f"step times of {device.model} on {device.name} were measured on one GPU ({device.provenance}) and "
            "cannot be divided among several; leave tp and ep out of the topology, or use a device with kernel tables "
            "(`ebbench devices list`)"
        )


def _check(pool: PoolSpec, model: ModelGeometry) -> None:
    if model.heads % pool.tp or (pool.tp > model.kv_heads and pool.tp % model.kv_heads):
        raise UsageError(
            f"{model.name} has {model.heads} attention and {model.kv_heads} KV heads, which {pool.tp} GPUs cannot "
            f"share evenly; use a tp that divides {model.heads}"
        )
    if pool.ep > 1 and not model.experts:
        raise UsageError(
            f"{model.name} has no experts to spread over ep={pool.ep}; leave ep out, or choose an MoE model"
        )
    if pool.ep > 1 and model.experts % pool.ep:
        raise UsageError(f"{model.name} has {model.experts} experts, which ep={pool.ep} cannot share evenly")


def _capacity_tokens(
    profile: DeviceProfile, model: ModelGeometry, pool: PoolSpec, utilization: float, max_num_seqs: int, budget: int
) -> int:
    """KV tokens of one unit: what its GPUs have left beside weights and activations."""
    experts = model.layers * model.experts * model.expert_params * model.dtype_bytes if model.experts else 0
    weights = (model.weight_bytes - experts) / pool.tp + experts / max(pool.ep, pool.tp)
    reserve = activation_reserve_bytes(profile, model, max_num_seqs, budget)
    free = profile.memory_bytes * utilization - weights - reserve
    # With fewer KV heads than GPUs each head is kept more than once.
    per_token = model.kv_bytes_per_token / min(pool.tp, model.kv_heads)
    tokens = int(free // per_token) // 16 * 16
    if tokens < 16:
        raise UsageError(
            f"{model.name} does not fit on {pool.tp} x {profile.name} at gpu_memory_utilization {utilization:g}; raise "
            "tp, ep or the utilization, or choose a larger device"
        )
    return tokens
