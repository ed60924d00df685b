"""Facts about a device serving a model: sizes, step times, marginal costs, crossover."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ebbench.devices.base import CostModel, Device, DeviceRequest, Parallel
from ebbench.devices.capacity import kv_cache_bytes, weight_bytes_per_gpu
from ebbench.devices.costs import decode_shape, measured_devices, mixed_shape, prefill_shape
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.profiles import DeviceProfile, find_model, find_profile, list_devices, list_models

# Marginal cost of a token by batch composition: figure 1 of Zhang et al. (ICML 2026).

SMALL_TOKENS = 1024
LARGE_TOKENS = 2048
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 20))


@dataclass(frozen=True)
class MarginalCurve:
    """Time (s) per further token between steps of 1,024 and 2,048 tokens.

    ``mixed_s[i]`` is at decode share ``shares[i]``; ``crossover``: the smallest decode share at which a token in a
    mixed batch costs more than one in a pure decode batch; None if it never does.
    """

    context_tokens: int
    shares: tuple[float, ...]
    mixed_s: tuple[float, ...]
    decode_s: float
    prefill_s: float
    crossover: float | None


def marginal_curve(cost: CostModel, context_tokens: int, drafts: int = 0) -> MarginalCurve:
    """Marginal cost over the decode share, for decodes with ``context_tokens`` KV tokens and ``drafts`` drafted tokens
    each. A decode counts by the tokens that it computes."""
    span, sizes = LARGE_TOKENS - SMALL_TOKENS, (SMALL_TOKENS, LARGE_TOKENS)

    def mixed(share: float) -> float:
        ends = [cost.step_s(mixed_shape(n, share, context_tokens, drafts)) for n in sizes]
        return (ends[1] - ends[0]) / span

    decode = [cost.step_s(decode_shape(n // (1 + drafts), context_tokens, drafts)) for n in sizes]
    prefill = [cost.step_s(prefill_shape(n)) for n in sizes]
    curve = tuple(mixed(share) for share in SHARES)
    decode_s = (decode[1] - decode[0]) / span
    return MarginalCurve(
        context_tokens, SHARES, curve, decode_s, (prefill[1] - prefill[0]) / span, _crossing(curve, decode_s)
    )


def _crossing(curve: tuple[float, ...], level: float) -> float | None:
    """First decode share at which the curve rises above the level, interpolated."""
    if curve[0] > level:
        return SHARES[0]
    for i in range(1, len(curve)):
        if curve[i] > level:
            step = (level - curve[i - 1]) / (curve[i] - curve[i - 1])
            return SHARES[i - 1] + step * (SHARES[i] - SHARES[i - 1])
    return None


DECODES = (1, 32, 128, 256, 512, 1024)
PREFILLS = (128, 512, 2048, 8192)
SHOWN_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
MIXED_TOKENS = 1024


@dataclass(frozen=True)
class StepTime:
    """One row of the table of step times. ``parts_s``: sum of a mixed step's parts run separately, else None."""

    kind: str
    tokens: int
    decode_seqs: int
    step_s: float
    parts_s: float | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """Everything that ``ebbench devices show`` prints."""

    device: Device
    profile: DeviceProfile
    model: ModelGeometry
    parallel: Parallel
    context_tokens: int
    steps: tuple[StepTime, ...]
    curve: MarginalCurve

    @property
    def drafts(self) -> int:
        """Drafted tokens per decode."""
        return _drafts(self.device)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache of one GPU."""
        return kv_cache_bytes(self.device)

    @property
    def kv_blocks(self) -> int | None:
        """Blocks of the pool from which layers that keep a window or a state draw; None where all keep all tokens."""
        layout = self.device.kv_layout
        return None if layout is None else layout.blocks_of(self.device.kv_capacity_tokens)

    @property
    def gpu_weight_bytes(self) -> int:
        """Bytes of the weights on one GPU."""
        return int(weight_bytes_per_gpu(self.model, self.parallel, self.profile.gpu, self.request.start))

    @property
    def request(self) -> DeviceRequest:
        """The arguments that the device was loaded with."""
        assert self.device.request is not None
        return self.device.request

    @property
    def reserve_bytes(self) -> int:
        """Bytes for the trial run, CUDA graphs and context: the remainder of the usable memory."""
        usable = int(self.profile.memory_bytes * self.request.memory_share)
        return usable - self.gpu_weight_bytes - self.kv_cache_bytes

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with units in its keys."""
        calibration = asdict(self.device.calibration)
        return {
            "device": self.device.name,
            "gpu": self.profile.gpu,
            "model": self.device.model,
            "memory_bytes": self.profile.memory_bytes,
            "weight_bytes": self.model.weight_bytes,
            "tp": self.parallel.tp,
            "links": {name: asdict(link) for name, link in self.profile.links.items()},
            "weight_dtype": self.model.weight_dtype,
            "kv_dtype": self.model.kv_dtype,
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "vllm_version": self.request.vllm,
            "gpu_memory_utilization": self.request.memory_share,
            "reserve_bytes": self.reserve_bytes,
            "kv_capacity_tokens": self.device.kv_capacity_tokens,
            "kv_blocks": self.kv_blocks,
            "context_tokens": self.context_tokens,
            "drafted_tokens": self.drafts,
            "crossover_decode_share": self.curve.crossover,
            "marginal_s_per_token": asdict(self.curve),
            "steps": [asdict(step) for step in self.steps],
            "calibration": calibration,
            "provenance": self.device.provenance,
            "warnings": [warning.to_dict(str(warning)) for warning in self.device.warnings],
        }


def describe(device: Device, context_tokens: int) -> DeviceFacts:
    """Evaluate the cost model of a loaded device at typical step shapes."""
    assert device.profile is not None
    assert device.geometry is not None
    assert device.request is not None
    return DeviceFacts(
        device,
        device.profile,
        device.geometry,
        device.request.parallel,
        context_tokens,
        tuple(_steps(device, context_tokens)),
        marginal_curve(device.cost, context_tokens, _drafts(device)),
    )


def _drafts(device: Device) -> int:
    drafts = None if device.request is None else device.request.speculative
    return 0 if drafts is None else drafts.tokens


def _steps(device: Device, context: int) -> list[StepTime]:
    cost, drafts = device.cost.step_s, _drafts(device)
    rows = [StepTime("decode", n * (1 + drafts), n, cost(decode_shape(n, context, drafts))) for n in DECODES]
    rows += [StepTime("prefill", x, 0, cost(prefill_shape(x))) for x in PREFILLS]
    for share in SHOWN_SHARES:
        shape = mixed_shape(MIXED_TOKENS, share, context, drafts)
        decodes = shape.decode_seqs
        prompt = MIXED_TOKENS - decodes * (1 + drafts)
        parts = cost(decode_shape(decodes, context, drafts)) + cost(prefill_shape(prompt))
        rows.append(StepTime("mixed", MIXED_TOKENS, decodes, cost(shape), parts))
    return rows


def device_rows() -> list[dict[str, Any]]:
    """One row per bundled profile."""
    return [
        {
            "name": name,
            "gpu": profile.gpu,
            "memory_gb": profile.memory_bytes / 1e9,
            "bandwidth_tb_per_s": profile.bandwidth_bytes_per_s / 1e12,
            "mixed_attention": _mixed_source(profile),
        }
        for name, profile in ((name, find_profile(name)) for name in list_devices())
    ]


def _mixed_source(profile: DeviceProfile) -> str:
    from ebbench.devices.surfaces import has_joint_tables

    if has_joint_tables(profile.name):
        return "measured"
    if profile.name not in measured_devices():
        return "no kernels"
    return f"borrowed from {profile.mixed_from}" if profile.mixed_from else "estimated"


def model_rows() -> list[dict[str, Any]]:
    """One row per model with known geometry."""
    return [
        {
            "name": name,
            "hf_id": model.hf_id,
            "parameters_b": model.params / 1e9,
            "weights_gb": model.weight_bytes / 1e9,
            "kv_kb_per_token": model.kv_bytes_per_token / 1e3,
        }
        for name, model in ((name, find_model(name)) for name in list_models())
    ]
