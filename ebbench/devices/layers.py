"""Time of everything in a step but attention, by token count, from kernel tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ebbench.devices.attention import Array
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.kerneltables import select
from ebbench.devices.profiles import DeviceProfile, find_model
from ebbench.devices.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE

US = 1e-6
KERNEL_S = 2.5e-6  # a small element-wise kernel, whatever its size (LLMServingSim: 2.0 to 3.1 us on both GPUs)
SAMPLER_BYTES_PER_LOGIT = 10.0  # greedy: cast, log-probabilities, argmax (fits LLMServingSim's sampler within 5 %)
SAMPLER_S = 10e-6
MAX_TOKENS = 65_536
MAX_SAMPLED = 8_192
_ROLES = {"qkv_proj": "qkv", "o_proj": "out", "gate_up_proj": "gate_up", "down_proj": "down"}

Gemm = Callable[[int, int], tuple[Array, Array]]


def step_arrays(profile: DeviceProfile, model: ModelGeometry) -> tuple[Array, Array, tuple[str, ...]] | None:
    """Seconds of all layers by token count, of head and sampler by sampled sequences, and warnings.

    None where the device has no tables of matrix products.
    """
    gemm = _gemm_tables(profile.name) or _gemm_from_layers(profile.name)
    if gemm is None:
        return None
    tokens = np.arange(MAX_TOKENS + 1, dtype=float)
    layer = np.zeros(MAX_TOKENS + 1)
    for n, k in _projections(model):
        layer += _continued(tokens, *gemm(n, k))
    warnings: tuple[str, ...] = ()
    if model.experts:
        experts, warnings = _experts(profile, model)
        layer += _continued(tokens, *experts)
    layer += _elementwise(profile, model, tokens)
    dense = model.layers * layer + 3 * KERNEL_S
    dense[0] = 0.0
    return np.maximum.accumulate(dense), _head(profile, model, gemm), warnings


def _projections(model: ModelGeometry) -> list[tuple[int, int]]:
    """(output, input) width of every matrix product of one layer, experts apart."""
    attention = [(model.qkv_width, model.hidden), (model.hidden, model.heads * model.head_dim)]
    inner = model.shared_intermediate if model.experts else model.intermediate
    return attention + ([(2 * inner, model.hidden), (model.hidden, inner)] if inner else [])


def _continued(x: Array, points: Array, times: Array) -> Array:
    """Linear interpolation; beyond the last point the mean slope of the last half of the measured range."""
    times = np.maximum.accumulate(times)
    half = min(int(np.searchsorted(points, points[-1] / 2)), len(points) - 2)
    slope = (times[-1] - times[half]) / (points[-1] - points[half])
    return np.asarray(np.interp(x, points, times) + np.maximum(x - points[-1], 0.0) * slope)


def _gemm_tables(device: str) -> Gemm | None:
    """Matrix products from a grid of sizes: bilinear in the two widths at every measured token count."""
    table = select("gemm", device=device).to_pydict()
    if not table["n"]:
        return None
    widths = sorted(set(table["n"]))
    tokens = sorted(set(table["tokens"]))
    place = {width: i for i, width in enumerate(widths)}
    at_token = {count: i for i, count in enumerate(tokens)}
    grid = np.full((len(tokens), len(widths), len(widths)), np.nan)
    for n, k, count, time in zip(table["n"], table["k"], table["tokens"], table["time_us"], strict=True):
        grid[at_token[count], place[n], place[k]] = time * US
    _fill_corner(grid, widths)

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        rows = np.array([_bilinear(widths, plane, n, k) for plane in grid])
        return np.array(tokens, dtype=float), rows

    return gemm


def _fill_corner(grid: Array, widths: list[int]) -> None:
    """A product too large to be measured costs its neighbour's time per parameter."""
    for _, i, j in np.argwhere(np.isnan(grid)):
        grid[:, i, j] = np.where(np.isnan(grid[:, i, j]), grid[:, i, j - 1] * widths[j] / widths[j - 1], grid[:, i, j])


def _bilinear(widths: list[int], plane: Array, n: int, k: int) -> float:
    i = min(max(int(np.searchsorted(widths, n, side="right")) - 1, 0), len(widths) - 2)
    j = min(max(int(np.searchsorted(widths, k, side="right")) - 1, 0), len(widths) - 2)
    beyond = max(n / widths[-1], 1.0) * max(k / widths[-1], 1.0)  # wider than the grid: in proportion
    u = min(max((n - widths[i]) / (widths[i + 1] - widths[i]), 0.0), 1.0)
    v = min(max((k - widths[j]) / (widths[j + 1] - widths[j]), 0.0), 1.0)
    low = plane[i, j] * (1 - v) + plane[i, j + 1] * v
    high = plane[i + 1, j] * (1 - v) + plane[i + 1, j + 1] * v
    return float((low * (1 - u) + high * u) * beyond)


def _gemm_from_layers(device: str) -> Gemm | None:
    """Matrix products of one profiled model, scaled by parameters to other shapes (a GPU without a size grid)."""
    table = select("layer", device=device).to_pydict()
    if not table["layer"]:
        return None
    reference = find_model(table["model"][0])
    shapes = dict(zip(_ROLES, _projections(reference), strict=True)) | {"lm_head": (reference.vocab, reference.hidden)}
    curves = {role: _curve(device, reference.name, role) for role in shapes}

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        role = min(shapes, key=lambda r: abs(np.log(n * k / (shapes[r][0] * shapes[r][1]))))
        points, times = curves[role]
        return points, times * (n * k / (shapes[role][0] * shapes[role][1]))

    return gemm


def _curve(device: str, model: str, layer: str) -> tuple[Array, Array]:
    table = select("layer", device=device, model=model, layer=layer).to_pydict()
    order = np.argsort(table["tokens"])
    return np.array(table["tokens"], dtype=float)[order], np.array(table["time_us"], dtype=float)[order] * US


def _elementwise(profile: DeviceProfile, model: ModelGeometry, tokens: Array) -> Array:
    """Norms, rotary embedding and activation of one layer: measured and scaled by width, else memory traffic."""
    inner = 0 if model.experts else model.intermediate  # fused experts include their activation
    heads = (model.heads + model.kv_heads) * model.head_dim
    widths = {
        "layernorm": 2 * model.hidden,
        "rotary_emb": model.qkv_width,
        "act_fn": inner,
        "qk_norm": heads if model.qk_norm else 0,
    }
    total = np.zeros_like(tokens)
    for layer, width in widths.items():
        if width:
            total += _small_kernel(profile, layer, width, tokens)
    return total


# Traffic per element and token of each small kernel, in elements; norms and rotary embedding find half of theirs in
# the L2 cache (LLMServingSim's timings of both its GPUs are met within 15 %).
_TRAFFIC = {"layernorm": 2.0, "rotary_emb": 1.0, "act_fn": 3.0, "qk_norm": 1.0}


def _small_kernel(profile: DeviceProfile, layer: str, width: int, tokens: Array) -> Array:
    """One element-wise kernel; ``width`` of 2 x hidden stands for both norms of a layer."""
    count = 2 if layer == "layernorm" else 1
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        points, times = _curve(profile.name, name, layer)
        if len(points):
            profiled = _small_width(name, layer)
            fixed = float(times.min())
            growth = _continued(tokens, points, times) - fixed
            return np.asarray(count * fixed + growth * (width / profiled))
    return np.asarray(count * KERNEL_S + tokens * (width * _TRAFFIC[layer] * 2 / profile.bandwidth_bytes_per_s))


def _small_width(name: str, layer: str) -> int:
    model = find_model(name)
    if layer == "layernorm":
        return model.hidden
    if layer == "rotary_emb":
        return model.qkv_width
    return model.intermediate if layer == "act_fn" else (model.heads + model.kv_heads) * model.head_dim


def _head(profile: DeviceProfile, model: ModelGeometry, gemm: Gemm) -> Array:
    sampled = np.arange(MAX_SAMPLED + 1, dtype=float)
    product = _continued(sampled, *gemm(model.vocab, model.hidden))
    sampler = SAMPLER_S + sampled * model.vocab * SAMPLER_BYTES_PER_LOGIT / profile.bandwidth_bytes_per_s
    head = product + sampler
    head[0] = 0.0
    return np.maximum.accumulate(head)


def _experts(profile: DeviceProfile, model: ModelGeometry) -> tuple[tuple[Array, Array], tuple[str, ...]]:
    """Fused experts by token count: the table of this very shape, else the roofline of the experts touched."""
    table = select(
        "moe",
        device=profile.name,
        hidden=model.hidden,
        expert_intermediate=model.expert_intermediate,
        experts=model.experts,
        experts_per_token=model.experts_per_token,
    ).to_pydict()
    if table["tokens"]:
        order = np.argsort(table["tokens"])
        times = np.array(table["time_us"], dtype=float)[order] * US
        return (np.array(table["tokens"], dtype=float)[order], times), ()
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536], dtype=float)
    share = model.experts_per_token / model.experts
    touched = model.experts * (1.0 - (1.0 - share) ** tokens) * model.expert_params * model.dtype_bytes
    work = 2.0 * tokens * model.experts_per_token * model.expert_params
    times = np.maximum(
        touched / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE),
        work / (profile.bf16_flops_per_s * COMPUTE_SHARE),
    )
    warning = f"experts of {model.name} were not profiled on {profile.name}: their time is a roofline estimate"
    return (tokens, times), (warning,)
