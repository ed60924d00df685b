"""Time of one layer's fused experts by token count, on one GPU or divided among several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ebbench.devices.attention import Array
from ebbench.devices.geometry import WEIGHT_BITS, ModelGeometry
from ebbench.devices.kerneltables import select
from ebbench.devices.parallel import Parallel
from ebbench.devices.profiles import DeviceProfile
from ebbench.devices.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE

US = 1e-6
_TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536], dtype=float)
_TABLE_BITS = {"w4a16_mxfp4": 4.25, "w4a8_mxfp4_mxfp8": 4.25, "bfloat16": 16.0}
"""Bits per weight in a table's type, with its scales; 8 for the others."""


class Shape(NamedTuple):
    """The experts of one layer: widths, their number, and how many of them a token uses."""

    hidden: int
    intermediate: int
    experts: int
    per_token: int
    matrices: int = 3  # of an expert: two in, of which one is the gate, and one out

    @property
    def params(self) -> float:
        """Parameters of one expert."""
        return float(self.matrices * self.hidden * self.intermediate)

    def distance(self, other: Shape) -> float:
        """How far the shapes are apart: the sum of the logarithms of their ratios."""
        pairs = ((self.params, other.params), (self.experts, other.experts), (self.per_token, other.per_token))
        return float(sum(abs(np.log(one / two)) for one, two in pairs))

    def __str__(self) -> str:
        return f"{self.per_token} of {self.experts} experts of {self.hidden} x {self.intermediate}"


def expert_times(
    profile: DeviceProfile, model: ModelGeometry, shape: Parallel
) -> tuple[tuple[Array, Array], tuple[str, ...]]:
    """(token counts, seconds) of one GPU's experts, and warnings. Tokens are those of all GPUs of the engine.

    With ``ep`` each GPU computes its own experts for the tokens of all GPUs; otherwise its slice of every expert.
    Sources in order of preference: the table of this shape and division; that of one GPU, divided except for its fixed
    part; the nearest measured shape, scaled; the roofline of the experts used.
    """
    tp, ep = (1, shape.ep) if shape.ep > 1 else (shape.tp, 1)
    matrices = round(model.expert_params / (model.hidden * model.expert_intermediate))
    wanted = Shape(model.hidden, model.expert_intermediate, model.experts, model.experts_per_token, matrices)
    dtype, parts = model.dtype_of_experts, tp * ep
    said: tuple[str, ...] = ()
    if dtype == MXFP4 and profile.mxfp4_experts:
        dtype, said = profile.mxfp4_experts, (MXFP8_ACTIVATIONS.format(device=profile.name),)
    if found := _measured(profile.name, wanted, dtype, tp, ep):
        return found, said
    if whole := _measured(profile.name, wanted, dtype, 1, 1):
        warning = (
            f"experts of {model.name} divided among {parts} {profile.name} were not measured: those of one GPU, all "
            f"but their fixed part divided by {parts}"
        )
        return _divided(*whole, parts), (warning, *said)
    bits = WEIGHT_BITS[model.dtype_of_experts]
    for division in dict.fromkeys(((tp, ep), (1, 1))):
        if near := _nearest(profile.name, wanted, dtype, *division):
            other, kind = near
            tokens, times = scaled_times(profile, wanted, bits, other, kind, division)
            warning = (
                f"experts of {model.name} ({wanted}) were not measured on {profile.name}: those of {other}, scaled by "
                f"their traffic and arithmetic; {LEANING}"
            )
            found = (tokens, times) if division == (tp, ep) else _divided(tokens, times, parts)
            return found, (warning, *said)
    warning = f"experts of {model.name} were not profiled on {profile.name}: their time is a roofline estimate"
    return (_TOKENS, roofline_s(profile, wanted, bits, _TOKENS) / parts), (warning,)


MXFP4 = "w4a16_mxfp4"
MXFP8_ACTIVATIONS = (
    "experts in MXFP4 compute with activations in MXFP8 on {device}, as vLLM's recipe for gpt-oss sets it "
    "(VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1); without it steps of gpt-oss take 10 to 50 % longer"
)
LEANING = "shapes measured there are off by 10 to 20 % in the median when scaled so from each other, with any batch"
"""Left one out of h100, h200, b200, l40s and rtx-pro-6000: 9 to 18 % (MXFP4, which has three shapes: 18 to 29 %), one
in ten by 26 to 64 %, in neither direction. A roofline alone is 1.5 to 9 times too fast for few tokens."""


def scaled_times(
    profile: DeviceProfile, wanted: Shape, bits: float, other: Shape, dtype: str, division: tuple[int, int]
) -> tuple[Array, Array]:
    """Times of a measured shape, all but their fixed part in the ratio of both shapes' rooflines.

    The fixed part is what the measured times exceed their roofline by at least: launches, sorting tokens by expert.
    """
    found = _measured(profile.name, other, dtype, *division)
    assert found is not None  # a shape of the table
    tokens, times = found
    parts = division[0] * division[1]
    ours = roofline_s(profile, wanted, bits, tokens) / parts
    theirs = roofline_s(profile, other, _TABLE_BITS.get(dtype, 8.0), tokens) / parts
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
    table = select(
        "moe", device=device, dtype=dtype, hidden=shape.hidden, expert_intermediate=shape.intermediate,
        experts=shape.experts, experts_per_token=shape.per_token, tp=tp, ep=ep,
    ).to_pydict()  # fmt: skip
    if not table["tokens"]:
        return None
    order = np.argsort(table["tokens"])
    return np.array(table["tokens"], dtype=float)[order], np.array(table["time_us"], dtype=float)[order] * US


def roofline_s(profile: DeviceProfile, shape: Shape, bits: float, tokens: Array) -> Array:
    """Time (s) of the experts on one GPU: the longer of reading those that ``tokens`` use and their arithmetic."""
    touched = shape.experts * (1.0 - (1.0 - shape.per_token / shape.experts) ** tokens) * shape.params * bits / 8
    work = 2.0 * tokens * shape.per_token * shape.params
    return np.maximum(
        touched / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE),
        work / (profile.bf16_flops_per_s * COMPUTE_SHARE),
    )
