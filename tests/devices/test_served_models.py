"""Models as people serve them: parameters as their cards have them, and layers that keep tokens.

Fields of published config.json files that matter for the shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.model_config import read_config
from tests.devices.active_params import active_params

SERVED: dict[str, tuple[dict[str, Any], float, float, int]] = {
    # model: fields, parameters and active parameters (with embeddings) in billions, KV bytes per token
    "Granite-4.0-H-Small": (
        {"model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536,
         "intermediate_size": 768, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128,
         "mamba_d_head": 64, "mamba_n_groups": 1, "tie_word_embeddings": True, "vocab_size": 100352,
         "layer_types": (["mamba"] * 9 + ["attention"]) * 4}, 32.2, 8.8, 16_384),
    "ERNIE-4.5-21B-A3B": (
        {"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
         "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64,
         "moe_num_shared_experts": 2, "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 27,
         "moe_layer_interval": 1, "vocab_size": 103424, "tie_word_embeddings": True}, 21.8, 3.35, 57_344),
    "Hunyuan-A13B": (
        {"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 3072, "vocab_size": 128167,
         "num_experts": 64, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32,
         "use_mixed_mlp_moe": True, "use_cla": False, "cla_share_factor": 2, "tie_word_embeddings": True},
        80.4, 12.75, 131_072),
    "Gemma-3-27B": (
        {"model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024}},
        27.0, 27.0, 507_904),
    "Command A": (
        {"model_type": "cohere2", "hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 64,
         "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000,
         "sliding_window": 4096, "sliding_window_pattern": 4}, 111.1, 111.1, 262_144),
    "Nemotron-Nano-9B-v2": (
        {"model_type": "nemotron_h", "num_hidden_layers": 56, "hidden_size": 4480, "intermediate_size": 15680,
         "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
         "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128,
         "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "vocab_size": 131072},
        8.9, 8.9, 16_384),
    "MiniMax-Text-01": (
        {"model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
         "num_experts_per_tok": 2, "vocab_size": 200064, "attn_type_list": ([0] * 7 + [1]) * 10}, 456.1, 48.4, 40_960),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
         "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400}, 15.7, 2.66, 31_104),
    "Kimi-Linear-48B-A3B": (
        {"model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "vocab_size": 163840,
         "num_attention_heads": 32, "head_dim": 72, "num_experts": 256, "num_experts_per_token": 8,
         "moe_intermediate_size": 1024, "intermediate_size": 9216, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "num_shared_experts": 1,
         "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                                "short_conv_kernel_size": 4}}, 49.1, 3.48, 8_064),
    "Jamba-1.5-Mini": (
        {"model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
         "expert_layer_period": 2, "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4,
         "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "num_attention_heads": 32, "num_experts": 16,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 65536},
        51.6, 12.1, 16_384),
    "Step-3": (
        {"model_type": "step3_vl", "text_config": {
            "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_attention_groups": 1,
            "num_hidden_layers": 61, "max_seq_len": 65536, "vocab_size": 128815, "moe_intermediate_size": 5120,
            "moe_num_experts": 48, "moe_top_k": 3, "share_expert_dim": 5120, "share_q_dim": 2048, "head_dim": 256,
            "moe_layers_enum": ",".join(map(str, range(4, 60)))}}, 316.3, 38.8, 62_464),
    "LongCat-Flash": (
        {"model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
         "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256,
         "zero_expert_type": "identity", "moe_topk": 12, "kv_lora_rank": 512, "q_lora_rank": 1536,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
         "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}, 560.6, 27.8, 64_512),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
         "max_seq_len": 32768,
         "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
         "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}, 131.6, 36.5, 163_840),
    "Falcon-7B": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "multi_query": True, "vocab_size": 65024}, 6.9, 6.9, 8_192),
    "LFM2-8B-A1B": (
        {"model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
         "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3, "vocab_size": 65536,
         "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]},
        8.3, 1.56, 12_288),
    "Step-3.5-Flash": (
        {"model_type": "step3p5", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
         "num_attention_groups": 8, "head_dim": 128, "vocab_size": 128896, "intermediate_size": 11264,
         "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
         "moe_layers_enum": ",".join(map(str, range(3, 45))), "sliding_window": 512,
         "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
         "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                     "num_attention_groups": 8, "head_dim": 128}}, 196.9, 12.0, 184_320),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_model_has_the_parameters_of_its_card(name: str, tmp_path: Path) -> None:
    fields, billions, active, kv = SERVED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = read_config(tmp_path / "config.json")
    assert model.params / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_params(model) / 1e9 == pytest.approx(active, rel=0.02)
    assert model.kv_bytes_per_token == kv
