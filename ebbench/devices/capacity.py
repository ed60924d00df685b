"""How many KV cache tokens fit on the GPUs of one unit.

vLLM's hybrid KV cache manager gives blocks to a model whose layers keep different amounts of context.
"""

from __future__ import annotations

from typing import NamedTuple

from ebbench.devices.base import SINGLE, Device, DeviceRequest, Parallel, StartUp
from ebbench.devices.geometry import (
    BLOCK_TOKENS,
    CHUNKS_SINCE,
    SETTLED_SINCE,
    STATE_BLOCKS,
    UNSTATED_POSITIONS,
    KvLayout,
    ModelGeometry,
    kv_layout,
)
from ebbench.devices.profiles import DeviceProfile
from ebbench.errors import UsageError
from ebbench.spec.server import parse_release

_REPORTED = "; where vLLM starts all the same, give the size of its KV cache with --num-kv-blocks"
_HOPPER = ("H100", "H200", "GH200", "H20")
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
    layout: KvLayout | None,
    reported: int | None = None,
) -> int:
    """KV tokens of one unit that fit beside the weights and what vLLM sets aside at its start, in blocks of 16.

    Of a model whose layers keep a window or a state: as vLLM counts them, by the longest sequences.

    ``start``: the rules of vLLM's version. A share of None is the version's default. ``layout``: of
    :func:`layout_with`. ``reported``: what a server says that it has, in place of the estimate. Raises UsageError with
    the numbers if the model does not fit.
    """
    share = start.gpu_memory_utilization if gpu_memory_utilization is None else gpu_memory_utilization
    if not 0 < share <= 1:
        raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
    weights = weight_bytes_per_gpu(model, parallel, profile.gpu, start)
    if reported is not None and weights <= profile.memory_bytes:
        return reported
    budget = profile.memory_bytes * share
    trial = reserve_bytes(model, start, max_num_seqs, max_num_batched_tokens, parallel=parallel, eager=eager)
    reserve = profile.context_bytes + trial
    part = model.sliced(parallel.tp)
    room = budget - weights - reserve
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


def weight_bytes_per_gpu(model: ModelGeometry, parallel: Parallel, gpu: str, start: StartUp) -> float:
    """Weight bytes on each ``gpu`` (its name) under a version of vLLM.

    Experts are distributed over all GPUs of the engine or divided within a unit. The rest is divided within the unit,
    but for what every GPU holds as a whole: ways to latents, indices, routers, KV heads that are fewer than the GPUs.
    """
    part = model.sliced(parallel.tp)
    not_sliced = model.other_params * model.dtype_bytes + model.other_bytes + model.encoder_bytes
    shared = part.weight_bytes - part.experts_bytes - not_sliced * (1 - 1 / parallel.tp)
    marlin = start.marlin or not (model.experts_of_gpt_oss and any(name in gpu for name in _HOPPER))
    experts = model.experts_bytes * _padding(model, parallel, marlin=marlin)
    return shared + experts / max(parallel.ep, parallel.tp)


def _padding(model: ModelGeometry, parallel: Parallel, *, marlin: bool) -> float:
    """How much larger kernels for MXFP4 make the experts: gpt-oss's 2,880 columns become 3,072.

    Marlin and TensorRT-LLM want multiples of 256 by 128 (vllm/model_executor/layers/fused_moe/oracle/mxfp4.py); Triton,
    on Hopper, of 64, and its layout of the weights of 256.
    """
    if not model.experts or model.dtype_of_experts != "w4a16_mxfp4":
        return 1.0
    hidden = model.expert_hidden or model.hidden
    inner = model.expert_intermediate // (1 if parallel.ep > 1 else parallel.tp)
    return _up(hidden, 256) * _up(inner, 128 if marlin else 64) / (hidden * inner)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
    inner = model.dense_intermediate if model.experts else model.intermediate
    widest = max(mixer.products[0].columns for mixer in model.mixers)
    per_token = max(3 * inner / parallel.tp, _expert_workspace(model, parallel)) + 4 * model.hidden
    workspace = 0
    if model.own_pages:
        per_token += _beside_compressed(model, parallel)
        workspace = _compressed_workspace(model, tokens)
    else:
        per_token += widest / parallel.tp
    trial = start.experts if model.experts else start.dense
    step, sampled = tokens * per_token * model.dtype_bytes, seqs * model.vocab * trial.logit_bytes
    collectives = 0 if parallel.single else COLLECTIVE_BYTES
    graphs = 0.0 if eager else trial.graph_bytes
    head = trial.heads * model.vocab * model.hidden * model.dtype_bytes / parallel.tp
    trial_bytes = (
        step + sampled if trial.at_once else max(step, tokens * model.hidden * model.dtype_bytes + sampled, head)
    )
    return int(collectives + graphs + trial_bytes + workspace)


def _expert_workspace(model: ModelGeometry, parallel: Parallel) -> float:
    """Elements per token of the two buffers that a layer's experts work in, which stay allocated between layers.

    Each holds, for every expert that a token has chosen, the wider of what the expert sees and of its inner width,
    before the gate in one, after it in the other (``workspace_shapes`` of Triton's, Marlin's, CUTLASS' and DeepGEMM's
    experts, vllm/model_executor/layers/fused_moe/experts). GPUs that share out whole experts have them for the choices
    of all tokens: those of all data-parallel ranks, which are gathered.
    """
    if not model.experts:
        return 0.0
    seen = model.expert_hidden or model.hidden
    inner = model.expert_intermediate / (1 if parallel.ep > 1 else parallel.tp)
    widths = max((model.mlp_matrices - 1) * inner, seen) + max(inner, seen)
    return model.experts_per_token * widths * (parallel.dp if parallel.ep > 1 else 1)


_PADDED_HEADS = 64
_LOGITS_BYTES = 512 << 20


def _beside_compressed(model: ModelGeometry, parallel: Parallel) -> int:
    """Elements per token that DeepSeek-V4's layers hold at once: queries and their result for 64 heads at least on
    every GPU, and the streams of hidden states before and after a layer (vLLM 0.32, ``models/deepseek_v4``)."""
    heads = max(model.heads // parallel.tp, _PADDED_HEADS)
    return 2 * heads * model.head_dim + 2 * model.streams * model.hidden


def _compressed_workspace(model: ModelGeometry, tokens: int) -> int:
    """Bytes by the longest sequence: the larger of the keys that four prompts gather in 16 bits, and of an index's for
    several (``flashmla.py``, ``indexer.py``); places of keys compressed 128 times for decodes and prompts; an index's
    scores."""
    longest = model.positions or UNSTATED_POSITIONS
    gathered = 4 * (longest // 4 + 128 + tokens) * model.head_dim * 2
    indexed = 8 * (5 if longest <= 1 << 18 else 2) * longest // 4 * 132
    return max(gathered, indexed) + 2 * tokens * (longest // 128) * 4 + _LOGITS_BYTES


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
        _with_drafter(model, request),
        request.start,
        parallel=request.parallel,
        gpu_memory_utilization=request.gpu_memory_utilization,
        max_num_seqs=request.max_num_seqs or limits.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens or limits.max_num_batched_tokens,
        eager=request.eager,
        layout=requested_layout(profile, model, request),
        reported=request.kv_tokens,
    )


def _with_drafter(model: ModelGeometry, request: DeviceRequest) -> ModelGeometry:
    drafts = request.speculative
    return model if drafts is None else model.with_drafter(drafts.rules.layers, drafts.tokens)


def kv_cache_bytes(device: Device) -> int:
    """Bytes of the KV cache of one GPU of a loaded device."""
    assert device.geometry is not None
    assert device.request is not None
    if device.kv_layout is not None:
        return device.kv_layout.blocks_of(device.kv_capacity_tokens) * device.kv_layout.block_bytes
    return device.kv_capacity_tokens * device.geometry.sliced(device.request.parallel.tp).kv_bytes_per_token


def requested_layout(profile: DeviceProfile, model: ModelGeometry, request: DeviceRequest) -> KvLayout | None:
    """How the model's KV cache lies on each GPU with the settings of ``request``; None if every layer keeps all."""
    return layout_with(
        _with_drafter(model, request),
        request.parallel,
        request.max_num_batched_tokens or batch_limits(profile, request.vllm).max_num_batched_tokens,
        request.vllm,
        async_scheduling=request.async_scheduling,
        prefix_caching=request.prefix_caching,
        drafts=0 if request.speculative is None else request.speculative.tokens,
    )


def layout_with(
    model: ModelGeometry,
    parallel: Parallel,
    max_num_batched_tokens: int,
    vllm_version: str,
    *,
    async_scheduling: bool = True,
    prefix_caching: bool = True,
    drafts: int = 0,
) -> KvLayout | None:
    """How the KV cache lies on each GPU of a unit under a version of vLLM; None if every layer keeps all tokens.

    Without ``prefix_caching`` a sequence has one state; each of ``drafts`` drafted tokens has one more, and with them
    finished chunks are kept.
    """
    release = parse_release(vllm_version) or (0, 0, 0)
    steps_in_flight = 2 if async_scheduling and release >= SETTLED_SINCE else 1
    return kv_layout(
        model.sliced(parallel.tp),
        max_num_batched_tokens * steps_in_flight,
        chunks=release >= CHUNKS_SINCE and not drafts,
        state_blocks=STATE_BLOCKS if prefix_caching else 1,
        drafts=drafts,
    )
