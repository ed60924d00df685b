"""Time of everything in a step except attention, by token count, from kernel tables; collectives among GPUs too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices import library
from ebbench.devices.base import BANDWIDTH_SHARE, COMPUTE_SHARE, SINGLE, Parallel
from ebbench.devices.geometry import WEIGHT_BITS, Mixer, ModelGeometry, Product
from ebbench.devices.library import Shape, select, table_source
from ebbench.devices.profiles import DeviceProfile, Link, find_model
from ebbench.devices.routers import HOPPER, router_s
from ebbench.devices.surfaces import Array, increasing, lower_envelope, without_spikes
from ebbench.errors import UnknownNameError, UsageError
from ebbench.records.warnings import RunWarning, warning

GRAPH_TOKENS = 512  # vLLM captures CUDA graphs up to this many tokens per step; larger steps call collectives eagerly
_GRAPHS = (0, 1, 2, 4, *range(8, 256, 8), *range(256, GRAPH_TOKENS + 1, 16))
PADDED = tuple(_GRAPHS[bisect_left(_GRAPHS, tokens)] for tokens in range(GRAPH_TOKENS + 1))
"""Tokens that a step of so many computes: those of the next captured graph (vLLM 0.32, ``cudagraph_capture_sizes``)."""

SIZES = tuple(1 << power for power in range(10, 31))
"""Bytes at which the library is asked."""


@dataclass(frozen=True)
class Collectives:
    """Times (s) of collectives among ``gpus`` GPUs of ``profile`` over the link named ``link``."""

    profile: DeviceProfile
    link: str
    gpus: int

    @property
    def _link(self) -> Link:
        return self.profile.links[self.link]

    @property
    def _device(self) -> str:
        """The device whose tables are read."""
        return self.profile.collectives_from or self.profile.name

    @property
    def measured(self) -> bool:
        """Whether vLLM's all-reduce was measured on this device or its stand-in, link and number of GPUs."""
        return self._points("all_reduce", "graph") is not None

    @property
    def provenance(self) -> str:
        """The link, and the source of its times."""
        if self.measured:
            whose = f" of {self._device}" if self.profile.collectives_from else ""
            packaged = select("collective", device=self._device, link=self.link, gpus=self.gpus).num_rows
            text = table_source("collective") if packaged else f"{library.LABEL} (Apache-2.0)"
            return f"link {self.link} ({self._link.note}): {text}{whose}"
        return f"link {self.link} ({self._link.note}): {self._link.bytes_per_s / 1e9:g} GB/s, a formula{self._bounds}"

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """A warning if the times come from another device or from the formula."""
        group = {"gpus": self.gpus, "device": self.profile.name, "link": self.link}
        if self.measured:
            lent = (warning("collectives-lent", **group, taken_from=self._device),)
            return lent if self.profile.collectives_from else ()
        ring = {"bytes_per_s": self._link.bytes_per_s, "latency_s": self._link.latency_s}
        return (warning("collectives-formula", **group, **ring, bounds=self._bounds),)

    @property
    def _lower(self) -> list[Collectives]:
        """Measured collectives that cannot be slower: of fewer GPUs over this link, of as many over a faster one."""
        faster = [name for name, link in self.profile.links.items() if link.bytes_per_s > self._link.bytes_per_s]
        others = [replace(self, gpus=count) for count in (2, 4) if count < self.gpus]
        return [group for group in (*others, *(replace(self, link=name) for name in faster)) if group.measured]

    @property
    def _bounds(self) -> str:
        named = [f"on {group.gpus} GPUs" if group.link == self.link else f"over {group.link}" for group in self._lower]
        return f", and at least that measured {' and '.join(named)}" if named else ""

    def all_reduce_s(self, tokens: Array, token_bytes: float, *, eager: bool = False) -> Array:
        """All-reduce of ``tokens`` (an array of counts) of ``token_bytes`` per token; 0 for no tokens."""
        return self._by_tokens("all_reduce", tokens, token_bytes, eager)

    def all_gather_s(self, tokens: Array, token_bytes: float) -> Array:
        """All-gather: every GPU ends with the ``tokens`` of all."""
        return self._by_tokens("all_gather", tokens, token_bytes, True)

    def reduce_scatter_s(self, tokens: Array, token_bytes: float) -> Array:
        """Reduce-scatter: sums over GPUs of all ``tokens``, each GPU ending with its own."""
        return self._by_tokens("reduce_scatter", tokens, token_bytes, True)

    def _by_tokens(self, operation: str, tokens: Array, token_bytes: float, eager: bool) -> Array:
        size = tokens * token_bytes
        slow = self._seconds(operation, size, "eager")
        if eager or operation != "all_reduce":
            return slow
        return np.where(tokens <= GRAPH_TOKENS, self._seconds(operation, size, "graph"), slow)

    def _seconds(self, operation: str, size: Array, mode: str) -> Array:
        """Time of one call over ``size`` bytes."""
        points = self._points(operation, mode)
        if points is not None:
            sizes, times = points
            seconds = np.interp(size, sizes, times) * np.maximum(size / sizes[-1], 1.0)
        elif operation != "all_reduce":
            seconds = self._seconds("all_reduce", size / 2, mode)  # half the data of an all-reduce
        else:
            share = 2 * (self.gpus - 1) / self.gpus
            seconds = self._link.latency_s + share * size / self._link.bytes_per_s
        for group in () if self.measured else self._lower:
            seconds = np.maximum(seconds, group._seconds(operation, size, mode))
        return np.where(size > 0, seconds, 0.0)

    def _points(self, operation: str, mode: str) -> tuple[Array, Array] | None:
        sizes, times = _curve(
            "collective", "bytes", device=self._device, link=self.link, operation=operation, mode=mode, gpus=self.gpus
        )
        return (sizes, lower_envelope(times, 0)) if len(sizes) else self._from_library(operation)

    def _from_library(self, operation: str) -> tuple[Array, Array] | None:
        """Sizes and times by the library, which knows one link of each GPU, of a GPU that no packaged table has."""
        if self.link != next(iter(self.profile.links)) or select("collective", device=self._device).num_rows:
            return None
        curve = library.collective(self.profile, operation, self.gpus, SIZES)
        return None if curve is None or not curve.origin.exact else (curve.points, lower_envelope(curve.times, 0))


def choose_link(profile: DeviceProfile, wanted: str = "") -> str:
    """The link named ``wanted``, or the device's first.

    Raises UnknownNameError, or UsageError if the profile has none.
    """
    if wanted and wanted not in profile.links:
        raise UnknownNameError(f"link of {profile.name}", wanted, tuple(profile.links))
    if not profile.links:
        raise UsageError(
            f"the profile of {profile.name} names no link between its GPUs; add one to the device file, for example "
            '[links.pcie] with bytes_per_s = 25e9 and note = "PCIe 4 x16"'
        )
    return wanted or next(iter(profile.links))


# Time of one layer's fused experts by token count, on one GPU or divided among several.

_TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536], dtype=float)
_TABLE_BITS = {"w4a16_mxfp4": 4.25, "w4a8_mxfp4_mxfp8": 4.25, "bfloat16": 16.0}
"""Bits per weight in a table's type, with its scales; 8 for the others."""


def expert_times(
    profile: DeviceProfile, model: ModelGeometry, shape: Parallel, *, marlin: bool = False
) -> tuple[tuple[Array, Array], tuple[RunWarning, ...], tuple[library.Note, ...]]:
    """(token counts, seconds) of one GPU's experts by the tokens of all GPUs, warnings, what the library gave.

    With ``ep`` each GPU computes its own experts for the tokens of all GPUs; otherwise its slice of every expert.
    Sources in order of preference: the table of this shape and division; the library's (derived from other shapes of a
    type without any table); the table of one GPU, divided except for its fixed part; that of the nearest shape, scaled;
    the roofline of the experts used. ``marlin``: experts in MXFP4 are Marlin's, which on Hopper those of all models are
    but gpt-oss's, whose kernels the tables have.
    """
    tp, ep = (1, shape.ep) if shape.ep > 1 else (shape.tp, 1)
    matrices = round(model.expert_params / (model.hidden * model.expert_intermediate))
    wanted = Shape(model.hidden, model.expert_intermediate, model.experts, model.experts_per_token, matrices)
    dtype, parts = model.dtype_of_experts, tp * ep
    caveats: tuple[RunWarning, ...] = ()
    sized = wanted._replace(hidden=model.expert_hidden or model.hidden, matrices=model.mlp_matrices)
    on_hopper = dtype == MXFP4 and profile.name in HOPPER
    if (marlin and dtype == MXFP4) or (on_hopper and not model.experts_of_gpt_oss):
        named = {"model": model.name, "experts": str(wanted), "device": profile.name}
        if curve := marlin_times(profile, sized, tp, ep):
            named |= {"experts": f"{wanted}, Marlin's kernels"}
            scaled = warning("experts-scaled", **named, measured=str(MARLIN_MXFP4))
            return (curve.points, curve.times), (scaled,), ((f"experts of {model.name}", curve.origin),)
        if on_hopper:
            caveats = (warning("marlin-unmeasured", **named), *library.hint(profile))
    if dtype == MXFP4 and profile.mxfp4_experts:
        dtype, caveats = profile.mxfp4_experts, (*caveats, warning("mxfp8-activations", device=profile.name))
    if points := _measured(profile.name, wanted, dtype, tp, ep):
        return points, caveats, ()
    known = bool(shapes_measured(profile.name, dtype, 1, 1))
    if curve := library.experts(profile, sized, dtype, tp, ep, derived=not known):
        return (curve.points, curve.times), caveats, ((f"experts of {model.name}", curve.origin),)
    if whole := _measured(profile.name, wanted, dtype, 1, 1):
        divided = warning("experts-divided", model=model.name, device=profile.name, gpus=parts)
        return _divided(*whole, parts), (divided, *caveats), ()
    bits = WEIGHT_BITS[model.dtype_of_experts]
    for division in dict.fromkeys(((tp, ep), (1, 1))):
        if near := _nearest(profile.name, wanted, dtype, *division):
            similar, kind = near
            tokens, times = scaled_times(profile, wanted, bits, similar, kind, division)
            named = {"model": model.name, "experts": str(wanted), "device": profile.name}
            points = (tokens, times) if division == (tp, ep) else _divided(tokens, times, parts)
            return points, (warning("experts-scaled", **named, measured=str(similar)), *caveats), ()
    estimated = warning("experts-roofline", model=model.name, device=profile.name)
    return (_TOKENS, roofline_s(profile, wanted, bits, _TOKENS) / parts), (estimated, *library.hint(profile)), ()


MXFP4 = "w4a16_mxfp4"
MARLIN_MXFP4, MARLIN_INT4 = Shape(3584, 3072, 896, 16), Shape(7168, 2048, 384, 8)
"""Experts that the library measured with Marlin's kernels: Kimi K3's and Kimi K2's."""


def marlin_times(profile: DeviceProfile, wanted: Shape, tp: int, ep: int) -> library.Curve | None:
    """Experts in MXFP4 by Marlin's kernels, from those of Kimi K3; None where these were not measured.

    With as many tokens per expert, reading and arithmetic are in the ratio of all experts' parameters, which Marlin
    pads to multiples of 256 by 128. The fixed part is what one token takes on eight GPUs beyond reading its experts; it
    grows with the number of experts, as from Kimi K2's to Kimi K3's.
    """
    measured = library.experts(profile, MARLIN_MXFP4, MXFP4, tp, ep, derived=False)
    if measured is None or not measured.origin.exact:
        return None
    fixed = _marlin_fixed_s(profile, MARLIN_MXFP4, MXFP4, ep > 1)
    of_int4 = _marlin_fixed_s(profile, MARLIN_INT4, "int4", ep > 1)
    per_expert = (fixed - of_int4) / (MARLIN_MXFP4.experts - MARLIN_INT4.experts)
    padded = wanted._replace(
        hidden=-(-wanted.hidden // 256) * 256, intermediate=-(-wanted.intermediate // (128 * tp)) * 128 * tp
    )
    ratio = padded.experts * padded.params / (MARLIN_MXFP4.experts * MARLIN_MXFP4.params)
    used = wanted.per_token / wanted.experts / (MARLIN_MXFP4.per_token / MARLIN_MXFP4.experts)
    rest = continued(measured.points * used, measured.points, measured.times) - fixed
    own_fixed = max(of_int4 + per_expert * (wanted.experts - MARLIN_INT4.experts), 0.0)
    return measured._replace(times=own_fixed + np.maximum(rest, 0.0) * ratio)


def _marlin_fixed_s(profile: DeviceProfile, shape: Shape, dtype: str, by_experts: bool) -> float:
    ways = 8
    curve = library.experts(profile, shape, dtype, *((1, ways) if by_experts else (ways, 1)), derived=False)
    assert curve is not None  # measured wherever Kimi K3's are
    reading = shape.per_token * shape.params * WEIGHT_BITS[dtype] / 8 / ways / profile.bandwidth_bytes_per_s
    return float(curve.times[0] - reading)


def scaled_times(
    profile: DeviceProfile, wanted: Shape, bits: float, similar: Shape, dtype: str, division: tuple[int, int]
) -> tuple[Array, Array]:
    """Times of a measured shape, all but their fixed part in the ratio of both shapes' rooflines.

    The fixed part is what the measured times exceed their roofline by at least: launches, sorting tokens by expert.
    """
    curve = _measured(profile.name, similar, dtype, *division)
    assert curve is not None  # a shape of the table
    tokens, times = curve
    parts = division[0] * division[1]
    ours = roofline_s(profile, wanted, bits, tokens) / parts
    theirs = roofline_s(profile, similar, _TABLE_BITS.get(dtype, 8.0), tokens) / parts
    fixed = float(np.clip((times - theirs).min(), 0.0, times.min()))
    return tokens, fixed + (times - fixed) * ours / theirs


def shapes_measured(device: str, dtype: str, tp: int, ep: int) -> list[Shape]:
    """Shapes of experts in a type with this division that the device's table has."""
    table = select("moe", device=device, dtype=dtype, tp=tp, ep=ep)
    columns = (table[name].to_pylist() for name in ("hidden", "expert_intermediate", "experts", "experts_per_token"))
    return sorted({Shape(*row) for row in zip(*columns, strict=True)})


def _nearest(device: str, wanted: Shape, dtype: str, tp: int, ep: int) -> tuple[Shape, str] | None:
    """The measured shape nearest to ``wanted`` and its type: the same, or else 16 bits; None if there is neither."""
    for kind in dict.fromkeys((dtype, "bfloat16")):
        if shapes := shapes_measured(device, kind, tp, ep):
            return nearest(wanted, shapes), kind
    return None


def nearest(wanted: Shape, shapes: Sequence[Shape]) -> Shape:
    """The shape with the least distance."""
    return min(shapes, key=wanted.distance)


def _divided(tokens: Array, times: Array, parts: int) -> tuple[Array, Array]:
    fixed = float(times.min())
    return tokens, fixed + (times - fixed) / parts


def _measured(device: str, shape: Shape, dtype: str, tp: int, ep: int) -> tuple[Array, Array] | None:
    points = _curve(
        "moe", device=device, dtype=dtype, hidden=shape.hidden, expert_intermediate=shape.intermediate,
        experts=shape.experts, experts_per_token=shape.per_token, tp=tp, ep=ep,
    )  # fmt: skip
    return points if len(points[0]) else None


def _curve(kind: str, by: str = "tokens", **key: str | int) -> tuple[Array, Array]:
    """What a table has under ``key``, in rising order of the column ``by``, with times in s."""
    table = select(kind, **key).to_pydict()
    order = np.argsort(table[by])
    return np.array(table[by], dtype=float)[order], np.array(table["time_us"], dtype=float)[order] * US


def roofline_s(profile: DeviceProfile, shape: Shape, bits: float, tokens: Array) -> Array:
    """Time (s) of the experts on one GPU: the longer of reading those that ``tokens`` use and their arithmetic."""
    touched = shape.experts * (1.0 - (1.0 - shape.per_token / shape.experts) ** tokens) * shape.params * bits / 8
    work = 2.0 * tokens * shape.per_token * shape.params
    return np.maximum(
        touched / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE),
        work / (profile.bf16_flops_per_s * COMPUTE_SHARE),
    )


US = 1e-6
KERNEL_S = 2.5e-6  # a small element-wise kernel of any size (LLMServingSim: 2.0 to 3.1 us on both GPUs)
SAMPLER_BYTES_PER_LOGIT = 10.0  # greedy: cast, log-probabilities, argmax (fits LLMServingSim's sampler within 5 %)
SAMPLER_S = 10e-6
MAX_TOKENS = 65_536
MAX_SAMPLED = 8_192
GRID_MIN_SIZE = 512  # smallest width in the tables of products
MIN_PRODUCTS = 1000  # rows of a usable grid; fewer are only single sizes
_ROLES = {"qkv_proj": "qkv", "o_proj": "out", "gate_up_proj": "gate_up", "down_proj": "down"}

Gemm = Callable[[int, int], tuple[Array, Array]]


class StepArrays(NamedTuple):
    """Times (s) of a step on one GPU of an engine, without attention.

    ``dense``: of all layers by the unit's tokens, with the collectives of its ``tp`` GPUs. ``head``: by the unit's
    sampled sequences. ``experts``: of all layers by the tokens of all units, with their exchange; None if a unit's
    experts process only its own tokens and are part of ``dense``. ``notes``: what the library gave.
    """

    dense: Array
    head: Array
    experts: Array | None
    warnings: tuple[RunWarning, ...]
    provenance: str  # of the connection between the GPUs; "" for one GPU
    notes: tuple[library.Note, ...]


def step_arrays(
    profile: DeviceProfile,
    model: ModelGeometry,
    shape: Parallel = SINGLE,
    *,
    eager: bool = False,
    whole: frozenset[str] = frozenset(),
    vllm: str = DEFAULT_VLLM,
    marlin: bool = False,
) -> StepArrays | None:
    """Everything except attention, for one GPU of ``shape``; None if the device has no tables of matrix products.

    Kernels are those of the slice on one GPU (:meth:`ModelGeometry.sliced`); sampling covers the whole vocabulary.
    ``whole``: kinds of layers whose projections belong to their attention. ``vllm``: the version, by which routers
    have kernels; ``marlin``: see :func:`expert_times`. Raises UsageError for a weight type without tables on this
    device.
    """
    part = model.sliced(shape.tp)
    tables = _all_products(profile, model)
    if tables is None:
        return None
    products, warnings, notes = tables
    tokens = np.arange(MAX_TOKENS + 1, dtype=float)
    experts = None
    if model.experts:
        (points, times), unmeasured, origins = expert_times(profile, model, shape, marlin=marlin)
        notes += origins
        flops_per_token = 2.0 * model.experts_per_token * model.expert_params / max(shape.ep, shape.tp)
        experts = _sustained(
            profile, continued(tokens, points, times), tokens * flops_per_token, model.dtype_of_experts
        )
        warnings += unmeasured
    joined = _collectives(profile, model, shape, tokens, eager)
    streams = library.streams(profile, model) if model.streams else None
    notes += () if streams is None else ((f"{model.streams} streams of hidden states", streams.origin),)
    work = _Work(profile, part, products, tokens, whole, vllm, streams)
    dense = work.layers(experts if shape.dp == 1 else None) + 3 * KERNEL_S + joined.unit
    dense[0] = 0.0
    return StepArrays(
        dense,
        _head(profile, model, part, products[model.head_dtype]) + joined.head,
        model.expert_layers * experts + joined.group if experts is not None and shape.dp > 1 else None,
        (*warnings, *joined.warnings),
        joined.provenance,
        notes,
    )


class _Work(NamedTuple):
    """What one GPU computes by tokens, without attention itself: projections, MLPs, norms and other small kernels."""

    profile: DeviceProfile
    part: ModelGeometry
    products: Mapping[str, Gemm]
    tokens: Array
    whole: frozenset[str] = frozenset()
    vllm: str = DEFAULT_VLLM
    streams: library.Curve | None = None

    def layers(self, experts: Array | None) -> Array:
        """Time (s) of all layers, with the time of one layer's ``experts`` if given."""
        part = self.part
        total = np.zeros(MAX_TOKENS + 1)
        for mixer in part.mixers:
            if mixer.kind in self.whole:
                continue
            time = self._products_s(mixer.products, part.dtype_of_attention) + self._beside_attention(mixer)
            total += mixer.layers * time
        dense = part.dense_intermediate if part.experts else part.intermediate
        total += (part.dense_layers if part.experts else part.mlp_layers) * self._mlp(dense)
        if part.experts:
            # One router, in 16 or 32 bits whatever the experts have.
            router = self._products_s((Product(part.experts, part.hidden),), "bfloat16")
            beside = self._mlp(part.shared_intermediate, activation=False)
            beside = beside + router_s(part, self.profile.name, self.vllm, self.tokens, router)
            if part.expert_hidden:
                ways = Product(part.expert_hidden, part.hidden), Product(part.hidden, part.expert_hidden)
                beside = beside + self._products_s(ways, part.weight_dtype)
            total += part.expert_layers * (beside if experts is None else beside + experts)
        norms = _small_kernel(self.profile, "layernorm", part.norms * part.hidden, self.tokens, part.norms)
        total += part.layers * norms
        return total if self.streams is None else total + part.layers * continued(self.tokens, *self.streams[:2])

    def _products_s(self, products: Sequence[Product], dtype: str) -> Array:
        total = np.zeros(MAX_TOKENS + 1)
        for product in products:
            points, times = self.products[dtype](product.columns, product.rows)
            work = self.tokens * (2.0 * product.params)
            # FP8 kernels are chosen by the number of tokens: on Hopper 32 take longer than 64, on servers too.
            time = continued(self.tokens, points, times, rising=not dtype.startswith("fp8"))
            total += _sustained(self.profile, time, work, dtype)
        return total

    def _mlp(self, inner: int, *, activation: bool = True) -> Array:
        """An MLP of this width; fused experts include their activation, and that of shared ones is small."""
        total = self._products_s(self.part.mlp_products(inner), self.part.weight_dtype)
        if activation and inner:
            total = total + _small_kernel(self.profile, "act_fn", inner, self.tokens, 1)
        return total

    def _beside_attention(self, mixer: Mixer) -> Array:
        """Rotary embedding and norms of queries and keys of one layer; of a gated delta rule its outputs, zeroed and
        normed, and the parts of its projections made ready."""
        total = np.zeros_like(self.tokens)
        if mixer.kind in ("state", "index"):
            return total + (3 * KERNEL_S if mixer.sizes else 0.0)
        queries, keys = mixer.heads * mixer.key_dim, max(mixer.kv_heads, 1) * mixer.key_dim
        values = max(mixer.kv_heads, 1) * mixer.value_dim
        total += _small_kernel(self.profile, "rotary_emb", queries + keys + values, self.tokens, 1)
        if self.part.qk_norm:
            total += _small_kernel(self.profile, "qk_norm", queries + keys, self.tokens, 1)
        return total


class _Joined(NamedTuple):
    """Collectives of a step: of a unit by its tokens, of all units by all tokens, of a unit by sampled sequences."""

    unit: Array
    group: Array
    head: Array
    warnings: tuple[RunWarning, ...]
    provenance: str


def _collectives(profile: DeviceProfile, model: ModelGeometry, shape: Parallel, tokens: Array, eager: bool) -> _Joined:
    """vLLM's collectives: one all-reduce after attention and one after the MLP of every layer, one after embedding.

    Norms of queries and keys over all heads add their two sums per token, in 32 bits, in one more per layer.
    For units that share experts, an all-gather before and a reduce-scatter after the experts replace the second one.
    The logits of the vocabulary's slices are gathered for sampling.
    """
    token_bytes = float(model.hidden * model.dtype_bytes)
    unit, group, head = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros(MAX_SAMPLED + 1)
    if shape.single:
        return _Joined(unit, group, head, (), "")
    link = choose_link(profile, shape.link)
    used: list[Collectives] = []
    shared = bool(model.experts) and shape.dp > 1
    if shape.tp > 1:
        within = Collectives(profile, link, shape.tp)
        used.append(within)
        mixing = sum(mixer.layers for mixer in model.mixers if mixer.kind != "index")
        count = mixing + (model.mlp_layers - model.expert_layers if shared else model.mlp_layers) + 1
        unit = count * within.all_reduce_s(tokens, token_bytes, eager=eager)
        if model.joint_norms:
            unit += mixing * within.all_reduce_s(tokens, 8.0, eager=eager)
        head = within.all_gather_s(np.arange(MAX_SAMPLED + 1, dtype=float), model.vocab * model.dtype_bytes)
    if shared:
        across = Collectives(profile, link, shape.gpus)
        used.append(across)
        exchange = across.all_gather_s(tokens, token_bytes) + across.reduce_scatter_s(tokens, token_bytes)
        group = model.expert_layers * exchange
    warnings = tuple(text for group_of_gpus in used for text in group_of_gpus.warnings)
    return _Joined(unit, group, head, warnings, used[-1].provenance if used else "")


def _all_products(
    profile: DeviceProfile, model: ModelGeometry
) -> tuple[dict[str, Gemm], tuple[RunWarning, ...], tuple[library.Note, ...]] | None:
    """Matrix products by the types of a model's weights, and in 16 bits, with warnings; None without any tables."""
    tables_by_dtype: dict[str, Gemm] = {}
    warnings: tuple[RunWarning, ...] = ()
    for dtype in dict.fromkeys((model.dtype_of_attention, model.weight_dtype, model.head_dtype)):
        tables = _products(profile, dtype)
        if tables is None:
            return None
        tables_by_dtype[dtype], tables_by_dtype["bfloat16"], caveats = tables
        warnings += caveats
    gemms = {dtype: _gemm_with_origin(profile, dtype)[1] for dtype in tables_by_dtype}
    notes = tuple((f"products in {dtype}", origin) for dtype, origin in gemms.items() if origin is not None)
    return tables_by_dtype, warnings, notes


def _gemm_with_origin(profile: DeviceProfile, dtype: str) -> tuple[Gemm | None, library.Origin | None]:
    """Matrix products with weights of ``dtype``: packaged, else the library's with their origin."""
    packaged = _gemm_tables(profile.name, dtype)
    return (packaged, None) if packaged is not None else library.products(profile, dtype)


def _products(profile: DeviceProfile, dtype: str) -> tuple[Gemm, Gemm, tuple[RunWarning, ...]] | None:
    """Matrix products with weights of ``dtype``, the same in 16 bits, and warnings; None without any tables."""
    plain = _gemm_tables(profile.name, "bfloat16") or _gemm_from_layers(profile.name)
    plain = plain or library.products(profile, "bfloat16")[0]
    if plain is None:
        return None
    if dtype == "bfloat16":
        return plain, plain, ()
    gemm, tensor = _gemm_with_origin(profile, dtype)[0], _gemm_with_origin(profile, "fp8")[0]
    if gemm is None and WEIGHT_BITS[dtype] < 8:
        return _of_fewer_bits(profile, plain, dtype), plain, (warning("fewer-bits", dtype=dtype, device=profile.name),)
    if gemm is not None and tensor is not None and dtype == "fp8_block":
        return _without_launch(gemm, tensor), plain, (warning("fp8-block-launch", device=profile.name),)
    if gemm is not None:
        return gemm, plain, ()
    gemm = tensor
    if gemm is None:
        raise UsageError(
            f"no kernels with {dtype} weights were measured on {profile.name}; use the model in 16 bits, or a device "
            "with FP8 tables (h100, h200, b200, b300, l40s, rtx-pro-6000)"
        )
    return gemm, plain, (warning("fp8-by-tensor", dtype=dtype, device=profile.name),)


def _of_fewer_bits(profile: DeviceProfile, plain: Gemm, dtype: str) -> Gemm:
    """Products with weights of 4 bits: reading takes its share of the time in 16 bits, arithmetic as long."""

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        points, measured = plain(n, k)
        times = without_spikes(measured)  # what reading takes is that of the smallest batch
        arithmetic = 2.0 * n * k * points / (profile.bf16_flops_per_s * COMPUTE_SHARE)
        read = times[0] * WEIGHT_BITS[dtype] / 16
        return points, np.maximum(arithmetic, times - (times[0] - read))

    return gemm


def _sustained(profile: DeviceProfile, times: Array, operations: Array, dtype: str) -> Array:
    """Products under sustained load: arithmetic takes ``gemm_factor`` times the tables' value.

    Only the arithmetic: a lower clock does not slow down the reading of weights. The tables were timed call by call.
    """
    if profile.gemm_factor == 1.0:
        return times
    rate = profile.bf16_flops_per_s * COMPUTE_SHARE * (1.0 if dtype == "bfloat16" else 2.0)
    return times + (profile.gemm_factor - 1.0) * np.minimum(operations / rate, times)


def continued(x: Array, points: Array, times: Array, *, rising: bool = True) -> Array:
    """Linear interpolation; beyond the last point with the mean slope of the last half of the measured range.

    A spike is noise; with ``rising`` a dip is, too: more tokens never take less time.
    """
    times = without_spikes(times)
    times = increasing(times, 0) if rising else times
    half = min(int(np.searchsorted(points, points[-1] / 2)), len(points) - 2)
    slope = (times[-1] - times[half]) / (points[-1] - points[half])
    return np.asarray(np.interp(x, points, times) + np.maximum(x - points[-1], 0.0) * slope)


@cache
def _gemm_tables(device: str, dtype: str) -> Gemm | None:
    """Matrix products from a grid of sizes: bilinear in the two widths at every measured token count."""
    table = select("gemm", device=device, dtype=dtype).to_pydict()
    if len(table["n"]) < MIN_PRODUCTS:
        return None
    widths = sorted(set(table["n"]))
    tokens = sorted(set(table["tokens"]))
    grid = np.full((len(tokens), len(widths), len(widths)), np.nan)
    at = (np.searchsorted(tokens, table["tokens"]), *(np.searchsorted(widths, table[side]) for side in ("n", "k")))
    grid[at] = np.array(table["time_us"]) * US
    # The largest products, which were not measured, follow from the neighbour's time per parameter.
    for _, i, j in np.argwhere(np.isnan(grid)):
        grid[:, i, j] = np.where(np.isnan(grid[:, i, j]), grid[:, i, j - 1] * widths[j] / widths[j - 1], grid[:, i, j])
    if dtype != "bfloat16":
        grid = without_spikes(grid)

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        rows = np.array([_bilinear(widths, plane, n, k) for plane in grid])
        narrower = min(n / widths[0], 1.0) * min(k / widths[0], 1.0)  # than the grid: all but the fixed part shrinks
        return np.array(tokens, dtype=float), rows.min() + (rows - rows.min()) * narrower

    return gemm


def _without_launch(block: Gemm, tensor: Gemm) -> Gemm:
    """Block-scaled products minus the time of a nearly empty call, at least those with one scale per tensor."""
    launch = float(block(GRID_MIN_SIZE, GRID_MIN_SIZE)[1].min())

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        points, times = block(n, k)
        return points, np.maximum(times - launch, np.interp(points, *tensor(n, k)))

    return gemm


def _bilinear(widths: list[int], plane: Array, n: int, k: int) -> float:
    i = min(max(int(np.searchsorted(widths, n, side="right")) - 1, 0), len(widths) - 2)
    j = min(max(int(np.searchsorted(widths, k, side="right")) - 1, 0), len(widths) - 2)
    beyond = max(n / widths[-1], 1.0) * max(k / widths[-1], 1.0)  # wider than the grid: proportional
    u = min(max((n - widths[i]) / (widths[i + 1] - widths[i]), 0.0), 1.0)
    v = min(max((k - widths[j]) / (widths[j + 1] - widths[j]), 0.0), 1.0)
    low = plane[i, j] * (1 - v) + plane[i, j + 1] * v
    high = plane[i + 1, j] * (1 - v) + plane[i + 1, j + 1] * v
    return float((low * (1 - u) + high * u) * beyond)


def _gemm_from_layers(device: str) -> Gemm | None:
    """Matrix products of one profiled model, scaled by parameters to other shapes (a GPU without a size grid)."""
    table = select("layer", device=device, tp=1).to_pydict()
    if not table["layer"]:
        return None
    reference = find_model(table["model"][0])
    products = [*reference.mixers[0].products, *reference.mlp_products(reference.intermediate)]
    widths = [(product.columns, product.rows) for product in products]
    shapes = dict(zip(_ROLES, widths, strict=True)) | {"lm_head": (reference.vocab, reference.hidden)}
    curves = {role: _curve("layer", device=device, model=reference.name, layer=role, tp=1) for role in shapes}

    def gemm(n: int, k: int) -> tuple[Array, Array]:
        role = min(shapes, key=lambda r: abs(np.log(n * k / (shapes[r][0] * shapes[r][1]))))
        points, times = curves[role]
        return points, times * (n * k / (shapes[role][0] * shapes[role][1]))

    return gemm


# Memory traffic per element and token of each small kernel, in elements; norms and rotary embedding find half of theirs
# in the L2 cache (within 15 % of LLMServingSim's timings on both its GPUs).
_TRAFFIC = {"layernorm": 2.0, "rotary_emb": 1.0, "act_fn": 3.0, "qk_norm": 1.0}


def _small_kernel(profile: DeviceProfile, layer: str, width: int, tokens: Array, count: int) -> Array:
    """``count`` equal element-wise kernels of one layer; ``width``: of all of them together."""
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        points, times = _curve("layer", device=profile.name, model=name, layer=layer, tp=1)
        if len(points):
            profiled = _small_width(name, layer)
            fixed = float(times.min())
            growth = continued(tokens, points, times) - fixed
            return np.asarray(count * fixed + growth * (width / profiled))
    return np.asarray(count * KERNEL_S + tokens * (width * _TRAFFIC[layer] * 2 / profile.bandwidth_bytes_per_s))


def _small_width(name: str, layer: str) -> int:
    model = find_model(name)
    if layer == "layernorm":
        return model.hidden
    if layer == "rotary_emb":
        return model.qkv_width
    return model.intermediate if layer == "act_fn" else (model.heads + model.kv_heads) * model.head_dim


def _head(profile: DeviceProfile, model: ModelGeometry, part: ModelGeometry, gemm: Gemm) -> Array:
    """The language head for the vocabulary's slice, and sampling over the whole vocabulary."""
    sampled = np.arange(MAX_SAMPLED + 1, dtype=float)
    product = continued(sampled, *gemm(part.vocab, model.hidden))
    product = _sustained(profile, product, sampled * (2.0 * part.vocab * model.hidden), model.head_dtype)
    sampler = SAMPLER_S + sampled * model.vocab * SAMPLER_BYTES_PER_LOGIT / profile.bandwidth_bytes_per_s
    head = product + sampler
    head[0] = 0.0
    return head
