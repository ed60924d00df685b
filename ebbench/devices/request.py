"""The arguments a device is loaded with, and what vLLM's version takes from its memory at the start."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices.geometry import KV_DTYPES, WEIGHT_BITS, ModelGeometry
from ebbench.devices.parallel import SINGLE, Parallel
from ebbench.errors import UnknownNameError, UsageError
from ebbench.spec.server import HostCosts
from ebbench.spec.speculative import Speculative

# What vLLM takes from the memory of a GPU at its start, before the KV cache, by version.
#
# The rules were read in vLLM's source code, the sizes are from its logs: reports/fidelity/notes/kv-cache.md.

NEWEST = (0, 33)


@dataclass(frozen=True)
class Trial:
    """What a model runner takes for its trial run.

    ``logit_bytes``: per logit of the ``max_num_seqs`` sequences that it samples. ``graph_bytes``: what it reckons for
    CUDA graphs; 0: they are taken from what the KV cache leaves. ``heads``: how often it holds the language head
    beside the weights. ``at_once``: the step's memory is still held when its sequences are sampled.
    """

    logit_bytes: float
    graph_bytes: float = 0.0
    heads: int = 0
    at_once: bool = False


SORTS, FUSED, FILTERS = Trial(38.3), Trial(10.0), Trial(14.0)
"""The first runner: top-k and top-p by sorting; by FlashInfer; by a kernel that filters in place."""
FILTERS_GRAPHS = Trial(14.0, 0.4e9)
SECOND, SECOND_GRAPHS, SECOND_FULL = Trial(2.0, heads=1), Trial(2.0, 0.53e9, 1), Trial(9.0, 0.53e9, 1)
"""The second runner draws from the 16-bit logits; it filters in its trial run, too, from 0.33 on. Its logs show memory
of the size of the language head; what for is not known."""


@dataclass(frozen=True)
class StartUp:
    """The rules of the versions from ``since`` on.

    ``gpu_memory_utilization``: vLLM's default. ``dense``, ``experts``: the trial run of dense models and of mixtures of
    experts.
    """

    since: tuple[int, int]
    gpu_memory_utilization: float
    dense: Trial
    experts: Trial


STARTS = (
    # With FlashInfer, as in the official images; without it as in 0.11. Of 0.8 the last, 0.8.5, was read.
    StartUp((0, 8), 0.90, FUSED, FUSED),
    StartUp((0, 11), 0.90, SORTS, SORTS),
    StartUp((0, 17), 0.90, FILTERS, FILTERS),
    StartUp((0, 20), 0.92, FILTERS_GRAPHS, FILTERS_GRAPHS),
    StartUp((0, 25), 0.92, SECOND, FILTERS_GRAPHS),
    StartUp((0, 29), 0.92, SECOND_GRAPHS, SECOND_GRAPHS),
    StartUp((0, 33), 0.92, SECOND_FULL, SECOND_FULL),
)

EB_VLLM = "eb-vllm"
"""The build of Zhang et al. (ICML 2026), of which no log is published. Their printed rates and TPOT give the size of
its KV cache (448,000 tokens behind table 3 on the RTX PRO 6000, within 2 % on the H200), and that size these constants:
5 % less KV cache than vLLM 0.11 would have."""
_INFERRED = Trial(45.0, 0.31e9, at_once=True)
_OF_EB_VLLM = StartUp((0, 0), 0.90, _INFERRED, _INFERRED)


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as ``0.32`` or ``0.25.1``; None for another text."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)*", version)
    return None if found is None else (int(found[1]), int(found[2]))


def start_up(version: str = DEFAULT_VLLM) -> StartUp:
    """The rules of a version such as ``0.32`` or ``0.25.1``, or of ``eb-vllm``.

    Raises UsageError for versions whose rules are unknown.
    """
    if version == EB_VLLM:
        return _OF_EB_VLLM
    release = release_of(version)
    if release is None:
        raise UsageError(f"--vllm-version must be like {DEFAULT_VLLM} or 0.25.1, not {version!r}")
    if not STARTS[0].since <= release <= NEWEST:
        oldest, newest = (".".join(map(str, one)) for one in (STARTS[0].since, NEWEST))
        raise UsageError(
            f"how vLLM {version} sizes its KV cache is not known here, {oldest} to {newest} are; take the nearest of "
            "them, or give the size with --num-kv-blocks"
        )
    return [rules for rules in STARTS if rules.since <= release][-1]


QUANTIZATIONS = ("fp8",)


@dataclass(frozen=True)
class DeviceRequest:
    """The arguments of :func:`ebbench.devices.loader.load_device`, which describes them."""

    name: str
    model: str
    cost: str = "auto"
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = True
    eager: bool = False
    host: HostCosts | None = None
    parallel: Parallel = SINGLE
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_tokens: int | None = None
    vllm_version: str | None = None
    drafts: Speculative | None = None

    @property
    def vllm(self) -> str:
        """The version by whose rules the KV cache is sized."""
        return self.vllm_version or DEFAULT_VLLM

    @property
    def memory_share(self) -> float:
        """The share of each GPU's memory that the server may use."""
        given = self.gpu_memory_utilization
        return start_up(self.vllm).gpu_memory_utilization if given is None else given


def quantised(model: ModelGeometry, quantization: str | None, kv_cache_dtype: str) -> ModelGeometry:
    """The model with weights and KV cache converted by ``--quantization`` and ``--kv-cache-dtype``.

    vLLM's quantisation at load time has one scale per tensor; a model whose weights are already quantised keeps them.
    Raises UnknownNameError, or UsageError for weights that cannot be quantised again.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization that is modelled", quantization, QUANTIZATIONS)
    kv = {"fp8_e4m3": "fp8", "auto": model.kv_dtype}.get(kv_cache_dtype, kv_cache_dtype)
    if kv not in WEIGHT_BITS or kv not in KV_DTYPES:
        raise UnknownNameError("KV cache dtype", kv_cache_dtype, KV_DTYPES)
    if quantization is None or model.weight_dtype.startswith(quantization):
        return replace(model, kv_dtype=kv)
    if not replace(model, kv_dtype="bfloat16").plain:
        raise UsageError(
            f"the weights of {model.name} are in {model.dtype_of_experts} already; leave out --quantization"
        )
    return replace(model, weight_dtype=quantization, attention_dtype="", expert_dtype="", kv_dtype=kv)
