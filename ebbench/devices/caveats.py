"""What of a device's step times and KV cache is estimated instead of measured: the warnings of every run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ebbench.devices.base import CostModel, DeviceRequest, Parallel, StepShape
from ebbench.devices.capacity import requested_capacity
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.linear import LinearCost
from ebbench.devices.profiles import DeviceProfile, find_profile, has_other_shape
from ebbench.devices.roofline import RooflineCost
from ebbench.devices.surfaces import has_joint_tables
from ebbench.devices.table import TableCost, table_cost
from ebbench.errors import UsageError
from ebbench.records.warnings import HOST_DOUBTED, HOST_UNFITTED, MIXING_UNMEASURED, caveat
from ebbench.spec.server import HostCosts, release_of

SLOWER = 1.02
"""From this ratio on, a step is said to be slower than with weights in 16 bits, or than on half the GPUs."""
SAME = 0.02
"""Largest relative difference at which a device file's numbers are those of the bundled device of its name."""
_RATES = ("bandwidth_bytes_per_s", "bf16_flops_per_s")
_STEPS = {
    "256 decodes": StepShape((), 256, 256 * 1024, 256),
    "2,048 prompt tokens": StepShape(((2048, 0),), 0, 0, 1),
    "8,192 prompt tokens": StepShape(((2048, 0),) * 4, 0, 0, 4),
}
_MANY_SHORT = StepShape((), 512, 512 * 256, 512)


def caveats(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: CostModel, host: HostCosts
) -> tuple[str, ...]:
    """Warnings about options without effect, and about what was not measured, not fitted or is simplified.

    ``model``: in the types that are served. ``host``: the constants in ``cost``.
    """
    found = (
        *_of_model(request, model),
        *_of_options(request, cost),
        *_unused_numbers(request, profile, model, cost),
    )
    if isinstance(cost, TableCost | RooflineCost):
        found += unfitted_host(request, host)
    if isinstance(cost, TableCost):
        found += (
            *unmeasured_mixing(profile),
            *doubtful_host(profile, cost),
            *_slower_than_16_bits(request, profile, model, cost),
            *_slower_than_half_the_gpus(request, profile, model, cost),
        )
    return found


def _of_model(request: DeviceRequest, model: ModelGeometry) -> tuple[str, ...]:
    found: tuple[str, ...] = (caveat("model-note", model=model.name, note=model.note),) if model.note else ()
    if has_other_shape(model):
        found += (caveat("other-shape", given=request.model, model=model.name, params=model.params),)
    return found


def _of_options(request: DeviceRequest, cost: CostModel) -> tuple[str, ...]:
    eager = (caveat("eager-unknown"),) if request.eager and not isinstance(cost, TableCost) else ()
    return eager + (_other_kernels(request) if isinstance(cost, TableCost) else ())


_TABLES_SINCE = (0, 19)
"""The oldest vLLM under which kernels of the tables were measured; the newest is 0.24."""


def _other_kernels(request: DeviceRequest) -> tuple[str, ...]:
    """What of an older vLLM ``--vllm-version`` does not set."""
    version = release_of(request.vllm_version or "")
    if version is None or version >= _TABLES_SINCE:
        return ()
    return (caveat("older-vllm", vllm_version=request.vllm_version),)


def unfitted_host(request: DeviceRequest, host: HostCosts) -> tuple[str, ...]:
    """A warning if the host's constants are a guess; else empty."""
    if host.fitted:
        return ()
    return (caveat(HOST_UNFITTED, device=request.name, step_s=host.step_s, sequence_s=host.sequence_s),)


def _unused_numbers(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: CostModel
) -> tuple[str, ...]:
    """Numbers in the user's device file that the step times do not depend on, with what they are taken from instead."""
    if not request.name.endswith(".toml"):
        return ()
    if isinstance(cost, TableCost):
        bundled = find_profile(profile.name)
        unused = [name for name in _RATES if abs(getattr(profile, name) / getattr(bundled, name) - 1.0) > SAME]
        why = "tables"
    elif isinstance(cost, LinearCost):
        unused = [*_RATES, *_stated(profile, ("gemm_factor", "host"))]
        why = "linear"
    elif isinstance(cost, RooflineCost):
        unused = _stated(profile, ("gemm_factor", "mixed_from"))
        unused += [f"host.{name}.mixed_excess" for name, host in profile.host.items() if host.mixed_excess != 1.0]
        why = "roofline"
    else:
        unused = _stated(profile, ("gemm_factor", "mixed_from"))
        why = "measured"
    if not unused:
        return ()
    of = {"file": request.name, "device": profile.name, "published_for": list(profile.calibration_names)}
    return (caveat("unused-numbers", unused=unused, times=why, model=model.name, **of),)


def _stated(profile: DeviceProfile, names: Sequence[str]) -> list[str]:
    """The fields that differ from their defaults."""
    defaults = {one.name: one for one in fields(DeviceProfile)}
    return [name for name in names if getattr(profile, name) and getattr(profile, name) != defaults[name].default]


def unmeasured_mixing(profile: DeviceProfile) -> tuple[str, ...]:
    """What stands for the attention of mixed batches, if it was neither measured nor fitted."""
    if profile.mixed_fitted or has_joint_tables(profile.name):
        return ()
    return (caveat(MIXING_UNMEASURED, device=profile.name, taken=profile.mixed_note),)


def doubtful_host(profile: DeviceProfile, cost: TableCost) -> tuple[str, ...]:
    """Where the host takes longer than the GPU in steps of many short sequences, and its constant is in doubt."""
    host = cost.host
    host_s = host.step_s + host.sequence_s * _MANY_SHORT.decode_seqs
    gpu_s = replace(cost, host=HostCosts(0.0, 0.0), overlap=False).step_s(_MANY_SHORT)
    if not host.doubt or host_s <= gpu_s:
        return ()
    seqs = _MANY_SHORT.decode_seqs
    return (caveat(HOST_DOUBTED, seqs=seqs, host_s=host_s, gpu_s=gpu_s, device=profile.name, doubt=host.doubt),)


def _slower_than_16_bits(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost
) -> tuple[str, ...]:
    """A warning if the tables' kernels with FP8 weights are slower than in 16 bits, as no server would run them."""
    if not model.weight_dtype.startswith("fp8"):
        return ()
    plain = replace(model, weight_dtype="bfloat16", attention_dtype="", expert_dtype="")
    slow = _slower_steps(request, profile, plain, cost, request.parallel)
    if not slow:
        return ()
    of = {"quantization": request.quantization, "by_block": model.weight_dtype == "fp8_block"}
    return (caveat("fp8-slower", device=profile.name, times=slow, **of),)


def _slower_than_half_the_gpus(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost
) -> tuple[str, ...]:
    """A warning if the model also fits on half as many GPUs and a step is faster there, with fewer collectives."""
    whole = request.parallel
    if whole.tp < 2 or whole.dp > 1:
        return ()
    half = replace(whole, tp=whole.tp // 2, ep=max(whole.ep // 2, 1))
    try:
        half.check(model)
        requested_capacity(profile, model, replace(request, parallel=half, kv_tokens=None))
    except UsageError:  # vLLM would not start there
        return ()
    slow = _slower_steps(request, profile, model, cost, half)
    if not slow:
        return ()
    return (caveat("fewer-gpus-faster", device=profile.name, gpus=whole.tp, fewer=half.tp, times=slow),)


def _slower_steps(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost, on: Parallel
) -> dict[str, float]:
    """Steps that take longer with ``cost`` than with tables of ``model`` on GPUs of the shape ``on``, and how much."""
    other = table_cost(profile, model, cost.host, shape=on, overlap=request.async_scheduling, eager=request.eager)
    assert other is not None  # the device has tables
    ratios = {what: cost.step_s(step) / other[0].step_s(step) for what, step in _STEPS.items()}
    return {what: ratio for what, ratio in ratios.items() if ratio > SLOWER}
