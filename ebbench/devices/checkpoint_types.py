"""Types of weights and KV cache that a checkpoint is stored in, as vLLM 0.32 reads them.

Sources, in its order: ``quantization_config`` of config.json, ``compression_config``, ``hf_quant_config.json`` beside
it, ``quantization_config`` of the text part. Layers that a configuration leaves out or treats otherwise are found by
the names of modules; what counts here is the type of attention, of dense MLPs and of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_object

PLAIN = "bfloat16"
BESIDE = "hf_quant_config.json"  # ModelOptimizer's
_MODELOPT = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "MXFP8": "mxfp8",
    "W4A16_NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A16_MXFP4": "w4a16_mxfp4",
}  # fmt: skip
_INTEGER_METHODS = (
    "awq",
    "auto_awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "auto_gptq",
    "moe_wna16",
    "auto-round",
    "inc",
)
_WHOLE_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp8": "mxfp8"}
_EXPERT_METHODS = ("mxfp4", "gpt_oss_mxfp4")
_GONE = ("bitsandbytes", "gguf", "hqq", "aqlm", "marlin", "deepspeedfp", "ptpc_fp8", "eetq", "higgs", "vptq")
_LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers")
_MODULES = {
    "attention": (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b")),
                  "linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mixer.q_proj", "mixer.in_proj"),
    "mlp": (*(f"mlp.{part}_proj" for part in ("gate", "up", "down")), "mlp.shared_experts.up_proj",
            "mlp.shared_expert.up_proj", "mixer.up_proj", "feed_forward.up_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w1",
                "mixer.experts.0.up_proj", "feed_forward.experts.0.gate_proj"),
}  # fmt: skip
_ALWAYS = 0.9
"""Share of a class's modules from which on all count as left out."""


@dataclass(frozen=True)
class CheckpointTypes:
    """Names of ``geometry.WEIGHT_BITS`` for weights of attention, MLP and experts and for the KV cache, and caveats."""

    attention: str = PLAIN
    mlp: str = PLAIN
    experts: str = PLAIN
    kv: str = PLAIN
    notes: tuple[str, ...] = ()


class _Scheme(NamedTuple):
    """A type for the modules that ``targets`` name; no targets: for all."""

    targets: tuple[str, ...]
    dtype: str


def types_of(path: Path, raw: Mapping[str, Any], layers: int, *, experts: bool) -> CheckpointTypes:
    """The types of a checkpoint whose config.json is ``raw`` (with its text part merged in).

    Raises InputFileError, by the right name, for what vLLM does not read or what has no size here.
    """
    place, config = _configuration(path, raw)
    if not config:
        return CheckpointTypes()
    method = _method(config)
    if method in _GONE:
        raise InputFileError(path, f"{place}: vLLM 0.32 does not read weights by {method}")
    schemes, left_out = _schemes(path, place, method, config)
    attention, mlp, experts_in = (_type_of(path, kind, schemes) for kind in _MODULES)
    found = CheckpointTypes(attention, mlp, experts_in)
    if method in _EXPERT_METHODS:
        found = replace(found, attention=PLAIN, mlp=PLAIN)
        left_out = ()
    found = _without(path, found, left_out, layers, _MODULES if experts else ("attention", "mlp"))
    return replace(found, kv=_kv(path, method, config), notes=(*found.notes, *_of_activations(config, found)))


def _configuration(path: Path, raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for key in ("quantization_config", "compression_config"):
        value = raw.get(key)
        if value and not isinstance(value, dict):
            raise InputFileError(path, f"{key} must be an object")
        if value:
            return key, value
    return BESIDE, _beside(path)


def _beside(path: Path) -> Mapping[str, Any]:
    """ModelOptimizer's file beside a config.json; empty without one."""
    beside = path.with_name(BESIDE)
    return read_object(beside) if beside.is_file() else {}


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method") or "").lower().replace("_tensors", "-tensors")
    if not method and (_inner(config).get("quant_algo") or "modelopt" in str(config.get("producer"))):
        return "modelopt"
    return method


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOptimizer's own part, which may be nested."""
    nested = config.get("quantization")
    return nested if isinstance(nested, dict) else config


def _schemes(path: Path, place: str, method: str, config: Mapping[str, Any]) -> tuple[list[_Scheme], tuple[str, ...]]:
    left_out = _left_out(config) or _left_out(_inner(config))
    if method.startswith("modelopt"):
        return _of_modelopt(path, place, _inner(config)), left_out
    if method in _WHOLE_METHODS:
        in_blocks = method == "fp8" and config.get("weight_block_size")
        return [_Scheme((), "fp8_block" if in_blocks else _WHOLE_METHODS[method])], left_out
    if method in _EXPERT_METHODS:
        return [_Scheme((), "w4a16_mxfp4")], left_out
    if method in _INTEGER_METHODS:
        return [_Scheme((), _of_bits(path, place, method, config.get("bits", config.get("w_bit"))))], left_out
    if method == "compressed-tensors":
        return _of_groups(path, place, config), left_out
    if method == "quark":
        return _of_quark(path, place, config), left_out
    if method == "torchao":
        return [_Scheme((), _of_name(path, place, str(config.get("quant_type"))))], left_out
    named = f"{method!r}" if method else "without quant_method"
    raise InputFileError(
        path,
        f"{place} {named} is not read here; fp8, fbgemm_fp8, compressed-tensors, modelopt, quark, awq, gptq, mxfp4, "
        "mxfp8 and torchao are",
    )


def _left_out(config: Mapping[str, Any]) -> tuple[str, ...]:
    lists: Iterable[object] = (config.get(key) for key in _LEFT_OUT)
    listed = next((one for one in lists if isinstance(one, list)), [])
    return tuple(str(name) for name in listed)


def _of_bits(path: Path, place: str, method: str, bits: object) -> str:
    found = {4: "int4", 8: "int8"}.get(bits) if isinstance(bits, int) else None
    if found is None:
        raise InputFileError(path, f"{place} {method!r} has bits {bits!r}; vLLM's kernels have 4 and 8")
    return found


def _of_modelopt(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    algorithm = str(config.get("quant_algo") or "").upper()
    named = config.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(named, dict):
        return [
            _Scheme((str(name),), _algorithm(path, place, str(one.get("quant_algo")).upper()))
            for name, one in named.items()
            if isinstance(one, dict)
        ]
    if not algorithm and isinstance(config.get("config_groups"), dict):
        return _of_groups(path, place, config)
    return [_Scheme((), _algorithm(path, place, algorithm))]


def _algorithm(path: Path, place: str, algorithm: str) -> str:
    found = _MODELOPT.get(algorithm)
    if found is None:
        raise InputFileError(path, f"{place} has quant_algo {algorithm!r}; read are {', '.join(_MODELOPT)}")
    return found


def _of_groups(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and str(sparsity.get("format") or "dense") != "dense":
        raise InputFileError(path, f"{place} has a sparsity_config {sparsity.get('format')!r}, which is not read here")
    groups = config.get("config_groups")
    found = []
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        targets = group.get("targets")
        listed = tuple(str(one) for one in targets) if isinstance(targets, list) else ()
        found.append(_Scheme(listed, _of_weights(path, f"{place} {name}", weights)))
    return found


def _of_weights(path: Path, place: str, weights: Mapping[str, Any]) -> str:
    bits, kind, size = weights.get("num_bits"), str(weights.get("type")), weights.get("group_size")
    if kind == "float" and bits == 8:
        if size == 32:
            return "mxfp8"
        return "fp8_block" if weights.get("strategy") == "block" else "fp8"
    if kind == "float" and bits == 4:
        return "w4a16_mxfp4" if size == 32 else "nvfp4"
    if kind == "int" and bits in (4, 8):
        return f"int{bits}"
    raise InputFileError(path, f"{place}: weights of {bits!r} bits of type {kind!r} are not read here")


def _of_quark(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    found = []
    named = config.get("layer_quant_config")
    entries = list(named.items()) if isinstance(named, dict) else []
    for targets, one in [*(((str(name),), one) for name, one in entries), ((), config.get("global_quant_config"))]:
        weights = one.get("weight") if isinstance(one, dict) else None
        weights = weights[0] if isinstance(weights, list) and weights else weights
        if isinstance(weights, dict):
            found.append(_Scheme(targets, _of_name(path, place, str(weights.get("dtype")))))
    return found


def _of_name(path: Path, place: str, name: str) -> str:
    """A type by its name in quark's and torchao's configurations."""
    for pattern, dtype in (
        (r"fp8|float8|e4m3", "fp8"), (r"fp4|float4", "w4a16_mxfp4"), (r"u?int4", "int4"), (r"int8", "int8"),
    ):  # fmt: skip
        if re.search(pattern, name.lower()):
            return dtype
    raise InputFileError(path, f"{place}: weights of type {name!r} are not read here")


def _type_of(path: Path, kind: str, schemes: Sequence[_Scheme]) -> str:
    """The type of a class of modules: that of the scheme which names them, else of one for all."""
    layer = 3  # behind the first dense layers of a mixture
    names = [f"{prefix}.{layer}.{module}" for prefix in _PREFIXES for module in _MODULES[kind]]
    for scheme in schemes:
        named = _Names.of(path, [target for target in scheme.targets if target != "Linear"])
        if any(named.hold(name) for name in names):
            return scheme.dtype
    return next((scheme.dtype for scheme in schemes if not scheme.targets or "Linear" in scheme.targets), PLAIN)


@dataclass(frozen=True)
class _Names:
    """Names of modules as configurations write them: a path or its beginning, a part of one, a glob, ``re:``."""

    paths: frozenset[str]
    parts: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @staticmethod
    def of(path: Path, listed: Iterable[str]) -> _Names:
        """Raises InputFileError for a pattern that cannot be evaluated in little time."""
        paths: set[str] = set()
        parts: set[str] = set()
        patterns: list[re.Pattern[str]] = []
        for one in listed:
            if one.startswith("re:"):
                patterns.append(_compiled(path, one[3:]))
            elif "*" in one:
                patterns.append(re.compile(".*".join(map(re.escape, one[:_LONGEST].split("*")[: _MOST_STARS + 1]))))
            else:
                (paths if "layers." in one else parts).add(one)
        return _Names(frozenset(paths), frozenset(parts), tuple(patterns))

    def hold(self, name: str) -> bool:
        """Whether they name this module."""
        pieces = name.split(".")
        within = {".".join(pieces[: end + 1]) for end in range(len(pieces))}
        if not self.paths.isdisjoint(within) or not self.parts.isdisjoint(pieces):
            return True
        if any(f".{part}." in f".{name}." for part in self.parts if "." in part):
            return True
        return any(pattern.match(name) for pattern in self.patterns)


_LONGEST = 500
_MOST_STARS = 4
_REPEATS = re.compile(r"[*+{]")


def _compiled(path: Path, pattern: str) -> re.Pattern[str]:
    """A regular expression that names modules. Raises InputFileError for a wrong one, or one that could take long."""
    if (
        len(pattern) <= _LONGEST
        and len(_REPEATS.findall(pattern)) <= _MOST_STARS
        and not re.search(r"\)[*+{]", pattern)
    ):
        try:
            return re.compile(pattern)
        except re.error:
            pass
    raise InputFileError(path, f"names modules by {pattern[:60]!r}, which is not evaluated here")


def _without(
    path: Path, types: CheckpointTypes, left_out: tuple[str, ...], layers: int, kinds: Iterable[str]
) -> CheckpointTypes:
    """The types, with 16 bits for classes of modules that are left out."""
    if not left_out:
        return types
    named = _Names.of(path, left_out)
    shares = {kind: _share(_MODULES[kind], named, layers) for kind in kinds}
    plain = {kind: PLAIN for kind, share in shares.items() if share >= _ALWAYS}
    partly = [kind for kind, share in shares.items() if 0.0 < share < _ALWAYS and getattr(types, kind) != PLAIN]
    types = replace(types, **plain)  # type: ignore[arg-type]
    if not partly:
        return types
    said = [f"{shares[kind]:.0%} of its {_WORDS[kind]}" for kind in partly]
    names = [
        f"{prefix}.{layer}.{part}" for prefix in _PREFIXES for layer in range(layers) for part in _MODULES[partly[0]]
    ]
    first = next((one for one in left_out if any(map(_Names.of(path, [one]).hold, names))), "")
    note = (
        f"its quantization leaves {' and '.join(said)} in 16 bits ({first}), which are taken to be quantized: "
        "weights are too small"
    )
    return replace(types, notes=(note,))


_WORDS = {"attention": "attention projections", "mlp": "MLP projections", "experts": "experts"}


def _share(modules: tuple[str, ...], left_out: _Names, layers: int) -> float:
    """Largest share of a class's modules that are left out, over the ways to name a layer's parts."""
    shares = []
    for prefix in _PREFIXES:
        for parts in _alike(modules):
            names = [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in parts]
            shares.append(sum(left_out.hold(name) for name in names) / len(names))
    return max(shares)


def _alike(modules: tuple[str, ...]) -> list[list[str]]:
    """Modules by their first part: ``self_attn``, ``linear_attn`` and so on name the same layers differently."""
    first: dict[str, list[str]] = {}
    for module in modules:
        first.setdefault(module.rpartition(".")[0], []).append(module)
    if "self_attn" in first:
        whole = first["self_attn"]
        first["self_attn"], first["latent"] = whole[:4], whole[4:]
    return list(first.values())


def _kv(path: Path, method: str, config: Mapping[str, Any]) -> str:
    """Type of the KV cache with ``--kv-cache-dtype auto``."""
    if method == "compressed-tensors":
        return "fp8" if config.get("kv_cache_scheme") else PLAIN
    if method == "quark":
        export = config.get("export")
        return "fp8" if isinstance(export, dict) and export.get("kv_cache_group") else PLAIN
    if not method.startswith("modelopt"):
        config = _beside(path)  # scales of the cache are in the checkpoint, whatever config.json calls its weights
    inner = _inner(config)
    scheme = inner.get("kv_cache_scheme") or config.get("kv_cache_scheme")
    scheme = scheme or inner.get("kv_cache_quant_algo") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return "fp8" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else PLAIN
    return "fp8" if str(scheme).upper() == "FP8" else PLAIN


def _of_activations(config: Mapping[str, Any], types: CheckpointTypes) -> tuple[str, ...]:
    """That FP8 weights meet activations of 16 bits (compressed-tensors without ``input_activations``)."""
    groups = config.get("config_groups")
    if _method(config) != "compressed-tensors" or not isinstance(groups, dict) or not types.mlp.startswith("fp8"):
        return ()
    if all(isinstance(group, dict) and group.get("input_activations") for group in groups.values()):
        return ()
    return (
        "its activations stay in 16 bits (no input_activations in its quantization_config), while products are taken "
        "in FP8: steps with many tokens are too fast",
    )
