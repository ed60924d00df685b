"""Every decoder that transformers knows, within models of images too: parameters and KV cache as in its own classes,
or refused.

The models have no weights (``meta`` device) and the sizes that their classes have by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.model_config import class_defaults, read_config
from ebbench.errors import InputFileError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Values for classes whose own defaults make no model, or one without attention.
FIRST_DENSE = {"first_k_dense_replace": 1}
SET: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6, **FIRST_DENSE},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 2, **FIRST_DENSE},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba"] * 5 + ["attention"], "num_hidden_layers": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    "longcat_flash": {"zero_expert_num": 0},  # whose class has weights for experts without any
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128},
    "nemotron_h": {"hybrid_override_pattern": "M-M*ME-M"},
    "qwen2": {"use_sliding_window": True, "sliding_window": 1024},
}
LISTS = ("layer_types", "mlp_layer_types")
LEAST_READ = 157
"""Types that are read today: fewer would mean that a rule was lost."""
BESIDE_TEXT = re.compile(
    r"vision(?!_moe)|visual|image|audio|speech|projector|connector|multi_modal|aligner|resampler|qformer|query_tokens|tower|"
    r"merger|patch|adapter|downsample|vqmodel|generation_|vit|sam_"
)
"""Names of parts of a model of images that are not its decoder's."""


def configured(kind: str) -> tuple[Any, Any]:
    """The class's own configuration of this type, and what makes models of it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[kind](**SET.get(kind, {}))
    text = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = config.get_text_config(decoder=True) if text else config
    return config, AutoModelForCausalLM if text else AutoModelForImageTextToText


def written(config: Any) -> dict[str, Any]:
    """Its config.json, which has the decoder's within it for models of images."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def built(config: Any, maker: Any) -> Any:
    """A model of it without weights, and without what fills them: most of the time otherwise."""
    import torch
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = maker.from_config(config)
    model.tie_weights()  # what fills them does that, too
    return model


def decoders(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any], ModelGeometry]]:
    """Every type that can be built here and is not refused, with what is read of it."""
    from transformers.models.auto import modeling_auto

    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for kind in sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *images}):
        try:
            config, maker = configured(kind)
            content = written(config)
        except Exception:  # a class whose defaults make no model, each for reasons of its own
            continue
        geometry = read(folder, content)
        if isinstance(geometry, str):
            continue
        try:
            model = built(config, maker)
        except Exception:
            continue
        yield kind, model, content, geometry


def kv_elements(model: Any) -> int:
    """Keys and values per token that the projections of all layers give; latents where they are shared."""
    total = 0
    for name, module in model.named_modules():
        if BESIDE_TEXT.search(name) or re.search(r"encoder\.|indexer|linear_attn", name):
            continue
        parts = {child: each for child, each in module.named_children() if hasattr(each, "weight")}
        if hasattr(module, "forget_gate"):  # Kimi's linear layers
            continue
        if "kv_a_proj_with_mqa" in parts:
            total += wide(parts["kv_a_proj_with_mqa"])
        elif "k_proj" in parts:
            total += wide(parts["k_proj"]) + wide(parts.get("v_proj", parts["k_proj"]))
        else:
            fused = next((parts[one] for one in ("qkv_proj", "c_attn", "query_key_value") if one in parts), None)
            out = next((parts[one] for one in ("o_proj", "c_proj", "dense") if one in parts), None)
            if fused is not None and out is not None:
                total += wide(fused) - high(out)
    return total


def wide(projection: Any) -> int:
    """Outputs of a projection, also of GPT-2's, which is transposed."""
    return int(projection.nf) if hasattr(projection, "nf") else int(projection.weight.shape[0])


def high(projection: Any) -> int:
    """Its inputs."""
    shape = projection.weight.shape
    return int(shape[0] if hasattr(projection, "nf") else shape[1])


def read(folder: Path, config: dict[str, Any]) -> ModelGeometry | str:
    """The geometry, or the message of the refusal."""
    path = folder / "config.json"
    path.write_text(json.dumps(config).replace('{"__float__": "Infinity"}', "1e9"))
    try:
        return read_config(path)
    except InputFileError as error:
        return str(error)


def differences(geometry: ModelGeometry, model: Any, config: dict[str, Any]) -> list[str]:
    """What is not as in the class itself."""
    found = []
    config = config.get("text_config") or config
    parameters = sum(each.numel() for name, each in model.named_parameters() if not BESIDE_TEXT.search(name))
    if abs(geometry.params / parameters - 1.0) > 0.01:
        found.append(f"{geometry.params:,} parameters, not {parameters:,}")
    kept = sum(mixer.layers * mixer.cached for mixer in geometry.mixers)
    if kept != kv_elements(model):
        found.append(f"{kept:,} elements of KV per token, not {kv_elements(model):,}")
    windowed = sum(mixer.layers for mixer in geometry.mixers if mixer.kind == "window")
    window = config.get("sliding_window") or config.get("sliding_window_size")
    longest, kinds = config.get("max_position_embeddings"), config.get("layer_types") or []
    windows = sum(kind in ("sliding_attention", "hybrid_sliding") for kind in kinds)
    stated = windows if window and (longest is None or window < longest) else 0
    if kinds and windowed != stated:
        found.append(f"{windowed} layers with a window, not {stated}")
    return found


def test_every_decoder_of_transformers_is_read_right_or_refused(tmp_path: Path) -> None:
    wrong, right = {}, []
    for kind, model, config, geometry in decoders(tmp_path):
        found = differences(geometry, model, config)
        without = read(tmp_path, {key: value for key, value in config.items() if key not in LISTS})
        listed = SET.get(kind, {}).keys() & set(LISTS) or not config.get("layer_types")
        if not isinstance(without, str) and not listed and without.mixers != geometry.mixers:
            found.append("other layers without the lists of their kinds")
        if found:
            wrong[kind] = found
        right.append(kind)
    assert not wrong, "\n".join(f"{kind}: {'; '.join(found)}" for kind, found in wrong.items())
    assert len(right) >= LEAST_READ, right


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3_text", "gpt_oss", "kimi_linear", "qwen3_5_moe_text"])
def test_the_parameters_found_are_not_those_of_another_model(kind: str, tmp_path: Path) -> None:
    """The comparison itself: half of the layers are noticed."""
    own, maker = configured(kind)
    model, config = built(own, maker), written(own)
    half = config["num_hidden_layers"] // 2
    shortened = {**config, "num_hidden_layers": half}
    for key in LISTS:
        if config.get(key):
            shortened[key] = config[key][:half]
    geometry = read(tmp_path, shortened)
    assert not isinstance(geometry, str), geometry
    assert differences(geometry, model, config)


def main_sizes(model: ModelGeometry | str) -> Any:
    """What is compared."""
    return model if isinstance(model, str) else (model.params, model.mixers, model.experts_per_token)


def test_what_a_config_leaves_out_is_as_its_class_has_it(tmp_path: Path) -> None:
    """The decoder within a model of images, which says no more than that it has twice the heads."""
    from tests.vllm.class_defaults import class_of, full

    wrong = {}
    for kind in sorted(class_defaults()):
        cls: Any = class_of(kind)
        heads = cls.attribute_map.get("num_attention_heads", "num_attention_heads")
        changed = {**SET.get(kind, {}), heads: 2 * full(cls)[heads]}
        try:
            whole = read(tmp_path, {**full(cls, **changed), "model_type": kind})
        except Exception:  # heads that the class refuses
            continue
        short = read(tmp_path, {"model_type": "any_vl", "text_config": {"model_type": kind, **changed}})
        if not isinstance(short, str) and main_sizes(short) != main_sizes(whole):
            wrong[kind] = (short, whole)
    assert not wrong
