"""Time of the product by which a layer of experts chooses: in 16 bits, or in 32 bits on a few models.

vLLM keeps the router's weights of some models in 32 bits and converts what it gets (``params_dtype=torch.float32``).
Such a product has no tensor cores, unless the server was told to compute with 19 of the 32 bits
(``VLLM_FLOAT32_MATMUL_PRECISION=high``), which is the type ``tf32`` here. Nothing is fitted: times are those that
vllm-project/vllm, pull request 47973, measured on GB200 for 6,144 inputs and 256 experts, conversion included. Every
core multiplies along all inputs, one after the other, so all but the launches grow with them; which of these GPUs it
is matters little. With 3,072 inputs, as MiniMax-M2.5 has them, that gives 34 and 37 us for 32 and 128 tokens; the same
repository's pull request 41332 took 30 to 43 us off each layer of that model on B200 by a router in 16 bits.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ebbench.devices.base import COMPUTE_SHARE
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.profiles import DATA
from ebbench.devices.surfaces import Array
from ebbench.foreign.documents import read_toml
from ebbench.spec.server import parse_release

FLOAT32, TF32 = "float32", "tf32"
INPUTS, EXPERTS = 6144, 256
LAUNCHES_S = 5e-6
"""Of the conversion and of the product: what no token adds to."""


class _Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of ``data/routers.toml``."""

    tokens: tuple[int, ...]
    times_us: tuple[float, ...]
    flops_per_s: float


_TIMES = msgspec.convert(read_toml(DATA / "routers.toml"), dict[str, _Measured])
_OWN_KERNEL = frozenset({(3072, 256), (6144, 128), (6144, 256)})
_FEW_TOKENS = 32
HOPPER, _BLACKWELL = frozenset({"h100", "h100-pcie", "h200"}), frozenset({"b200", "b300", "gb200", "gb300"})
_FEW_SINCE, _ALL_SINCE = (0, 23), (0, 26)
"""vLLM has kernels of its own for routers in 32 bits: up to 32 tokens of these shapes (pull request 38445, merged after
21 May 2026), on Blackwell for any number (47973, July 2026). They are as fast as a product in 16 bits."""


def router_s(model: ModelGeometry, device: str, vllm: str, tokens: Array, in_16_bits: Array) -> Array:
    """Time (s) of one router by ``tokens`` of one unit; ``in_16_bits``: if it were in 16 bits."""
    measured = _TIMES.get(model.router_dtype)
    if measured is None:
        return in_16_bits
    wide = np.interp(tokens * (model.experts / EXPERTS), measured.tokens, measured.times_us) * 1e-6
    operations = tokens * (2.0 * model.hidden * model.experts)
    time = LAUNCHES_S + (wide - LAUNCHES_S) * (model.hidden / INPUTS)
    fastest = LAUNCHES_S + operations / (measured.flops_per_s * COMPUTE_SHARE)
    time = np.asarray(np.maximum(np.maximum(time, in_16_bits), fastest))
    release = parse_release(vllm)
    if release is None:
        return time
    if device in _BLACKWELL and release >= _ALL_SINCE:
        return in_16_bits
    own = device in HOPPER | _BLACKWELL and (model.hidden, model.experts) in _OWN_KERNEL and release >= _FEW_SINCE
    return np.asarray(np.where(tokens <= _FEW_TOKENS, in_16_bits, time)) if own else time
