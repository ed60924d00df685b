"""Reads the shape of a decoder from its config.json, by the rules of transformers and vLLM.

What a family leaves out or has of its own stands in :mod:`ebbench.devices.families`; a ``model_type`` that is not
there, and a key about layers, heads, KV or widths that no rule reads, are refused by name.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ebbench.devices.checkpoint_types import MLX, CheckpointTypes, read_modules, read_types
from ebbench.devices.families import DENSE_MLP, EXPERTS, FAMILIES, FULL, REFUSED, TEXT_PARTS, WINDOW, Family
from ebbench.devices.geometry import Mixer, ModelGeometry
from ebbench.devices.mixer_rules import (
    MOST,
    MTP_LAYERS,
    NAMES,
    SHARES_CACHE,
    ConfigValues,
    head_dim_of,
    heads_of,
    shortened,
)
from ebbench.devices.routers import FLOAT32
from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_object, read_toml

# Opens a model's config.json and refuses values of the wrong kind, before they get a meaning.

_OBJECTS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters", "vision_config", "audio_config")
_LISTS = ("layer_types", "mlp_only_layers", "moe_layers", "attn_type_list")
_TEXTS = ("model_type", "torch_dtype", "dtype", "_name_or_path")
_FLAGS = ("tie_word_embeddings", "use_sliding_window")
_NUMBER_NAMES = re.compile(
    r"(num|n|max|first)_\w+|\w+_(size|window|dim|layers|heads|experts|interval|step|tokens|theta|pattern|freq|factor)|factor"
)
"""Names of numbers; what has one of them and is a text of digits is refused, not left out."""
_DIGITS = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(nan|inf(inity)?)\s*", re.IGNORECASE)
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 10_000),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 1_000_000),
}
"""Numbers above these describe no model, and would be counted up to; of other keys above ``MOST``."""
_NOT_NEGATIVE = {"max_position_embeddings", "original_max_position_embeddings", "factor"}.union(
    *NAMES.encoders.values()
)


def read_model_file(path: Path) -> dict[str, Any]:
    """The object of a config.json whose values have the kinds that its keys say. Raises InputFileError."""
    raw = read_object(path)
    for place, key, value in _values(raw, ""):
        if (problem := _problem(key, value)) and value is not None:
            raise InputFileError(path, f"{place} must be {problem}, not {shortened(value)}")
    return raw


def _values(raw: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in raw.items():
        yield f"{prefix}{key}", key, value
        if key in _OBJECTS and isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")


def _problem(key: str, value: Any) -> str:
    """What a value should be instead; empty if it is valid."""
    if key in _OBJECTS:
        return "" if isinstance(value, dict) else "an object"
    if key in _LISTS:
        return (
            "" if isinstance(value, list) and len(value) <= _MOST["num_hidden_layers"] else "a list with a layer each"
        )
    if key in _TEXTS:
        return "" if isinstance(value, str) else "a text"
    if key in _FLAGS:
        return "" if isinstance(value, bool) else "true or false"
    if not _NUMBER_NAMES.fullmatch(key) and key not in _NOT_NEGATIVE:
        return ""
    if isinstance(value, str):
        return "a number without quotes" if _DIGITS.fullmatch(value) else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if isinstance(value, dict) and key in _MOST:
        return "a whole number"
    most = _MOST.get(key, MOST)
    if not isinstance(value, int | float):
        return ""
    if value < 0 and key in _NOT_NEGATIVE:
        return "at least 0"
    return f"at most {most:,}" if value > most else ""


# Mistral's own format, `params.json`, in the words of a config.json (vLLM's `transformers_utils/configs`).

_FP8 = "fp8_e4m3"
_NO_SHAPE = ("expert_parallel", "expert_model_parallel", "num_expert_groups", "num_expert_groups_per_tok", "yarn",
             "llama_4_scaling")  # fmt: skip
"""Keys of the whole and of its ``moe`` on which no size depends."""


def as_config(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral's params.json as a config.json. Raises InputFileError for a quantization of another kind."""
    config = {NAMES.params.get(key, key): value for key, value in raw.items()}
    config.setdefault("max_position_embeddings", 128_000)
    config["model_type"] = "mistral"
    experts = config.pop("moe", None)
    if isinstance(experts, dict):
        config.update({NAMES.params_moe.get(str(key), str(key)): value for key, value in experts.items()})
        config["model_type"] = "mixtral"
    if config.get("qk_nope_head_dim"):
        config["model_type"] = "deepseek_v3"
    config = {key: value for key, value in config.items() if key not in _NO_SHAPE}
    multimodal = _part(config, "multimodal")
    for key, encoder in (
        ("vision_config", _part(config, "vision_encoder") or _part(multimodal, "vision_encoder_args")),
        ("audio_config", _part(_part(multimodal, "whisper_model_args"), "encoder_args")),
    ):
        if encoder:
            config[key] = {NAMES.params.get(name, name): value for name, value in encoder.items()}
    windows = config.get("sliding_window")
    if isinstance(windows, list) and windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        layers = config["num_hidden_layers"]
        config["layer_types"] = kinds * (layers // len(kinds) if isinstance(layers, int) else 1)
        config["sliding_window"] = next((window for window in windows if window), None)
    quantization = config.pop("quantization", None)
    if isinstance(quantization, dict) and quantization:
        config["quantization_config"] = _quantization(path, quantization)
    return config


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _quantization(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("qformat_weight") == _FP8:
        return {"quant_method": "fp8"}
    if "compressed" in str(given.get("quant_method")):
        return {**given, "quant_method": "compressed-tensors"}
    raise InputFileError(path, f"quantization {dict(given)!r} is not read here; {_FP8} and compressed-tensors are")


_STATED_STRETCHED = (None, "default", "su", "longrope", "llama3", "mrope")
_TIED = "tie_word_embeddings"
_ENCODER_PARTS = ("vision_config", "audio_config", "vit_config", "encoder_config", "audio_encoder_config")
_OF_ALL = (
    "quantization_config", "compression_config", MLX, _TIED, *_ENCODER_PARTS, "_name_or_path", "torch_dtype", "dtype",
)  # fmt: skip
_NESTED = ("sparse_attention_config", "linear_attn_config", "moe_config", "attn_config", "ffn_config")
"""Objects within a config.json whose values count as the model's own."""
_LISTS_OF_KINDS = NAMES.superseded["kinds"].lists
_VALUE_NAMES = {name: value for value, names in NAMES.values.items() for name in names}
_MAIN = {"num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"}
_KINDS = {name: kind for kind, names in NAMES.kinds.items() for name in names}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4}
_ENCODERS = ("is_encoder_decoder", "bert", "t5", "bart", "whisper")
ASSUME = "--assume-decoder"
ASSUMED = Family(experts=True)
"""What ``--assume-decoder`` takes: usual names, softmax attention in every layer, experts where the config has some."""


class _Layer(NamedTuple):
    kind: str
    further: tuple[tuple[str, Any], ...]  # values of its own


def read_config(path: Path, *, assume_decoder: bool = False) -> ModelGeometry:
    """Read a config.json (or Mistral's params.json) of a decoder.

    ``assume_decoder``: read also a ``model_type`` or keys that no rule knows, with a caveat. Raises InputFileError that
    names the type, field or file.
    """
    raw = read_model_file(path)
    of_params = "model_type" not in raw and {"dim", "n_layers", "n_heads"} <= raw.keys()  # a params.json
    whole = as_config(path, raw) if of_params else raw
    raw = _text_part(path, whole)
    family, doubts = _family(path, raw, assume_decoder)
    return _geometry(
        path,
        raw,
        # vLLM gives a params.json no class, and so no defaults.
        {} if of_params else _left_out(raw, family, within=raw.keys() != whole.keys() | {"model_type"}),
        family,
        doubts,
        assume_decoder,
    )


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """What a key means that a config.json leaves out, by ``model_type``."""
    return read_toml(Path(__file__).with_name("config_defaults.toml"))


def _left_out(raw: Mapping[str, Any], family: Family, *, within: bool) -> dict[str, Any]:
    """The defaults of the type for values that are given by none of their names; a null is given.

    The main sizes only of a decoder ``within`` a model of images, of which transformers writes what differs from them:
    without them another file is broken.
    """
    nested = (raw[name] for name in _NESTED if isinstance(raw.get(name), dict))
    given = {_named(key) for part in (raw, *nested) for key in part}
    of_class = class_defaults().get(str(raw.get("model_type")), {})
    taken = {key: value for key, value in of_class.items() if within or _named(key) not in _MAIN}
    return {key: value for key, value in {**taken, **family.defaults}.items() if _named(key) not in given}


def _named(key: str) -> str:
    """What the value of a key is called here."""
    return _VALUE_NAMES.get(key, key)


def _text_part(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder of a model of text and images, with what its config.json says of the whole."""
    part = next((raw[key] for key in TEXT_PARTS if isinstance(raw.get(key), dict) and raw[key]), None)
    thinker = raw.get("thinker_config")
    if part is None and isinstance(thinker, dict):
        return _text_part(path, thinker)
    if part is None:
        return {**raw, **_of_architecture(raw)}
    outer = {key: raw[key] for key in _OF_ALL if raw.get(key) is not None}
    tied = {key: outer[key] for key in (_TIED,) if key in outer}  # vLLM too: whoever has the head says it
    named = part.get("model_type") or NAMES.text_types.get(str(raw.get("model_type")), raw.get("model_type"))
    inner = {key: value for key, value in part.items() if value is not None or key not in outer}
    return {**outer, **inner, **tied, "model_type": named, **_of_architecture(raw)}


def _of_architecture(raw: Mapping[str, Any]) -> dict[str, str]:
    """The model_type of a file whose architecture says more than its own."""
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    named = NAMES.architectures.get(str(first))
    return {"model_type": named} if named else {}


def _family(path: Path, raw: Mapping[str, Any], assume_decoder: bool) -> tuple[Family, tuple[str, ...]]:
    if raw.get("block_configs"):
        raise InputFileError(
            path, "block_configs means layers of different shapes (a model pruned by search), which are not read here"
        )
    kind = raw.get("model_type")
    if raw.get("is_encoder_decoder") or any(word in str(kind).lower() for word in _ENCODERS):
        raise InputFileError(path, "is an encoder's; decoders that generate text have a cost model here")
    known = FAMILIES.get(str(kind))
    if known is not None:
        return known, ()
    if assume_decoder:
        doubt = f"its model_type {kind!r} is not known: an ordinary decoder is assumed ({ASSUME}), so any figure may be"
        return ASSUMED, (f"{doubt} wrong",)
    named = f"model_type {kind!r} is not known here" if kind else "model_type is missing"
    if reason := REFUSED.get(str(kind)):
        named = f"model_type {kind!r} has no cost model here: {reason}"
    raise InputFileError(path, f"{named}; {ASSUME} reads it as an ordinary decoder, with a caveat in every result")


def _geometry(
    path: Path,
    given: Mapping[str, Any],
    left_out: Mapping[str, Any],
    family: Family,
    doubts: tuple[str, ...],
    assume_decoder: bool,
) -> ModelGeometry:
    raw = {**left_out, **given}
    nested = [raw[name] for name in _NESTED if isinstance(raw.get(name), dict)]
    v = ConfigValues(path, {**raw, **ChainMap(*reversed(nested))})
    v.understood((*_NESTED, *_OF_ALL, *left_out))
    v = v.overlaid(family.instead(v)) if family.instead else v
    v.understood(family.understood)
    v.understood(key for rule in NAMES.superseded.values() for given in rule.lists if v.has(given) for key in rule.keys)
    # The stated number of layers, else the number of kinds listed (Nemotron-H).
    listed = v.get("hybrid_override_pattern", "layers_block_type")
    layers = v.number("num_hidden_layers", default=len(listed) if isinstance(listed, str | list) and listed else None)
    kinds = _kinds(v, family, layers)
    plan = _layers(v, kinds, layers)
    by_layer = _mixers(path, v, family, plan)
    mlps = _mlps(v, family, kinds, layers)
    model = _with_mlps(v, family, _base(path, v, raw, family, by_layer), mlps, plan)
    types = read_types(path, raw, read_modules(model, str(raw.get("model_type")), by_layer, mlps, DENSE_MLP))
    model = _with_types(model, types, _encoder_bytes(raw))
    unknown = v.not_understood()
    if unknown and not assume_decoder:
        raise InputFileError(
            path,
            f"{unknown[0]} says something of the shape of the model that is not read for {raw.get('model_type')!r}; "
            f"{ASSUME} leaves it out, with a caveat in every result",
        )
    if unknown:
        doubts += (f"what {', '.join(unknown)} says of its shape is left out ({ASSUME}), so any figure may be wrong",)
    return replace(model, note="; ".join([*doubts, *_simplified(raw, family, model), *types.notes]))


def _kinds(v: ConfigValues, family: Family, layers: int) -> list[str]:
    """The kind of every layer, by its name here."""
    key, listed = next(((key, v.get(key)) for key in _LISTS_OF_KINDS if v.get(key) is not None), ("", None))
    if listed is None and v.get("attn_type_list") is not None:  # MiniMax: 0 is linear attention, 1 softmax
        flags = v.per_layer("attn_type_list", layers) or []
        key, listed = "attn_type_list", [FULL if flag else "linear_attention" for flag in flags]
    if listed is None:
        listed = _pattern(v, family, layers)
    elif not isinstance(listed, str | list):
        raise InputFileError(v.path, f"{key} must be a list with a layer each")
    listed = v.of_layers(key, listed, layers)
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in listed]
    allowed = {*family.layers, *((DENSE_MLP, EXPERTS) if family.one_each else ())}
    for kind, name in zip(kinds, listed, strict=True):
        if kind not in allowed:
            raise InputFileError(v.path, f"{key or 'the model'} has {name!r}, which has no cost model here")
    return _windowed(v, kinds)


def _pattern(v: ConfigValues, family: Family, layers: int) -> Sequence[str]:
    if family.pattern is not None:
        return family.pattern(v, layers)
    pattern = v.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return [FULL if (layer + 1) % pattern == 0 else WINDOW for layer in range(layers)]
    everywhere = WINDOW if WINDOW in family.layers and v.number("window", default=0) else FULL
    return [everywhere] * layers


def _windowed(v: ConfigValues, kinds: list[str]) -> list[str]:
    """The kinds of layers, with full attention where a window is switched off or as long as the longest sequence."""
    window, longest = v.get("sliding_window", "sliding_window_size", "attention_window_size"), positions_of_values(v)
    unused = v.get("use_sliding_window") is False or not isinstance(window, int) or window <= 0 or 0 < longest <= window
    return [FULL if kind == WINDOW and unused else kind for kind in kinds]


def _layers(v: ConfigValues, kinds: list[str], layers: int) -> list[_Layer]:
    """Every layer with its own settings."""
    shared = v.number("num_kv_shared_layers", default=0)
    heads = v.per_layer("num_attention_heads_per_layer", layers)
    index = v.per_layer("indexer_types", layers)
    if isinstance(pattern := v.get("index_topk_pattern"), str) and len(pattern) == layers:
        index = ["shared" if letter == "S" else "full" for letter in pattern]
    own = v.by_layer("per_layer_config")
    described = []
    for layer, kind in enumerate(kinds):
        further: dict[str, Any] = dict(own.get(layer, {}))
        if heads is not None:
            further["num_attention_heads"] = heads[layer]
        if index is not None:
            further["indexer_types"] = index[layer]
        if layer >= layers - shared > 0:
            further[SHARES_CACHE] = True
        described.append(_Layer(kind, tuple(sorted(further.items()))))
    return described


def _mixers(path: Path, v: ConfigValues, family: Family, plan: Sequence[_Layer]) -> list[tuple[Mixer, ...]]:
    """What mixes the tokens in every layer; equal layers have the same, with their number."""
    counts: dict[_Layer, int] = {}
    for layer in plan:
        if layer.kind not in (DENSE_MLP, EXPERTS):
            counts[layer] = counts.get(layer, 0) + 1
    by_layer: dict[_Layer, tuple[Mixer, ...]] = {}
    for layer, count in counts.items():
        own = [rule(v.overlaid(dict(layer.further)), count) for rule in family.layers[layer.kind]]
        by_layer[layer] = tuple(mixer for mixer in own if mixer is not None)
    _read_absent_kinds(v, family, {layer.kind for layer in counts})
    if not any(mixer.heads and mixer.kind not in ("state", "index") for own in by_layer.values() for mixer in own):
        raise InputFileError(path, "has no layer with attention: a state-space model, which has no cost model here")
    return [by_layer.get(layer, ()) for layer in plan]


def _read_absent_kinds(v: ConfigValues, family: Family, present: set[str]) -> None:
    """Let the rules of kinds that this model has no layer of read their keys, which then are understood."""
    for kind, rules in family.layers.items():
        for rule in rules if kind not in present else ():
            with contextlib.suppress(InputFileError):
                rule(v, 1)


def _mlps(v: ConfigValues, family: Family, kinds: list[str], layers: int) -> list[str]:
    """Dense MLP, experts or nothing (""), by layer."""
    if family.one_each:
        return [kind if kind in (DENSE_MLP, EXPERTS) else "" for kind in kinds]
    if not family.experts or not v.number("experts", default=0) or v.get("enable_moe_block") is False:
        return [DENSE_MLP] * layers
    return [EXPERTS if has else DENSE_MLP for has in _with_experts(v, layers)]


def _with_experts(v: ConfigValues, layers: int) -> list[bool]:
    """Which layers have experts, by the rules of transformers and vLLM.

    The first few are dense, those listed, and all but every nth: counted from 1 in Qwen's, ERNIE's and Llama 4's
    mixtures, from 0 in DeepSeek's (``moe_layer_freq``, a number or a list of 0 and 1).
    """
    if (types := v.per_layer("mlp_layer_types", layers)) is not None:
        return [kind not in ("dense", DENSE_MLP) for kind in types]
    if (flags := v.per_layer("is_moe_layer", layers)) is not None:  # K-EXAONE
        return [bool(flag) for flag in flags]
    enumerated = v.get("moe_layers_enum")  # Step: numbers in one text
    if isinstance(enumerated, str) and enumerated:
        return [str(layer) in enumerated.replace(" ", "").split(",") for layer in range(layers)]
    listed = v.listed("moe_layers")  # Llama 4
    if listed:
        return [layer in listed for layer in range(layers)]
    named = v.listed("mlp_only_layers") or []
    frequency = v.get("moe_layer_freq")
    start = max(
        v.number(key, default=0) for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    )
    end = v.get("moe_layer_end_index")
    last = end if isinstance(end, int) and end >= 0 else layers - 1
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    interval = max(v.number(key, default=0) for key in steps) or 1
    period, offset = v.number("expert_layer_period", default=0) or 1, v.number("expert_layer_offset", default=0)
    if isinstance(frequency, list):
        flags = v.per_layer("moe_layer_freq", layers) or []
    else:
        frequency_of_experts = v.number("moe_layer_freq", default=0) or 1
        flags = [
            layer % frequency_of_experts == 0 and (layer + 1) % interval == 0 and layer % period == offset % period
            for layer in range(layers)
        ]
    return [bool(flag) and start <= layer <= last and layer not in named for layer, flag in enumerate(flags)]


def _base(
    path: Path, v: ConfigValues, raw: Mapping[str, Any], family: Family, by_layer: Sequence[tuple[Mixer, ...]]
) -> ModelGeometry:
    """The model without its MLPs, in 16 bits."""
    mixers = tuple(mixer for own in {id(own): own for own in by_layer}.values() for mixer in own)
    name = str(raw.get("_name_or_path") or path.parent.name or path.stem)
    heads, hidden = heads_of(v), v.number("hidden_size")
    main = next((mixer for mixer in mixers if mixer.kind == "full"), next(m for m in mixers if m.kind != "state"))
    windows = [mixer for mixer in mixers if mixer.kind == "window"]
    model = ModelGeometry(
        name=name,
        hf_id=name,
        layers=len(by_layer),
        hidden=hidden,
        heads=main.heads if main.measured_alike else heads,
        kv_heads=main.kv_heads or 1,
        head_dim=main.head_dim or head_dim_of(v),
        intermediate=0,
        vocab=v.number("vocab_size"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", raw.get("tie_embedding", family.tied))),
        qk_norm=family.qk_norm,
        joint_norms=family.joint_norms,
        router_dtype=FLOAT32 if family.wide_router or raw.get("router_dtype") == "fp32" else "bfloat16",
        norms=family.norms,
        streams=v.number(family.streams) if family.streams else 0,
        mlp_matrices=family.mlp_matrices,
        sliding_window=windows[0].window if windows else 0,
        sliding_layers=sum(mixer.layers for mixer in windows),
        other_params=family.others(v) if family.others else 0,
        dtype_bytes=_dtype(path, raw),
        positions=max_positions(raw),
        mtp_layers=v.number(*MTP_LAYERS, default=0),
    )
    return model if set(model.mixers) == set(mixers) else replace(model, own_mixers=mixers)


def _encoders(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a config.json says of the parts that read images and sound."""
    return [part for part in map(raw.get, _ENCODER_PARTS) if isinstance(part, dict) and part]


_GATED_ENCODERS = ("pixtral", "gemma4_vision")
"""Encoders with a gate, whatever their activation is called."""


def _encoder_bytes(raw: Mapping[str, Any]) -> int:
    """About the bytes of the weights that read images and sound."""
    return 2 * sum(map(_encoder_params, _encoders(raw)))


def _encoder_params(part: Mapping[str, Any]) -> int:
    """Four square projections and an MLP per layer, and what merges a square of patches, once more for every layer in
    ``deepstack_visual_indexes``. GLM-4V's stated inner width is that of its merger."""
    sizes = {
        name: next((part[key] for key in keys if isinstance(part.get(key), int)), 0)
        for name, keys in NAMES.encoders.items()
    }
    hidden, out, kind = sizes["hidden"], sizes["out"], str(part.get("model_type"))
    inner, merged = sizes["inner"] or 4 * hidden, sizes["side"] ** 2 * hidden
    tapped = part.get("deepstack_visual_indexes")
    merging = merged * (merged + out) * (1 + (len(tapped) if isinstance(tapped, list) else 0)) if out else 0
    if kind.startswith("glm4v") and out:
        merging, inner = merged * out + out * (out + 3 * inner), out
    gated = any(word in str(part.get("hidden_act")) for word in ("silu", "swi")) or kind in _GATED_ENCODERS
    return int(sizes["layers"] * hidden * (4 * hidden + (3 if gated else 2) * inner) + merging)


def _with_types(model: ModelGeometry, types: CheckpointTypes, encoder_bytes: int) -> ModelGeometry:
    return replace(
        model,
        weight_dtype=types.mlp,
        attention_dtype=types.attention if types.attention != types.mlp else "",
        expert_dtype=types.experts if model.experts and types.experts != types.mlp else "",
        head_dtype=types.head,
        kv_dtype=types.kv,
        other_bytes=types.other_bytes,
        encoder_bytes=encoder_bytes,
    )


def _with_mlps(
    v: ConfigValues, family: Family, model: ModelGeometry, mlps: list[str], plan: Sequence[_Layer]
) -> ModelGeometry:
    dense, expert_layers = mlps.count(DENSE_MLP), mlps.count(EXPERTS)
    bare = len(mlps) - dense - expert_layers
    v.understood(family.dense_width)
    width = _dense_width(v, family, plan) if dense else 0
    if not expert_layers:
        v.number("num_experts_per_tok", default=0)
        return replace(model, intermediate=width, bare_layers=bare)
    latent, experts, inner = (
        v.number("moe_latent_size", default=0),
        v.number("experts"),
        v.number("expert_width", default=0),
    )
    inner, chosen = inner or v.number("intermediate_size"), v.number("experts_per_token")
    if chosen > experts:
        raise InputFileError(v.path, f"chooses {chosen} experts per token of only {experts}")
    if identities := v.number("zero_expert_num", default=0):
        chosen = max(round(chosen * experts / (experts + identities)), 1)
    return replace(
        model,
        intermediate=v.number("intermediate_size", default=0),
        dense_layers=dense,
        dense_intermediate=width,
        bare_layers=bare,
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=inner,
        expert_hidden=latent,
        shared_intermediate=_shared(v, family, inner),
    )


def _dense_width(v: ConfigValues, family: Family, plan: Sequence[_Layer]) -> int:
    """Width of the dense MLPs; their mean where layers differ."""
    width = family.width(v) if family.width else v.number(*family.dense_width)
    if not v.flag("use_double_wide_mlp"):
        return width
    wider = [any(key == SHARES_CACHE for key, _ in layer.further) for layer in plan]
    return width * (len(wider) + sum(wider)) // len(wider)


def _shared(v: ConfigValues, family: Family, inner: int) -> int:
    """Width of what every token passes beside its experts."""
    count = v.number("shared_experts", default=0)
    if family.shared_width:
        return max(count, 1) * v.number(*family.shared_width)
    width = v.number("shared_width", default=0)
    return max(count, 1) * width if width else count * inner


_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys that say the longest sequence; vLLM takes the shortest of those that are given."""


def positions_of_values(v: ConfigValues) -> int:
    """:func:`max_positions` for values that are already read."""
    return max_positions({key: v.get(key) for key in (*_LENGTHS, "rope_scaling", "rope_parameters", "model_type")})


def max_positions(raw: Mapping[str, Any]) -> int:
    """Longest sequence in tokens that a config.json allows, as vLLM derives it; 0: not stated.

    A scaling of rotary embeddings stretches the positions, unless those stated are stretched already (Gemma 3, and the
    kinds in ``_STATED_STRETCHED``).
    """
    lengths: list[int] = [raw[key] for key in _LENGTHS if isinstance(raw.get(key), int) and raw[key] > 0]
    overriding = raw.get("model_max_length")  # Command R, whose max_position_embeddings are fewer
    stated = int(overriding) if overriding in lengths else min(lengths, default=0)
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(scaling, Mapping) or "gemma3" in str(raw.get("model_type")):
        return stated
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind in _STATED_STRETCHED or not isinstance(factor, int | float):
        return stated
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original if isinstance(original, int) else stated) * factor)


def _simplified(raw: Mapping[str, Any], family: Family, model: ModelGeometry) -> Iterable[str]:
    """What the geometry simplifies."""
    if family.note:
        yield family.note
    if encoders := _encoders(raw):
        weights = (
            "its weights are estimated" if all(map(_encoder_params, encoders)) else "weights of one, without sizes, too"
        )
        yield f"only its language model is simulated: the time of its encoder is left out, {weights}"
    alone = sum(mixer.layers for mixer in model.mixers if mixer.kind == "compressed" and not mixer.every)
    if alone:
        yield f"{alone} of its layers keep a window alone and are timed as if they also had one key per 128 tokens"
    chunks = [mixer for mixer in model.mixers if mixer.kind == "chunk"]
    if chunks:
        yield (
            f"{sum(mixer.layers for mixer in chunks)} of its layers attend within chunks of {chunks[0].window:,} "
            "tokens, and are taken to read a whole one: they are up to twice too slow with longer sequences"
        )


def _dtype(path: Path, raw: Mapping[str, Any]) -> int:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
    if name not in _DTYPE_BYTES:
        raise InputFileError(path, f"torch_dtype {name!r} is not one of {', '.join(_DTYPE_BYTES)}")
    # vLLM serves float32 checkpoints in 16 bits by default (dtype "auto").
    return 2 if name == "float32" else _DTYPE_BYTES[name]
