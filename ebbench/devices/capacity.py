"""How many KV cache tokens fit on the GPUs of one unit.

vLLM's hybrid KV cache manager gives blocks to a model whose layers keep different amounts of context.
"""

from __future__ import annotations

from typing import NamedTuple

from ebbench.devices.base import SINGLE, Device, DeviceRequest, Parallel, StartUp, start_up
from ebbench.devices.geometry import BLOCK_TOKENS, KvLayout, ModelGeometry, kv_layout
from ebbench.devices.profiles import DeviceProfile
from ebbench.errors import UsageError
from ebbench.spec.server import parse_release

_REPORTED = "; where vLLM starts all the same, give the size of its KV cache with --num-kv-blocks"
COLLECTIVE_BYTES = 450_000_000
"""What each of several GPUs needs for their collectives."""


def kv_capacity_tokens(
    profile: DeviceProfile,
    model: ModelGeometry,
    start: StartUp,
    *,
    parallel: Parallel = SINGLE,
    gpu_memory_utilization: float | None = None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    eager: bool = False,
    async_scheduling: bool = True,
    reported: int | None = None,
) -> int:
    """KV tokens of one unit that fit beside the weights and what vLLM sets aside at its start, in blocks of 16.

    Of a model whose layers keep a window or a state: as vLLM counts them, by the longest sequences.

    ``start``: the rules of vLLM's version. A share of None is the version's default. ``reported``: what a server says
    that it has, in place of the estimate. Raises UsageError with the numbers if the model does not fit.
    """
    share = start.gpu_memory_utilization if gpu_memory_utilization is None else gpu_memory_utilization
    if not 0 < share <= 1:
        raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
    weights = weight_bytes_per_gpu(model, parallel)
    if reported is not None and weights <= profile.memory_bytes:
        return reported
    budget = profile.memory_bytes * share
    trial = reserve_bytes(model, start, max_num_seqs, max_num_batched_tokens, parallel=parallel, eager=eager)
    reserve = profile.context_bytes + trial
    part = model.sliced(parallel.tp)
    room = budget - weights - reserve
    layout = kv_layout(part, in_flight_tokens(max_num_batched_tokens, async_scheduling=async_scheduling))
    if layout is None:
        tokens = int(room // part.kv_bytes_per_token) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        tokens = layout.tokens_of(max(int(room // layout.block_bytes), 0))
    if tokens < 16:
        several = "" if parallel.single else f" per GPU of {parallel.gpus}"
        raise UsageError(
            f"{model.name} does not fit on {profile.name}: weights {weights / 1e9:.1f} GB and "
            f"vLLM's start {reserve / 1e9:.1f} GB{several} against {budget / 1e9:.1f} GB "
            f"({share:.0%} of {profile.memory_bytes / 1e9:.1f} GB); "
            "choose a smaller model, a larger device, --quantization fp8, or more GPUs "
            "(--tp N; run and capacity: --topology tp=N; vLLM: -- --tensor-parallel-size N)"
            f"{'' if weights >= budget else _REPORTED}"
        )
    return tokens


def weight_bytes_per_gpu(model: ModelGeometry, parallel: Parallel) -> float:
    """Weight bytes per GPU.

    Experts are distributed over all GPUs of the engine or divided within a unit; the rest is divided within the unit.
    """
    return (model.weight_bytes - model.experts_bytes) / parallel.tp + model.experts_bytes / max(
        parallel.ep, parallel.tp
    )


def reserve_bytes(
    model: ModelGeometry,
    start: StartUp,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    parallel: Parallel = SINGLE,
    eager: bool = False,
) -> int:
    """Bytes of one GPU that vLLM leaves to its trial run, to collectives and, where it counts them, to CUDA graphs.

    The trial run computes ``max_num_batched_tokens`` tokens and then samples ``max_num_seqs`` sequences; the larger of
    the two counts, since the first one's memory is free again by then, except for the hidden states, and so does the
    language head that some versions hold once more.
    """
    tokens, seqs = max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens)
    inner = model.experts_per_token * model.expert_intermediate if model.experts else model.intermediate
    inner = max(inner, model.dense_intermediate)
    widest = max(mixer.products[0].columns for mixer in model.mixers)
    per_token = (3 * inner + widest) / parallel.tp + 4 * model.hidden
    trial = start.experts if model.experts else start.dense
    step, sampled = tokens * per_token * model.dtype_bytes, seqs * model.vocab * trial.logit_bytes
    collectives = 0 if parallel.single else COLLECTIVE_BYTES
    graphs = 0.0 if eager else trial.graph_bytes
    head = trial.heads * model.vocab * model.hidden * model.dtype_bytes / parallel.tp
    held = step + sampled if trial.at_once else max(step, tokens * model.hidden * model.dtype_bytes + sampled, head)
    return int(collectives + graphs + held)


GIB = 1 << 30
LARGEST_SINCE = (0, 32)
"""From then on, at the latest, GPUs of 160 GiB have a limit of their own (0.25 has none)."""


class BatchLimits(NamedTuple):
    """vLLM's ``--max-num-seqs`` and ``--max-num-batched-tokens``."""

    max_num_seqs: int
    max_num_batched_tokens: int


def batch_limits(profile: DeviceProfile, vllm_version: str) -> BatchLimits:
    """The limits that ``vllm serve`` chooses on a GPU where none are given, or those that the profile states.

    By the GPU's memory, and smaller ones for an A100 of any (vllm/engine/arg_utils.py, ``get_batch_defaults``).
    """
    gib, release = profile.memory_bytes / GIB, parse_release(vllm_version)
    chosen = BatchLimits(1024, 8192) if gib >= 70 and "A100" not in profile.gpu else BatchLimits(256, 2048)
    if gib >= 160 and release is not None and release >= LARGEST_SINCE:
        chosen = BatchLimits(1024, 16_384)
    return BatchLimits(
        profile.max_num_seqs or chosen.max_num_seqs, profile.max_num_batched_tokens or chosen.max_num_batched_tokens
    )


def requested_capacity(profile: DeviceProfile, model: ModelGeometry, request: DeviceRequest) -> int:
    """:func:`kv_capacity_tokens` with the settings of ``request``; a drafter has weights and a KV cache of its own."""
    limits = batch_limits(profile, request.vllm)
    return kv_capacity_tokens(
        profile,
        model if request.drafts is None else model.with_drafter(request.drafts.rules.layers),
        start_up(request.vllm),
        parallel=request.parallel,
        gpu_memory_utilization=request.gpu_memory_utilization,
        max_num_seqs=request.max_num_seqs or limits.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens or limits.max_num_batched_tokens,
        eager=request.eager,
        async_scheduling=request.async_scheduling,
        reported=request.kv_tokens,
    )


def kv_cache_bytes(device: Device) -> int:
    """Bytes of the KV cache of one GPU of a loaded device."""
    assert device.geometry is not None
    assert device.request is not None
    if device.kv_layout is not None:
        return device.kv_layout.blocks_of(device.kv_capacity_tokens) * device.kv_layout.block_bytes
    return device.kv_capacity_tokens * device.geometry.sliced(device.request.parallel.tp).kv_bytes_per_token


def requested_layout(profile: DeviceProfile, model: ModelGeometry, request: DeviceRequest) -> KvLayout | None:
    """How the model's KV cache lies on each GPU with the settings of ``request``; None if every layer keeps all."""
    step_tokens = request.max_num_batched_tokens or batch_limits(profile, request.vllm).max_num_batched_tokens
    in_flight = in_flight_tokens(step_tokens, async_scheduling=request.async_scheduling)
    return kv_layout(model.sliced(request.parallel.tp), in_flight)


def in_flight_tokens(max_num_batched_tokens: int, *, async_scheduling: bool) -> int:
    """Most tokens that are scheduled and not yet computed."""
    return max_num_batched_tokens * (2 if async_scheduling else 1)
