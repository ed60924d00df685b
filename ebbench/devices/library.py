"""Measured kernel times: packaged tables, and aiconfigurator-core (extra ``tables``) for what these lack.

All times of the packaged tables are microseconds of one call on one GPU; attention is per layer. ``dtype``: type of the
weights, ``kv_dtype``: of the KV cache: bfloat16, fp8 (one scale per tensor) or fp8_block (one per 128 x 128 weights).

The library measured kernels under vLLM on many GPUs and interpolates between its measurements. A device asks it for the
points of its curves when it is loaded, never during a run. Kernels are described to it as its own models describe them,
in one JSON object each; quantization is that of the checkpoint, as :mod:`ebbench.devices.checkpoint_types` reads it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbench.devices.geometry import Mixer, ModelGeometry
from ebbench.devices.profiles import DATA, DeviceProfile
from ebbench.errors import DataError
from ebbench.installation import EXTRAS
from ebbench.records.warnings import LIBRARY_ABSENT, RunWarning, warning

_TEXT = pa.string()
_COUNT = pa.int32()


def _schema(*texts: str, counts: tuple[str, ...]) -> pa.Schema:
    fields = [pa.field(name, _TEXT, nullable=False) for name in texts]
    fields += [pa.field(name, _COUNT, nullable=False) for name in counts]
    return pa.schema([*fields, pa.field("time_us", pa.float32(), nullable=False)])


_HEADS = ("heads", "kv_heads", "head_dim")
SCHEMAS = {
    # A matrix product of (tokens x k) and (k x n).
    "gemm": _schema("device", "dtype", counts=("n", "k", "tokens")),
    # Attention of `seqs` one-token queries over `context` keys per query.
    "decode": _schema("device", "kv_dtype", counts=(*_HEADS, "seqs", "context")),
    # Causal attention of `seqs` prompts of `chunk` tokens, without cached tokens.
    "prefill": _schema("device", "kv_dtype", counts=(*_HEADS, "seqs", "chunk")),
    # Fused experts of one layer on one of `tp` GPUs that each hold a slice of every expert, or of `ep` GPUs that each
    # hold some experts; `tokens` are those of all GPUs.
    "moe": _schema(
        "device",
        "dtype",
        counts=("hidden", "expert_intermediate", "experts", "experts_per_token", "tp", "ep", "tokens"),
    ),
    # One layer's call by token count (per sequence for lm_head and sampler), with widths divided by `tp`.
    "layer": _schema("device", "model", "layer", counts=("tp", "tokens")),
    # Joint attention of one prompt chunk (after `before` cached tokens) and `seqs` decodes; 0 means absent.
    "mixed": _schema("device", counts=(*_HEADS, "chunk", "before", "seqs", "context")),
    # A collective among `gpus` GPUs of one server over one kind of link; `bytes` is the size of the whole tensor.
    # `mode` is graph (inside a CUDA graph) or eager.
    "collective": _schema("device", "link", "operation", "mode", counts=("gpus", "bytes")),
}


@cache
def kernel_table(kind: str) -> pa.Table:
    """The packaged table of one kind. Raises DataError if the file is invalid."""
    return read_table(DATA / "kernels" / f"{kind}.parquet", kind)


def read_table(path: Path, kind: str) -> pa.Table:
    """Read and check a kernel table.

    Raises DataError for a wrong column (and hence unit), a hole or a negative time.
    """
    schema = SCHEMAS[kind]
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None
    unknown = [name for name in table.column_names if name not in schema.names]
    missing = [name for name in schema.names if name not in table.column_names]
    if unknown or missing:
        raise DataError(
            f"{path}: column {(unknown or missing)[0]!r} is {'unknown' if unknown else 'missing'}; "
            f"a {kind} table has {', '.join(schema.names)}"
        )
    for name in schema.names:
        if table[name].null_count:
            raise DataError(f"{path}: column {name!r} has a hole")
    table = table.select(schema.names).cast(schema)
    if not pc.all(pc.greater(table["time_us"], 0.0)).as_py():
        raise DataError(f"{path}: column 'time_us' has a value that is not positive")
    return table


def select(kind: str, **equal: str | int) -> pa.Table:
    """Rows of a packaged table where the named columns equal the values."""
    table = kernel_table(kind)
    for name, value in equal.items():
        # Not an expression of pc.field: creating one imports pandas if installed, which takes half a second.
        table = table.filter(pc.equal(table[name], pa.scalar(value)))
    return table


def table_source(kind: str) -> str:
    """Source of a packaged table, with its licence."""
    metadata = pq.read_schema(DATA / "kernels" / f"{kind}.parquet").metadata
    return f"{metadata[b'source'].decode()} ({metadata[b'licence'].decode()})"


Array = npt.NDArray[np.float64]

NAME, VERSION = "aiconfigurator-core", "0.12.0"
LABEL = f"{NAME} {VERSION}"
SYSTEMS = {
    "rtx-pro-6000": "rtx_pro_6000_server",
    "l40s": "l40s",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "a100": "a100_sxm",
}
"""Our names of GPUs, and the library's."""
VLLM, VLLM_OF = "0.24.0", {"a100_sxm": "0.14.0"}
"""vLLM under which kernels were measured, and where it was another."""
SHARDING = "power_law_1.01"
"""How tokens are spread over experts in the measurements that are taken, as in the packaged tables."""

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 65536)
SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCH_TOKENS = 16_384
"""Largest number of tokens in prompts computed together from which the cost of a further prompt is taken."""

PRODUCTS = {"bfloat16": ("bfloat16",), "fp8": ("fp8",), "fp8_block": ("fp8_block",), "mxfp8": ("", "fp8_block"),
            "nvfp4": ("nvfp4", "int4_wo"), "int4": ("int4_wo",), "w4a16_mxfp4": ("", "int4_wo")}  # fmt: skip
EXPERTS = PRODUCTS | {name: (name,) for name in ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")}
"""Our names of weight types, and the library's: the same type, then those that may stand for it; "": it has none."""


class Origin(NamedTuple):
    """Where a kernel's times come from. ``exact``: measured for this kernel under the chosen vLLM; ``text`` says it."""

    exact: bool
    text: str


Product = Callable[[int, int], tuple[Array, Array]]
Note = tuple[str, Origin]
"""What was taken from the library, and where that has it from."""


def source(notes: Sequence[Note]) -> str:
    """What was taken from the library, for a provenance; "" if nothing was."""
    by_origin: dict[str, list[str]] = {}
    for what, origin in notes:
        by_origin.setdefault(origin.text, []).append(what)
    origins = [f"{', '.join(dict.fromkeys(named))} ({text})" for text, named in by_origin.items()]
    return f"{LABEL} (Apache-2.0): {'; '.join(origins)}" if origins else ""


def warnings(notes: Sequence[Note], device: str) -> tuple[RunWarning, ...]:
    """Warnings about kernels that were not measured as they are served."""
    unlike = [(what, origin.text) for what, origin in notes if not origin.exact]
    return tuple(
        warning("not-as-served", what=what, device=device, taken=taken) for what, taken in dict.fromkeys(unlike)
    )


def hint(profile: DeviceProfile) -> tuple[RunWarning, ...]:
    """How to get measured times, where the library has this GPU and is not installed."""
    if profile.name not in SYSTEMS or installed():
        return ()
    return (warning(LIBRARY_ABSENT, library=NAME, command=EXTRAS["tables"].command),)


class Curve(NamedTuple):
    """Times (s) at increasing counts."""

    points: Array
    times: Array
    origin: Origin


class Rows(NamedTuple):
    """Times (s) of one layer: of ``(sequences, context)`` decodes and of ``(prompts, tokens of each)`` prompts.

    ``following``: of a prompt's chunk after cached tokens, by ``(chunk, cached)``. ``module``: the projections of the
    layer are included.
    """

    decode: dict[tuple[int, ...], float]
    prompt: dict[tuple[int, ...], float]
    following: dict[tuple[int, ...], float]
    module: bool
    origin: Origin


@dataclass(frozen=True)
class Kernel:
    """One kernel of the library, with the engine that knows it."""

    engine: Any
    described: str
    is_prompt: bool
    origin: Origin

    def seconds(self, batch: int, length: int = 1, before: int = 0) -> float:
        """Time of ``batch`` sequences of ``length`` tokens each (of a decode: its context) after ``before`` cached."""
        rows = self.engine.evaluate_ops_json(self.described, self.is_prompt, batch, length, before, 1.0, None)
        return float(sum(row[1] for row in rows)) * 1e-3


def installed() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec("aiconfigurator_core") is not None


def products(profile: DeviceProfile, dtype: str) -> tuple[Product | None, Origin | None]:
    """Matrix products by columns and rows, with weights of ``dtype``: counts of tokens and times (s); None if they were
    not measured in this type."""

    @cache
    def kernel(columns: int, rows: int) -> Kernel | None:
        flags = {"scale_num_tokens": 1, "low_precision_input": False, "seq_split": 1, "below_grid_sol": False}
        sizes = {"n": columns, "k": rows, **flags}
        return _of_types(profile, PRODUCTS.get(dtype, ()), lambda name: [_op("Gemm", {**sizes, "quant_mode": name})])

    sample = kernel(1024, 1024)
    if sample is None:
        return None, None

    def product(columns: int, rows: int) -> tuple[Array, Array]:
        measured = kernel(columns, rows) or sample
        return np.array(TOKENS, dtype=float), np.array([measured.seconds(count) for count in TOKENS])

    return product, sample.origin


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
        return float(sum(abs(np.log(ours / theirs)) for ours, theirs in pairs))

    def __str__(self) -> str:
        return f"{self.per_token} of {self.experts} experts of {self.hidden} x {self.intermediate}"


def experts(profile: DeviceProfile, shape: Shape, dtype: str, tp: int, ep: int, *, derived: bool) -> Curve | None:
    """Fused experts of one layer on one GPU, by the tokens of all GPUs. With ``derived``, what was not measured in this
    shape is derived from other shapes measured under the same vLLM, before rows of another vLLM are taken."""
    described = {
        "hidden_size": shape.hidden, "inter_size": shape.intermediate,
        "topk": shape.per_token, "num_experts": shape.experts, "moe_tp_size": tp, "moe_ep_size": ep,
        "attention_dp_size": 1, "workload_distribution": SHARDING, "is_gated": shape.matrices == 3,
        "moe_backend": None, "enable_eplb": False, "is_context": False,
    }  # fmt: skip
    types = EXPERTS.get(dtype, ())
    kernel = _of_types(profile, types, lambda name: [_op("Moe", described | {"quant_mode": name})], derived=derived)
    if kernel is None:
        return None
    times = [kernel.seconds(count) for count in TOKENS]
    return Curve(np.array(TOKENS, dtype=float), np.array(times), kernel.origin)


def collective(profile: DeviceProfile, operation: str, gpus: int, sizes: Sequence[int]) -> Curve | None:
    """A collective among ``gpus`` GPUs of one server over its first link, by the bytes of the whole tensor."""
    width = 512  # elements of 16 bits per token: the library counts tokens
    if operation == "all_reduce":
        described = _op("CustomAllReduce", {"hidden_size": width, "tp_size": gpus, "quant": "half", "seq_split": 1})
    else:
        sized = {"hidden_size": float(width), "num_gpus": gpus, "dtype": "half", "operation": operation, "seq_split": 1}
        described = _op("Nccl", sized)
    kernel = _kernel(profile, [described])
    if kernel is None:
        return None
    times = [kernel.seconds(max(size // (2 * width), 1)) for size in sizes]
    return Curve(np.array(sizes, dtype=float), np.array(times), kernel.origin)


def mixer_rows(profile: DeviceProfile, model: ModelGeometry, mixer: Mixer, part: Mixer) -> Rows | None:
    """Layers of one kind on one GPU: ``mixer`` those of the whole model, ``part`` the slice of one GPU. None if they
    were not measured."""
    if part.sizes:
        return _delta_rows(profile, model, part)
    if mixer.kind == "compressed":
        return _compressed_rows(profile, model, mixer, part) if is_module(model, mixer) else None
    if is_module(model, mixer):
        types = dict.fromkeys((*PRODUCTS.get(model.dtype_of_attention, ())[:1], "bfloat16"))

        def module(phase: str) -> Kernel | None:
            name = {"latent": "Dsa" if mixer.window else "MlaModule", "sparse": "Msa"}[mixer.kind] + phase
            return _of_types(profile, tuple(types), lambda dtype: [_op(name, _module(model, mixer, part, dtype))],
                             prompt=phase == "Context")  # fmt: skip

        return _rows(module("Generation"), module("Context"), module=True)
    if not part.measured_alike:
        return None
    heads = {"n": part.heads, "n_kv": part.kv_heads, "head_size": part.head_dim, "window_size": 0,
             "kv_cache_dtype": model.kv_dtype, "lane_order": ["default"]}  # fmt: skip
    prompts = heads | {"fmha_quant_mode": "bfloat16", "use_qk_norm": False, "cp_size": 1}
    decode = _kernel(profile, [_op("GenerationAttention", heads)])
    return _rows(decode, _kernel(profile, [_op("ContextAttention", prompts)], prompt=True))


def is_module(model: ModelGeometry, mixer: Mixer) -> bool:
    """Whether the library measured the whole attention of a model of this shape, projections and all."""
    shape = (model.hidden, mixer.heads)
    if mixer.kind == "latent":
        return shape in (_SPARSE_LATENT if mixer.window else _LATENT)
    if mixer.kind == "compressed":
        return (*shape, model.dtype_of_attention) in _COMPRESSED
    return mixer.kind == "sparse" and shape == _BLOCK_SPARSE


# --- descriptions of kernels ------------------------------------------------------------------------------------


def _op(kind: str, described: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: {"name": kind, "scale_factor": 1.0, **described}}


_SPARSE_LATENT = {(7168, 128): "DeepseekV32ForCausalLM", (6144, 64): "GlmMoeDsaForCausalLM"}
_LATENT = ((7168, 128), (7168, 64))
_BLOCK_SPARSE = (6144, 64)
_COMPRESSED = ((4096, 64, "fp8_block"), (7168, 128, "fp8_block"))
"""Hidden size and heads of the models whose attention was measured as a whole, projections and all."""
_OF_V4 = {"architecture": "DeepseekV4ForCausalLM"}


def _compressed_rows(profile: DeviceProfile, model: ModelGeometry, mixer: Mixer, part: Mixer) -> Rows | None:
    """DeepSeek-V4's attention, projections, compressors and index included; a window alone is taken as HCA, as the
    library's own model takes it."""
    described = _OF_V4 | {
        "attn_kind": "Csa" if mixer.every == 4 else "Hca", "num_heads": part.heads, "native_heads": mixer.heads,
        "tp_size": mixer.heads // part.heads, "kv_cache_dtype": model.kv_dtype, "fmha_quant_mode": "bfloat16",
        "gemm_quant_mode": model.dtype_of_attention,
    }  # fmt: skip
    decode = _kernel(profile, [_op("Dsv4Generation", described)])
    return _rows(decode, _kernel(profile, [_op("Dsv4Context", described)], prompt=True), module=True)


def streams(profile: DeviceProfile, model: ModelGeometry) -> Curve | None:
    """What one layer takes to mix its streams of hidden states, before and after attention and MLP, by tokens."""
    described = _OF_V4 | {"hc_mult": model.streams, "hidden_size": model.hidden}
    kernel = _kernel(profile, [_op("Mhc", {"op": place, **described}) for place in ("pre", "post")])
    if kernel is None:
        return None
    return Curve(np.array(TOKENS, dtype=float), np.array([kernel.seconds(count) for count in TOKENS]), kernel.origin)


def _module(model: ModelGeometry, mixer: Mixer, part: Mixer, dtype: str) -> dict[str, Any]:
    """The module of a layer's whole attention, with projections in ``dtype``."""
    types = {"kv_cache_dtype": model.kv_dtype, "fmha_quant_mode": "bfloat16", "gemm_quant_mode": dtype}
    index = next((candidate for candidate in model.mixers if candidate.kind == "index"), mixer)
    if mixer.kind == "sparse":
        return types | {
            "num_heads": part.heads, "num_kv_heads": part.kv_heads, "hidden_size": model.hidden,
            "head_dim": mixer.key_dim, "v_head_dim": mixer.value_dim, "index_n_heads": index.heads,
            "index_head_dim": index.key_dim, "index_topk": mixer.window, "block_size": 128,
            "dsa_architecture": "GlmMoeDsaForCausalLM", "dsa_scale_k": 1.0,
        }  # fmt: skip
    if not mixer.window:
        return types | {"num_heads": part.heads, "native_num_heads": mixer.heads}
    return types | {
        "num_heads": part.heads, "architecture": _SPARSE_LATENT[model.hidden, mixer.heads], "index_topk": mixer.window,
        "cp_size": 1, "full_frac": min(index.layers / mixer.layers, 1.0),
        "attn_projection_quant_modes": dict.fromkeys(("q", "kv", "o", "indexer"), dtype),
    }  # fmt: skip


_DELTA = ("causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"), (
    "causal_conv1d_fn", "chunk_gated_delta_rule"
)  # fmt: skip
"""Kernels of a gated delta rule: of decodes, of prompts."""


def _delta_rows(profile: DeviceProfile, model: ModelGeometry, part: Mixer) -> Rows | None:
    """Layers with a gated delta rule in place of attention: a convolution and a recurrence, whatever came before."""
    sizes = {"d_model": model.hidden, "mamba_ssm_dtype": "float32", **dict(part.sizes)}
    decode, prompt = (
        [_op("Gdn", {"kernel_source": name, "phase": phase, **sizes}) for name in names]
        for names, phase in zip(_DELTA, ("generation", "context"), strict=True)
    )
    return _rows(_kernel(profile, decode), _kernel(profile, prompt, prompt=True))


@cache
def _rows(decodes: Kernel | None, prompts: Kernel | None, *, module: bool = False) -> Rows | None:
    if decodes is None or prompts is None:
        return None
    batches = [(seqs, chunk) for chunk in CHUNKS for seqs in SEQS if seqs <= max(BATCH_TOKENS // chunk, 2)]
    long = [chunk for chunk in CHUNKS if 64 <= chunk <= 2048]
    worse = min((decodes.origin, prompts.origin), key=lambda origin: origin.exact)
    return Rows(
        {(seqs, context): decodes.seconds(seqs, context) for seqs in SEQS for context in CONTEXTS},
        {(seqs, chunk): prompts.seconds(seqs, chunk) for seqs, chunk in batches},
        {(chunk, cached): prompts.seconds(1, chunk, cached) for chunk in long for cached in (4096, 16_384)},
        module,
        worse,
    )


# --- the library's engine ---------------------------------------------------------------------------------------


def _of_types(
    profile: DeviceProfile,
    types: Sequence[str],
    ops: Callable[[str], list[dict[str, Any]]],
    *,
    prompt: bool = False,
    derived: bool = False,
) -> Kernel | None:
    """The kernels ``ops`` in the first of ``types`` that the library knows of them."""
    for place, dtype in enumerate(types):
        kernel = _kernel(profile, ops(dtype), prompt=prompt, derived=derived) if dtype else None
        if kernel is not None and place:
            return replace(kernel, origin=Origin(False, f"{kernel.origin.text}, those in {dtype}"))
        if kernel is not None:
            return kernel
    return None


def _kernel(
    profile: DeviceProfile, ops: list[dict[str, Any]], *, prompt: bool = False, derived: bool = False
) -> Kernel | None:
    """The kernels ``ops``, one after the other, by the best measurements there are; None if there are none."""
    if profile.name not in SYSTEMS or not installed():
        return None
    system, described = SYSTEMS[profile.name], json.dumps(ops)
    for mode, shared in _MODES if derived else _MODES[::2]:
        engine = _engine(system, mode, shared)
        if engine is None:
            continue
        try:
            evaluated = engine.evaluate_ops_json(described, prompt, 1, 64, 0, 1.0, None)
        except (RuntimeError, ValueError):  # the library's errors for what it has no rows of, or no arithmetic
            continue
        derived_from = engine.last_provenance()
        if any(source == FORMULA for *_, source in evaluated) or derived_from not in (None, OTHER_SHAPE):
            continue
        return Kernel(engine, described, prompt, _origin(system, mode, shared, next(iter(ops[0]))))
    return None


@cache
def _engine(system: str, mode: str, shared: bool) -> Any | None:
    """The library's engine for one GPU; None if it does not know the GPU. ``shared``: also rows of other versions and
    frameworks; ``mode`` HYBRID: also what follows from rows of other shapes and types."""
    core = importlib.import_module("aiconfigurator_core")
    unset = dict.fromkeys(
        ("systems_path", "kv_block_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "cp_size",
         "weight_dtype", "moe_dtype", "activation_dtype", "kv_cache_dtype", "transfer_policy")
    )  # fmt: skip
    engine: dict[str, Any] = {
        "schema_version": 1, "model_name": "kernels", "system_name": system, "backend": "vllm",
        "backend_version": VLLM_OF.get(system, VLLM), "tp_size": 1, "pp_size": 1, "enable_shared_layer": shared,
        "strict_provenance": False, "database_mode": mode, "tolerate_dirless_version": False, "extra": {}, **unset,
    }  # fmt: skip
    spec = {"schema_version": core.engine_spec_schema_version(), "engine": engine} | {
        "context_ops": [], "generation_ops": []
    }  # fmt: skip
    try:
        return core.AicEngine.from_spec(bytes(core.engine_spec_bincode_from_json(json.dumps(spec))), None)
    except (RuntimeError, ValueError):
        return None


_FILES = {
    "Gemm": "gemm", "Moe": "moe", "GenerationAttention": "generation_attention", "ContextAttention":
    "context_attention", "MlaModuleGeneration": "mla_generation_module", "MlaModuleContext": "mla_context_module",
    "DsaGeneration": "dsa_generation_module", "DsaContext": "dsa_context_module", "Gdn": "gdn",
    "Kda": "kda", "CustomAllReduce": "custom_allreduce", "MsaGeneration": "msa_generation_module",
    "MsaContext": "msa_context_module", "Dsv4Generation": "dsv4_csa_generation_module",
    "Dsv4Context": "dsv4_csa_context_module", "Mhc": "mhc_module",
}  # fmt: skip
"""Kinds of kernels and the library's files that hold them."""


FORMULA = "sol"
"""The library's word for a time by the data sheet."""
OTHER_SHAPE = "xshape"
"""Its word for one that follows from other shapes of the same type. Those from other types are off by factors."""
_MODES = (("SILICON", False), ("HYBRID", False), ("SILICON", True), ("HYBRID", True))
"""The library's modes, and whether it may read rows of other versions and frameworks, the best first."""


def _origin(system: str, mode: str, shared: bool, kind: str) -> Origin:
    own = f"vLLM {VLLM_OF.get(system, VLLM)}"
    if not shared:
        measured = f"measured under {'NCCL' if kind == 'Nccl' else own}"
        return Origin(mode == "SILICON", measured if mode == "SILICON" else f"derived from shapes {measured}")
    others = ", ".join(_others(system, kind)) or "another version"
    return Origin(False, f"{'derived from ' if mode == 'HYBRID' else ''}low-fidelity fallback rows of {others}")


@cache
def _others(system: str, kind: str) -> tuple[str, ...]:
    """Frameworks and versions whose rows the library reads beside vLLM's own, those it reads first first."""
    core = importlib.import_module("aiconfigurator_core")
    root = Path(str(core.__file__)).parent / "systems"
    report = core.resolve_op_sources_report_json(
        str(root),
        str(root / "data" / system),
        "vllm",
        VLLM_OF.get(system, VLLM),
        f"{_FILES.get(kind, kind)}_perf.parquet",
    )
    paths = [
        Path(record["path"])
        for record in json.loads(report)["records"]
        if record["exists"] and record["channel"] != "primary"
    ]
    return tuple(f"{path.parent.parent.name} {path.parent.name}" for path in paths)
