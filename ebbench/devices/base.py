"""Interface of a device: cost model, KV capacity and controller calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.errors import UnknownNameError, UsageError
from ebbench.records.warnings import RunWarning
from ebbench.spec.server import HostCosts, Speculative, parse_release
from vllm_eb.calibration import Calibration

if TYPE_CHECKING:
    from ebbench.devices.geometry import KvLayout, Mixer, ModelGeometry
    from ebbench.devices.profiles import DeviceProfile


# How the GPUs of one engine share a model.

BLOCK = 128
"""Rows and columns that share a scale in weights of type ``fp8_block``."""


COMPUTE_SHARE, BANDWIDTH_SHARE = 0.70, 0.80
"""Shares of the data-sheet rates that large kernels reach; those of the profiled GPUs are within 10 %."""


@dataclass(frozen=True)
class Parallel:
    """``dp`` units of ``tp`` GPUs each. ``ep`` is 1 (every unit holds all experts) or tp x dp (each GPU holds some).

    ``link``: the kind of link between the GPUs; "" is the device's default link.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    link: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the engine."""
        return self.tp * self.dp

    @property
    def single(self) -> bool:
        """Whether the engine has a single GPU."""
        return self.gpus == 1

    def check(self, model: ModelGeometry) -> None:
        """Raise UsageError if the model cannot be divided in this way; vLLM refuses it as well."""
        for mixer in model.mixers:
            self._check_heads(model.name, mixer)
        self._check_blocks(model)
        if self.ep > 1 and not model.experts:
            raise UsageError(
                f"{model.name} has no experts to spread over ep={self.ep}; leave ep out, or choose an MoE model"
            )
        if self.ep > 1 and model.experts % self.ep:
            raise UsageError(f"{model.name} has {model.experts} experts, which ep={self.ep} cannot share evenly")

    def _check_heads(self, name: str, mixer: Mixer) -> None:
        if mixer.kind == "index":
            return
        kept = mixer.kv_heads or 1
        fewer, more = sorted((self.tp, kept))
        if mixer.inputs and self.tp > kept:
            raise UsageError(
                f"{name} has layers with {kept} KV heads, and vLLM divides the inputs of their convolutions among no "
                f"more GPUs; use a tp of at most {kept}"
            )
        if mixer.heads % self.tp or more % fewer:
            raise UsageError(
                f"{name} has {mixer.heads} attention and {kept} KV heads, which {self.tp} GPUs cannot "
                f"share evenly; use a tp that divides {mixer.heads} and divides {kept} or is a multiple of it"
            )

    def _check_blocks(self, model: ModelGeometry) -> None:
        """Raise UsageError where a slice of weights with a scale per block would end within a block."""
        what, width = ("an expert", model.expert_intermediate) if model.experts else ("the MLP", model.intermediate)
        whole = self.tp == 1 or (model.experts and self.ep > 1)
        if whole or model.dtype_of_experts != "fp8_block" or width % (self.tp * BLOCK) == 0:
            return
        remedy = ", ep over the same GPUs" if model.experts else ""
        raise UsageError(
            f"{what} of {model.name} has a width of {width:,}, of which {self.tp} GPUs would have {width / self.tp:g} "
            f"each: no multiple of the {BLOCK} that share a scale in FP8, so vLLM does not start; use a smaller "
            f"tp{remedy} or weights with one scale per tensor"
        )


SINGLE = Parallel()


# The arguments a device is loaded with, and what vLLM's version takes from its memory at the start, before the KV
# cache. The rules were read in vLLM's source code, the sizes are from its logs: reports/fidelity/notes/kv-cache.md.

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
    experts. ``marlin``: experts in MXFP4 are Marlin's on Hopper, too; Triton's kernels came with 0.12 (pull request
    28788).
    """

    since: tuple[int, ...]
    gpu_memory_utilization: float
    dense: Trial
    experts: Trial
    marlin: bool = False


STARTS = (
    # With FlashInfer, as in the official images; without it as in 0.11.1, whose sampler takes it only if an environment
    # variable asks for it (vLLM's pull request 26859, after 0.11.0). Of 0.8 the last, 0.8.5, was read.
    StartUp((0, 8), 0.90, FUSED, FUSED, marlin=True),
    StartUp((0, 11, 1), 0.90, SORTS, SORTS, marlin=True),
    StartUp((0, 12), 0.90, SORTS, SORTS),
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


def start_up(version: str = DEFAULT_VLLM) -> StartUp:
    """The rules of a version such as ``0.32`` or ``0.25.1``, or of ``eb-vllm``.

    Raises UsageError for versions whose rules are unknown.
    """
    if version == EB_VLLM:
        return _OF_EB_VLLM
    release = parse_release(version)
    if release is None:
        raise UsageError(f"--vllm-version must be like {DEFAULT_VLLM} or 0.25.1, not {version!r}")
    if release < STARTS[0].since or release[:2] > NEWEST:
        oldest, newest = (".".join(map(str, release_numbers)) for release_numbers in (STARTS[0].since, NEWEST))
        raise UsageError(
            f"how vLLM {version} sizes its KV cache is not known here, {oldest} to {newest} are; take the nearest of "
            "them, or give the size with --num-kv-blocks"
        )
    return [rules for rules in STARTS if rules.since <= release][-1]


QUANTIZATIONS = ("fp8",)


MOE_BACKENDS = ("auto", "marlin")


@dataclass(frozen=True)
class DeviceRequest:
    """A GPU serving a model, or one unit of several GPUs: the arguments of :func:`ebbench.devices.loader.load_device`.

    ``cost``: auto (the best available), table, linear or roofline. ``async_scheduling``: vLLM's (default since 0.14);
    host work overlaps with the GPU's. ``eager``: a server without CUDA graphs. ``host`` replaces the profile's
    constants. ``parallel``: how GPUs share the model. ``quantization`` and ``kv_cache_dtype``: vLLM's (fp8).
    ``kv_tokens``: the KV cache that a server reports, in place of the estimate. ``vllm_version``: the version by whose
    rules the KV cache is sized, None: the default one. ``speculative``: the server drafts tokens. ``assume_kernels``: a
    roofline stands for kernels that were not measured, with a caveat. ``moe_backend``: vLLM's kernels of experts, auto
    or marlin, which is told apart for experts in MXFP4. ``prefix_caching``: a sequence keeps two states,
    without it one. The other settings only affect the cache's size, too; None is the profile's value, of
    ``gpu_memory_utilization`` the version's.
    """

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
    speculative: Speculative | None = None
    assume_kernels: bool = False
    prefix_caching: bool = True
    moe_backend: str = "auto"

    @property
    def start(self) -> StartUp:
        """The rules of the version, with the kernels asked for."""
        start = start_up(self.vllm)
        return replace(start, marlin=True) if self.moe_backend == "marlin" else start

    @property
    def vllm(self) -> str:
        """The version by whose rules the KV cache is sized."""
        return self.vllm_version or DEFAULT_VLLM

    @property
    def memory_share(self) -> float:
        """The share of each GPU's memory that the server may use."""
        given = self.gpu_memory_utilization
        return self.start.gpu_memory_utilization if given is None else given


def quantised(model: ModelGeometry, quantization: str | None, kv_cache_dtype: str) -> ModelGeometry:
    """The model with weights and KV cache converted by ``--quantization`` and ``--kv-cache-dtype``.

    vLLM's quantisation at load time has one scale per tensor; a model whose weights are already quantised keeps them.
    Raises UnknownNameError, or UsageError for weights that cannot be quantised again.
    """
    from ebbench.devices.geometry import KV_DTYPES, WEIGHT_BITS

    if quantization is not None and quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization that is modelled", quantization, QUANTIZATIONS)
    kv = {"fp8_e4m3": "fp8", "auto": model.kv_dtype}.get(kv_cache_dtype, kv_cache_dtype)
    if kv not in WEIGHT_BITS or kv not in KV_DTYPES:
        raise UnknownNameError("KV cache dtype", kv_cache_dtype, KV_DTYPES)
    if model.own_pages and kv != model.kv_dtype:
        raise UsageError(f"{model.name} keeps its KV cache in a format of {model.kv_dtype} alone; leave out {kv}")
    if quantization is None or model.weight_dtype.startswith(quantization):
        return replace(model, kv_dtype=kv)
    if not replace(model, kv_dtype="bfloat16").plain:
        raise UsageError(
            f"the weights of {model.name} are in {model.dtype_of_experts} already; leave out --quantization"
        )
    return replace(model, weight_dtype=quantization, attention_dtype="", expert_dtype="", kv_dtype=kv)


class StepShape(NamedTuple):
    """Composition of one engine step, the only input of a cost model.

    ``prefill``: ``(chunk_tokens, context_tokens)`` per prefilling sequence: tokens computed in this step, and tokens in
    the KV cache before it. ``decode_kv_tokens``: sum of the contexts of decoding sequences (KV tokens read by
    attention). ``sampled_seqs``: number of sequences that produce a token: all decodes and the prefills that complete.
    ``draft_tokens``: drafted tokens that the decodes verify, each one token of the step more; contexts include them.
    ``next_drafts``: tokens per sequence drafted in this step for the next one; None: as many as the drafter can.
    """

    prefill: tuple[tuple[int, int], ...]
    decode_seqs: int
    decode_kv_tokens: int
    sampled_seqs: int
    draft_tokens: int = 0
    next_drafts: int | None = None


@dataclass(frozen=True)
class Drafter:
    """What drafts the tokens of speculative decoding, in parts of the target model: ``passes`` per step, each of
    ``layer_share`` of its layers (``layers`` of them with attention) and of ``head_share`` of its language head. The
    first pass computes all tokens of the step, each further one a token per sequence. ``kind``: the place, among the
    target's kinds of layers, of the one that it has."""

    passes: int
    layers: int
    layer_share: float
    head_share: float
    kind: int = 0


class CostModel(Protocol):
    """Time of one engine step. It must be a pure function of the shape and take at most 10 us."""

    def step_s(self, shape: StepShape) -> float:
        """Time (s) from the start of the step to its sampled tokens."""
        ...


@runtime_checkable
class PassCost(CostModel, Protocol):
    """A cost model that also knows the duration of a pass of several units with shared experts."""

    def pass_s(self, shapes: Sequence[StepShape], units: int) -> float:
        """Time (s) of one pass of ``units`` units; ``shapes``: those of the units that have requests."""
        ...


@dataclass(frozen=True)
class Device:
    """A GPU (or CPU) serving a model, as an engine sees it.

    ``profile`` and ``geometry``: what the cost model was built from; ``request``: the arguments it was loaded with;
    None for a device made by hand. Topologies with several GPUs per unit need them and must not look them up by name: a
    model read from a config.json has no known name. ``costs_known`` False: ``calibration`` is a placeholder.
    ``kv_capacity_tokens`` 0: unknown. ``identity``: what tells it from others of its name, by name
    (:mod:`ebbench.devices.profiles`). ``kv_layout``: how blocks are given to layers that keep a window or a state; None
    where every layer keeps every token.
    """

    name: str
    model: str
    cost: CostModel
    kv_capacity_tokens: int
    calibration: Calibration
    provenance: str
    warnings: tuple[RunWarning, ...] = field(default=())
    profile: DeviceProfile | None = None
    geometry: ModelGeometry | None = None
    request: DeviceRequest | None = None
    costs_known: bool = True
    identity: tuple[tuple[str, str], ...] = ()
    kv_layout: KvLayout | None = None

    @property
    def sources(self) -> str:
        """Where its numbers come from: those of the steps, and of the KV cache where its size is an estimate."""
        if self.request is None or self.request.kv_tokens is not None:
            return self.provenance
        return f"{self.provenance}; KV cache as vLLM {self.request.vllm} sizes it"
