"""Time to launch a step's kernels from Python, where no CUDA graph does it.

vLLM's layers launch their kernels one by one with ``--enforce-eager``; in all steps with prompts, attention and what
stands in its place. So a step takes at least their number times the time of one launch.
Dense layers launch two norms, a product before and one after attention, rotary embedding, the write to the KV cache,
attention, and an MLP of two products and an activation; norms of queries and keys are two more, quantised activations
one per product, collectives one each. Steps with few tokens show both numbers (vLLM of Zhang et al. on one H200, 16
decodes, ``calibration.csv``, less the host's time per step): six dense models of four shapes, of 10 and 12 launches
per layer, took 21.1 to 22.2 us per launch, and Qwen3-4B 22.7 (``iteration_time_qwen3_4b.csv``, which names no GPU).
What experts take beside their router follows from Qwen3-30B-A3B: 506 us per layer.
"""

from __future__ import annotations

from ebbench.devices.base import Parallel
from ebbench.devices.geometry import ModelGeometry

LAUNCH_S = 21.8e-6
EXPERT_LAUNCHES = 13
"""Choosing, sorting tokens by expert, both products, activation and sum; Triton's kernels count for several."""
BESIDE_ATTENTION = 3
"""Rotary embedding, the write to the cache and attention; what stands in their place in other kinds of layers."""
BESIDE_GRAPHS = 2
"""Of those, the write and attention: CUDA graphs of steps with prompts do not hold them."""
PROMPT_OF_STATE = 13
"""A gated delta rule's in a step with prompts (vLLM 0.32): convolution, its outputs made ready, the states read, zeroed
where new (two) and written, the rule's six, the outputs copied."""


def launch_s(model: ModelGeometry, shape: Parallel) -> float:
    """Least time (s) to launch the kernels of all layers on one GPU of ``shape``."""
    return LAUNCH_S * launches(model, shape)


def prompt_launch_s(model: ModelGeometry) -> float:
    """Least time (s) to launch what CUDA graphs do not hold in a step with prompts."""
    counts = ((mixer.layers, PROMPT_OF_STATE if mixer.sizes else BESIDE_GRAPHS) for mixer in model.mixers)
    return LAUNCH_S * sum(layers * count for layers, count in counts)


def launches(model: ModelGeometry, shape: Parallel) -> int:
    """Number of kernels that the layers of one step launch on each GPU."""
    quantised = {dtype: int(dtype != "bfloat16") for dtype in model.weight_dtypes}
    several, apart = int(shape.tp > 1), shape.dp > 1
    own_norms = 2 * model.qk_norm + model.joint_norms * several
    total = model.layers * model.norms
    for mixer in model.mixers:
        products = len(mixer.products) * (1 + quantised[model.dtype_of_attention])
        normed = own_norms if mixer.measured_alike else 0
        reduced = several if mixer.kind != "index" else 0
        total += mixer.layers * (products + BESIDE_ATTENTION + normed + reduced)
    mlp = 1 + 2 * (1 + quantised[model.weight_dtype])
    dense = model.mlp_layers - model.expert_layers
    experts = 1 + EXPERT_LAUNCHES + 2 * quantised[model.dtype_of_experts] if model.experts else 0
    experts += mlp if model.shared_intermediate else 0
    exchanged = 2 if apart else several
    return total + dense * (mlp + several) + model.expert_layers * (experts + exchanged)
