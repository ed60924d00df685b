"""Model geometry: published parameter counts, and any config.json of a decoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.devices.geometry import read_config
from ebbench.devices.layers import step_arrays
from ebbench.devices.profiles import find_model, find_profile, list_models
from ebbench.errors import InputFileError, UnknownNameError

# Parameter counts from the models' cards, billions.
PUBLISHED = {
    "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "llama-3.1-8b": 8.03, "gemma-3-1b-it": 1.0, "mistral-7b": 7.24, "qwen2.5-coder-7b": 7.62,
}  # fmt: skip

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(tmp_path: Path, **fields: object) -> Path:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**DENSE, **fields}))
    return path


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert find_model(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_config_json_gives_the_same_geometry_as_the_short_name(tmp_path: Path) -> None:
    read, known = read_config(config(tmp_path)), find_model("qwen3-8b")
    for field in ("layers", "qkv_width", "params", "kv_bytes_per_token", "qk_norm", "norms", "weight_bytes"):
        assert getattr(read, field) == getattr(known, field)


def test_moe_config(tmp_path: Path) -> None:
    path = config(
        tmp_path, model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, num_key_value_heads=4,
        intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    assert read_config(path).params == find_model("qwen3-30b-a3b").params


def test_missing_head_dim_and_kv_heads_follow_from_the_others(tmp_path: Path) -> None:
    path = config(tmp_path)
    raw = json.loads(path.read_text())
    del raw["head_dim"], raw["num_key_value_heads"]
    path.write_text(json.dumps(raw))
    model = read_config(path)
    assert (model.head_dim, model.kv_heads) == (128, 32)


def test_nested_text_config_with_layer_types(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    path = tmp_path / "config.json"
    text = {**DENSE, "num_hidden_layers": 6, "sliding_window": 512, "layer_types": kinds}
    path.write_text(json.dumps({"text_config": text}))
    model = read_config(path)
    assert (model.sliding_window, model.sliding_layers) == (512, 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
    ],
)
def test_bad_config_is_refused_with_the_field(tmp_path: Path, fields: dict[str, object], named: str) -> None:
    with pytest.raises(InputFileError, match=named):
        read_config(config(tmp_path, **fields))


def test_unreadable_config(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(InputFileError, match="not JSON"):
        read_config(broken)
    with pytest.raises(InputFileError, match="cannot be read"):
        read_config(tmp_path / "nowhere.json")


def test_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'qwen3-8b'"):
        find_model("qwen3-8")
    assert find_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    assert "qwen3-8b" in list_models()


@pytest.mark.parametrize(("kind", "norms"), [("gemma3_text", 4), ("gemma2", 4), ("qwen3", 2), ("llama", 2)])
def test_gemma_has_norms_before_and_after_each_half_of_a_layer(tmp_path: Path, kind: str, norms: int) -> None:
    assert read_config(config(tmp_path, model_type=kind)).norms == norms


def test_further_norms_take_time_in_every_step() -> None:
    gemma = find_model("gemma-3-1b-it")
    two, four = (step_arrays(find_profile("h200"), replace(gemma, norms=norms)) for norms in (2, 4))
    assert two is not None
    assert four is not None
    assert all(four.dense[tokens] > two.dense[tokens] for tokens in (1, 256, 16_384))
