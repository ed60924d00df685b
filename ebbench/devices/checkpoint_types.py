"""Types of weights and KV cache that a checkpoint is stored in, as vLLM 0.32 reads them.

Sources, in its order: ``quantization_config`` of config.json, ``compression_config``, ``hf_quant_config.json`` beside
it, ``quantization_config`` of the text part. Layers that a configuration leaves out or treats otherwise are found by
the names of modules; what counts here is the type of attention, of dense MLPs and of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ebbench.devices.geometry import WEIGHT_BITS, Mixer, ModelGeometry
from ebbench.devices.mixer_rules import NAMES, ModuleNames
from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_object

# Names of a decoder's weights as checkpoints have them, with their sizes: quantization configurations name them.

ATTENTION, MLP, EXPERTS, HEAD = "attention", "mlp", "experts", "head"

_FUSED = ("query_key_value", "wqkv", "W_pack", "c_attn")
_OUT = ("o_proj", "out_proj", "dense", "wo", "c_proj")
_LATENT = (("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa", "kv_a_proj"), ("kv_b_proj",), ("o_proj", "dense"))
_MAMBA = (("in_proj",), ("out_proj",))
_STATE = (("in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj", "qkv_proj", *_FUSED), ("out_proj", "o_proj", "dense"))
_INDEX = (("indexer.wq_b", "indexer.q_proj"), ("indexer.wk", "indexer.k_proj"))


class Module(NamedTuple):
    """Weights of one kind that one configuration entry may name by any of ``names``, within ``layers.N``."""

    kind: str
    names: tuple[str, ...]
    params: int


def read_modules(
    model: ModelGeometry, kind: str, mixers: Sequence[Sequence[Mixer]], mlps: Sequence[str], dense: str
) -> Iterator[Module]:
    """The weights of all layers, and a language head of its own; ``kind``: its model_type; ``mixers`` and ``mlps``: of
    every layer, of which ``dense`` is a dense MLP's name."""
    names = NAMES.modules.get(kind, ModuleNames())
    beside = names.experts.removesuffix(".experts")
    passed = (names.shared,) if names.shared else (f"{beside}.shared_experts", f"{beside}.shared_expert")
    if not model.tied_embeddings:
        yield Module(HEAD, ("lm_head",), model.vocab * model.hidden)
    for layer, (own, mlp) in enumerate(zip(mixers, mlps, strict=True)):
        at = f"layers.{layer}"
        for mixer in own:
            part = names.state if mixer.kind == "state" else names.attention
            states = _MAMBA if names.state in ("mamba", "mixer") else _STATE
            for ends, params in _of_mixer(mixer, states):
                yield Module(ATTENTION, tuple(f"{at}.{part}.{end}" for end in ends), params)
        if mlp == dense:
            width = model.dense_intermediate if model.experts else model.intermediate
            yield from _of_mlp(model, f"{at}.{names.mlp}", width)
        elif mlp:
            yield from _of_mlp(model, tuple(f"{at}.{part}" for part in passed), model.shared_intermediate)
            ends = ("0.down_proj", "0.w2", "down_proj", "output_linear")
            yield Module(
                EXPERTS, tuple(f"{at}.{names.experts}.{end}" for end in ends), model.experts * model.expert_params
            )


def _of_mixer(mixer: Mixer, states: tuple[tuple[str, ...], ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if mixer.measured_alike:
        fused, *to_queries, out = mixer.products
        kept = mixer.cached or 0
        queries = fused.params - kept * fused.rows
        yield ("q_proj", "qkv_proj", *_FUSED), max(queries, 0)
        for product in to_queries:
            yield ("wq",), product.params
        for name in ("k_proj", "v_proj"):
            yield (name, "qkv_proj", *_FUSED), (fused.params - max(queries, 0)) // 2
        yield _OUT, out.params
        return
    named = {"latent": _LATENT, "index": _INDEX}.get(mixer.kind, states)
    if mixer.kind == "latent" and len(mixer.products) == len(_LATENT) - 1:
        named = (("q_proj",), *_LATENT[2:])
    count = len(named)
    sizes = [product.params for product in mixer.products]
    yield from zip(named, ([*sizes[: count - 1], sum(sizes[count - 1 :])] if sizes else [0] * count), strict=True)


def _of_mlp(model: ModelGeometry, at: str | tuple[str, ...], width: int) -> Iterator[Module]:
    if not width:
        return
    places = (at,) if isinstance(at, str) else at
    gated = (
        ("gate_proj", "gate_up_proj", "w1", "input_linear"),
        ("up_proj", "gate_up_proj", "w3", "input_linear", "c_fc", "fc1", "dense_h_to_4h"),
        ("down_proj", "w2", "output_linear", "c_proj", "fc2", "dense_4h_to_h"),
    )
    for ends in gated[3 - model.mlp_matrices :]:
        names = tuple(f"{place}.{end}" for place in places for end in ends)
        yield Module(MLP, names, model.hidden * width)


PLAIN = "bfloat16"
BESIDE = "hf_quant_config.json"  # ModelOptimizer's
MLX, MIXED = "quantization", "MIXED_PRECISION"
_WHOLE_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp8": "mxfp8"}
_INTEGER_METHODS, _EXPERT_METHODS, _GONE, _LEFT_OUT = (
    NAMES.quantization[which] for which in ("integer", "experts", "gone", "left_out")
)
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "")
_WORDS = {ATTENTION: "attention projections", MLP: "MLP projections", EXPERTS: "experts"}
NEVER, BY_NAME, AS_OTHERS = "never", "by name", "as others"
"""When a language head is quantized."""
_WORTH_SAYING = 0.02
"""Share of a kind of weights with another type from which on it is said."""


@dataclass(frozen=True)
class CheckpointTypes:
    """Names of ``geometry.WEIGHT_BITS`` for weights of attention, MLP and experts and for the KV cache.

    Each is the type of most weights of its kind, ``head`` that of a language head that is not tied; ``other_bytes``:
    how much larger the weights are than these types make them. ``notes``: caveats.
    """

    attention: str = PLAIN
    mlp: str = PLAIN
    experts: str = PLAIN
    head: str = PLAIN
    kv: str = PLAIN
    other_bytes: int = 0
    notes: tuple[str, ...] = ()


class _Type(NamedTuple):
    """A name of ``geometry.WEIGHT_BITS``, and further bits per weight where its scales have more than that counts."""

    name: str
    more_bits: float = 0.0


class _Scheme(NamedTuple):
    """A type for the modules that ``targets`` name; no targets: for all."""

    targets: tuple[str, ...]
    dtype: _Type


def read_types(path: Path, raw: Mapping[str, Any], modules: Iterable[Module]) -> CheckpointTypes:
    """The types of a checkpoint whose config.json is ``raw`` (with its text part merged in).

    ``modules``: its weights. Raises InputFileError, by the right name, for what vLLM does not read or what has no size
    here.
    """
    if isinstance(raw.get(MLX), dict) and raw[MLX].get("bits"):
        raise InputFileError(path, f"{MLX} is MLX's, whose weights vLLM does not read")
    place, config = _configuration(path, raw)
    if not config and raw.get("model_type") != DEEPSEEK_V4:
        return CheckpointTypes()
    method = _method(config)
    if raw.get("model_type") == DEEPSEEK_V4:
        return _of_deepseek_v4(path, raw, config)
    if method in _GONE:
        raise InputFileError(path, f"{place}: vLLM 0.32 does not read weights by {method}")
    schemes, left_out = _schemes(path, place, method, config)
    if method in _INTEGER_METHODS:
        left_out += _left_out_of_integers(config)
    routed = config.get("routed_experts_quant_method")
    if routed is not None and (routed, method, raw.get("model_type")) != ("mxfp4", "fp8", LING_3):
        raise InputFileError(path, f"{place}: routed_experts_quant_method {routed!r} is not read here")
    typed = _Typed.of(path, schemes, left_out, only_experts=method in _EXPERT_METHODS)
    types = _assigned(replace(typed, head=_head_is_typed(method, config)), modules)
    experts = types.experts if routed is None else "w4a16_mxfp4"
    notes = (*types.notes, *_of_activations(config, types))
    return replace(types, experts=experts, kv=_kv(path, method, config), notes=notes)


def _head_is_typed(method: str, config: Mapping[str, Any]) -> str:
    """Whether a language head has the type of the others, one by its name alone, or stays in 16 bits.

    ``get_quant_method`` of vLLM's configurations: ModelOptimizer's treats it as any product; AWQ's and GPTQ's do with
    ``lm_head``; AutoRound's and compressed-tensors' where they name it; others take products within layers alone.
    """
    named = ("auto-round", "inc", "compressed-tensors")
    stated = method in _INTEGER_METHODS and method not in (*named, "moe_wna16") and config.get("lm_head") is True
    if stated or method.startswith("modelopt"):
        return AS_OTHERS
    return BY_NAME if method in named else NEVER


DEEPSEEK_V4, LING_3 = "deepseek_v4", "bailing_moe_v3"


def _of_deepseek_v4(path: Path, raw: Mapping[str, Any], config: Mapping[str, Any]) -> CheckpointTypes:
    """vLLM's ``DeepseekV4FP8Config``: blocks in FP8 whatever the configuration leaves out, experts by ``expert_dtype``,
    and the KV cache in a format of its own.

    Its product after attention is in FP8 alone, and other methods are not read here.
    """
    block, experts = config.get("weight_block_size"), str(raw.get("expert_dtype") or "fp4")
    if experts == "fp4" and str(config.get("moe_quant_algo") or "").upper() == "NVFP4":
        experts = "nvfp4"
    dtype = {"fp4": "w4a16_mxfp4", "fp8": "fp8_block", "nvfp4": "nvfp4"}.get(experts)
    if _method(config) != "fp8" or block != [128, 128] or dtype is None:
        raise InputFileError(
            path,
            "quantization_config of deepseek_v4 is read with quant_method fp8, weight_block_size [128, 128] and "
            f"expert_dtype fp4 or fp8, not {_method(config) or 'none'}, {block!r} and {experts}",
        )
    return CheckpointTypes("fp8_block", "fp8_block", dtype, kv="fp8")


def _configuration(path: Path, raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for key in ("quantization_config", "compression_config"):
        value = raw.get(key)
        if value and not isinstance(value, dict):
            raise InputFileError(path, f"{key} must be an object")
        if value:
            return key, value
    return BESIDE, _hf_quant_config(path)


def _hf_quant_config(path: Path) -> Mapping[str, Any]:
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
        inner = _inner(config)
        if str(inner.get("quant_algo")).upper() == MIXED and not inner.get(
            "quantized_layers"
        ):  # older: the file beside
            inner = _inner(_hf_quant_config(path)) or inner
            left_out = _left_out(inner)
        return _of_modelopt(path, place, inner), left_out
    if method in _WHOLE_METHODS:
        in_blocks = method == "fp8" and config.get("weight_block_size")
        return [_Scheme((), _Type("fp8_block" if in_blocks else _WHOLE_METHODS[method]))], left_out
    if method in _EXPERT_METHODS:
        return [_Scheme((), _Type("w4a16_mxfp4"))], left_out
    if method in _INTEGER_METHODS:
        return _of_integers(path, f"{place} {method!r}", config), left_out
    if method == "compressed-tensors":
        return _of_groups(path, place, config), left_out
    if method == "quark":
        return _of_quark(path, place, config), left_out
    if method == "torchao":
        return _of_torchao(path, place, config.get("quant_type")), left_out
    named = f"{method!r}" if method else "without quant_method"
    raise InputFileError(
        path,
        f"{place} {named} is not read here; fp8, fbgemm_fp8, compressed-tensors, modelopt, quark, awq, gptq, mxfp4, "
        "mxfp8 and torchao are",
    )


def _left_out(config: Mapping[str, Any]) -> tuple[str, ...]:
    lists: Iterable[object] = (config.get(key) for key in _LEFT_OUT)
    listed = next((names for names in lists if isinstance(names, list) and names), [])
    return tuple(str(name) for name in listed)


def _of_integers(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    """AWQ, GPTQ and AutoRound: one width for all, or others for modules by name (``extra_config``) or pattern
    (``dynamic``); or for those that ``modules_in_block_to_quantize`` has, in lists or lists of lists."""
    schemes = [
        _Scheme((_pattern(name),), _of_bits(path, f"{place} {name}", {**config, **own}))
        for name, own in _single(config).items()
        if isinstance(own, dict) and own.get("bits", 4) != 16 and not name.startswith("-:")
    ]
    blocks = config.get("modules_in_block_to_quantize")
    nested = (block if isinstance(block, list) else [block] for block in (blocks if isinstance(blocks, list) else ()))
    return [*schemes, _Scheme(tuple(str(name) for block in nested for name in block), _of_bits(path, place, config))]


def _left_out_of_integers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that stay in 16 bits among those with settings of their own."""
    return tuple(
        _pattern(name)
        for name, own in _single(config).items()
        if name.startswith("-:") or (isinstance(own, dict) and own.get("bits") == 16)
    )


def _single(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of single modules."""
    named, by_pattern = config.get("extra_config"), config.get("dynamic")
    by_pattern = by_pattern if isinstance(by_pattern, dict) else {}
    signed = {key if key[:2] in ("-:", "+:") else f"+:{key}": own for key, own in by_pattern.items()}
    return {**signed, **(named if isinstance(named, dict) else {})}


def _pattern(name: str) -> str:
    """A key of ``dynamic`` or ``extra_config`` in the words of :class:`_Names`."""
    if name[:2] in ("-:", "+:"):
        return f"re:{name[2:]}"
    return f"re:.*(?:{name})" if re.search(r"[*+?^$()\[\]{}|\\]", name) else name


def _of_bits(path: Path, place: str, config: Mapping[str, Any]) -> _Type:
    bits, kind = config.get("bits", config.get("w_bit")), str(config.get("data_type") or "int")
    if kind.startswith("mx_fp") and bits in (4, 8):
        return _Type({4: "w4a16_mxfp4", 8: "mxfp8"}[bits])
    if kind.startswith("fp") and bits == 8:
        return _Type("fp8_block")
    if kind != "int":
        raise InputFileError(path, f"{place} has data_type {kind!r}; int, mx_fp and fp of 8 bits are read")
    name = {4: "int4", 8: "int8"}.get(bits) if isinstance(bits, int) else None
    if name is None:
        raise InputFileError(path, f"{place} has bits {bits!r}; vLLM's kernels have 4 and 8")
    zeros = config.get("zero_point") is True or config.get("sym") is False
    return _in_groups(name, config.get("group_size", config.get("q_group_size")), zeros=zeros)


def _in_groups(name: str, size: object, *, zeros: bool = False) -> _Type:
    """Whole numbers with a scale of 16 bits, and with ``zeros`` a zero point as wide as a weight, per ``size`` of
    them; -1 is one for a whole row."""
    if not isinstance(size, int) or isinstance(size, bool) or size == 0:
        return _Type(name)
    own_bits = {"int4": 4, "int8": 8}[name]
    scales = (16 + zeros * own_bits) / size if size > 0 else 0.0
    return _Type(name, own_bits + scales - WEIGHT_BITS[name])


def _of_torchao(path: Path, place: str, given: object) -> list[_Scheme]:
    """One type for all, or one for each of some modules (``module_fqn_to_config``), where null is none."""
    given = given.get("default", given) if isinstance(given, dict) else given
    inner = given.get("_data") if isinstance(given, dict) else None
    named = inner.get("module_fqn_to_config", inner.get("fqn_to_config")) if isinstance(inner, dict) else None
    if not isinstance(named, dict):
        return [_Scheme((), _of_name(path, place, str(given)))]
    return [
        _Scheme(() if name == "_default" else (str(name),), _of_name(path, f"{place} {name}", str(own)))
        if own is not None
        else _Scheme((str(name),), _Type(PLAIN))
        for name, own in named.items()
        if own is not None or name != "_default"
    ]


def _of_modelopt(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    algorithm = str(config.get("quant_algo") or "").upper()
    named = config.get("quantized_layers")
    if algorithm == MIXED and isinstance(named, dict):
        return [
            _Scheme((str(name),), _algorithm(path, place, str(layer.get("quant_algo")).upper()))
            for name, layer in named.items()
            if isinstance(layer, dict)
        ]
    if not algorithm and isinstance(config.get("config_groups"), dict):
        return _of_groups(path, place, config)
    return [_Scheme((), _algorithm(path, place, algorithm))]


def _algorithm(path: Path, place: str, algorithm: str) -> _Type:
    dtype = NAMES.modelopt.get(algorithm)
    if dtype is None:
        raise InputFileError(path, f"{place} has quant_algo {algorithm!r}; read are {', '.join(NAMES.modelopt)}")
    return _Type(dtype)


def _of_groups(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and str(sparsity.get("format") or "dense") != "dense":
        raise InputFileError(path, f"{place} has a sparsity_config {sparsity.get('format')!r}, which is not read here")
    groups = config.get("config_groups")
    schemes = []
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        targets = group.get("targets")
        listed = tuple(str(target) for target in targets) if isinstance(targets, list) else ()
        schemes.append(_Scheme(listed, _of_weights(path, f"{place} {name}", weights)))
    return schemes


def _of_weights(path: Path, place: str, weights: Mapping[str, Any]) -> _Type:
    bits, kind, size = weights.get("num_bits", 8), str(weights.get("type", "int")), weights.get("group_size")
    if kind == "float" and bits == 8:
        if size == 32:
            return _Type("mxfp8")
        return _Type("fp8_block" if weights.get("strategy") == "block" else "fp8")
    if kind == "float" and bits == 4:
        return _Type("w4a16_mxfp4" if size == 32 else "nvfp4")
    if kind == "int" and bits in (4, 8):
        return _in_groups(f"int{int(bits)}", size, zeros=weights.get("symmetric") is False)
    raise InputFileError(path, f"{place}: weights of {bits!r} bits of type {kind!r} are not read here")


def _of_quark(path: Path, place: str, config: Mapping[str, Any]) -> list[_Scheme]:
    schemes = []
    named = config.get("layer_quant_config")
    entries = list(named.items()) if isinstance(named, dict) else []
    for targets, entry in [
        *(((str(name),), entry) for name, entry in entries),
        ((), config.get("global_quant_config")),
    ]:
        weights = entry.get("weight") if isinstance(entry, dict) else None
        # Of two types the last is that of storage: whole numbers of 4 bits, widened to FP8.
        weights = weights[-1] if isinstance(weights, list) and weights else weights
        if isinstance(weights, dict):
            schemes.append(_Scheme(targets, _of_name(path, place, str(weights.get("dtype")))))
    return schemes


def _of_name(path: Path, place: str, name: str) -> _Type:
    """A type by its name in quark's and torchao's configurations."""
    for pattern, dtype in (
        (r"fp8|float8|e4m3", "fp8"), (r"fp4|float4", "w4a16_mxfp4"), (r"u?int4", "int4"), (r"int8", "int8"),
    ):  # fmt: skip
        if re.search(pattern, name.lower()):
            return _Type(dtype)
    raise InputFileError(path, f"{place}: weights of type {name!r} are not read here")


@dataclass(frozen=True)
class _Typed:
    """Which type every module has."""

    named: tuple[tuple[_Names, _Type], ...]
    otherwise: _Type
    left_out: _Names
    only_experts: bool
    head: str = NEVER

    @staticmethod
    def of(path: Path, schemes: Sequence[_Scheme], left_out: Iterable[str], *, only_experts: bool) -> _Typed:
        targets: dict[_Type, list[str]] = {}
        for scheme in schemes:
            targets.setdefault(scheme.dtype, []).extend(target for target in scheme.targets if target != "Linear")
        for_all = (target.dtype for target in schemes if not target.targets or "Linear" in target.targets)
        named = tuple((_Names.of(path, listed), dtype) for dtype, listed in targets.items() if listed)
        return _Typed(named, next(for_all, _Type(PLAIN)), _Names.of(path, left_out), only_experts)

    def type_of(self, module: Module) -> _Type:
        """Left out, else by a name, else that of all."""
        if self.only_experts:
            return self.otherwise if module.kind == EXPERTS else _Type(PLAIN)
        of_all = self.otherwise
        if module.kind == HEAD and self.head != AS_OTHERS:
            if self.head == NEVER:
                return _Type(PLAIN)
            of_all = _Type(PLAIN)
        names = [f"{prefix}{name}" for name in module.names for prefix in _PREFIXES]
        if any(map(self.left_out.hold, names)):
            return _Type(PLAIN)
        return next((dtype for targets, dtype in self.named if any(map(targets.hold, names))), of_all)


def _assigned(typed: _Typed, modules: Iterable[Module]) -> CheckpointTypes:
    """The type of most weights of each kind, and the bytes by which the others differ."""
    params: dict[str, dict[str, int]] = {kind: {} for kind in (*_WORDS, HEAD)}
    bits = 0.0
    for module in modules:
        dtype = typed.type_of(module)
        params[module.kind][dtype.name] = params[module.kind].get(dtype.name, 0) + module.params
        bits += module.params * dtype.more_bits
    most = {kind: max(types, key=types.__getitem__, default=PLAIN) for kind, types in params.items()}
    if not params[MLP]:
        most[MLP] = most[ATTENTION]
    if not params[EXPERTS]:
        most[EXPERTS] = most[MLP]
    other_bytes, shares = bits / 8, []
    for kind, types in params.items():
        for name, count in types.items():
            other_bytes += count * (WEIGHT_BITS[name] - WEIGHT_BITS[most[kind]]) / 8
            share = count / sum(types.values())
            if name != most[kind] and share > _WORTH_SAYING:
                shares.append(f"{share:.0%} of its {_WORDS[kind]} are in {name}, not in {most[kind]}")
    notes = (f"{' and '.join(shares)}: their size is counted, their time is as with the others",) if shares else ()
    attention, mlp, experts, head = (most[kind] for kind in (ATTENTION, MLP, EXPERTS, HEAD))
    return CheckpointTypes(attention, mlp, experts, head, other_bytes=round(other_bytes), notes=notes)


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
        for name in listed:
            if name.startswith("re:"):
                patterns.append(_compiled(path, name[3:]))
            elif "*" in name:
                patterns.append(re.compile(".*".join(map(re.escape, name[:_LONGEST].split("*")[: _MOST_STARS + 1]))))
            else:
                (paths if "layers." in name else parts).add(name)
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


def _kv(path: Path, method: str, config: Mapping[str, Any]) -> str:
    """Type of the KV cache with ``--kv-cache-dtype auto``."""
    if method == "compressed-tensors":
        scheme = config.get("kv_cache_scheme")
        if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            given = f"{scheme.get('num_bits')!r} bits of type {scheme.get('type')!r}"
            raise InputFileError(path, f"kv_cache_scheme has {given}; vLLM 0.32 reads 8 of type 'float'")
        return "fp8" if scheme else PLAIN
    # vLLM's get_kv_cache_quant_algo_string: of ModelOptimizer's methods alone, and of no file but the one read.
    places = (config, _inner(config)) if method.startswith("modelopt") else ()
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = next((place[key] for key in keys for place in places if place.get(key)), None)
    if isinstance(scheme, dict):
        bits, static = scheme.get("num_bits") if scheme.get("type") == "float" else 0, scheme.get("dynamic") is False
        scheme = "NVFP4" if str(bits) == "4" else "FP8" if str(bits) == "8" and static else None
    if str(scheme).upper() == "NVFP4":
        raise InputFileError(path, "a KV cache in NVFP4 has no cost model here")
    return "fp8" if str(scheme).upper() == "FP8" else PLAIN


def _of_activations(config: Mapping[str, Any], types: CheckpointTypes) -> tuple[str, ...]:
    """A note that FP8 weights meet activations of 16 bits (compressed-tensors without ``input_activations``)."""
    groups = config.get("config_groups")
    if _method(config) != "compressed-tensors" or not isinstance(groups, dict) or not types.mlp.startswith("fp8"):
        return ()
    if all(isinstance(group, dict) and group.get("input_activations") for group in groups.values()):
        return ()
    return (
        "its activations stay in 16 bits (no input_activations in its quantization_config), while products are taken "
        "in FP8: steps with many tokens are too fast",
    )
