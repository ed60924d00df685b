"""Qwen3-style models with random weights and a tokenizer, built on the spot: real tokens on a CPU, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = 512
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 2, 1, 32, 128
EXPERTS_PER_TOKEN = 2
MAX_POSITIONS = 2048


def build(
    folder: Path, seed: int = 0, *, spells: bool = False, experts: int = 0, layers: int = LAYERS, change: float = 1.0
) -> Path:
    """Write config, weights and tokenizer into ``folder``.

    ``spells``: tokens are bytes, so any text can be made. ``experts``: how many each layer has; 0: a dense model.
    ``change``: how much each layer adds to its input. Where it is little, the next token hangs mostly on the last one,
    and can be guessed from it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, experts=experts, layers=layers)
    write_weights(folder, weights(seed, experts, layers, change))
    (_write_byte_tokenizer if spells else _write_tokenizer)(folder)
    return folder


def write_config(folder: Path, *, experts: int = 0, layers: int = LAYERS, **further: Any) -> None:
    """Write config.json alone: vLLM needs no more for random weights and prompts of token ids. ``further``: keys."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": MLP,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config | further), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}), encoding="utf-8")


def write_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint of one file."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights(seed: int = 0, experts: int = 0, layers: int = LAYERS, change: float = 1.0) -> dict[str, torch.Tensor]:
    """Random weights by name. See :func:`build`."""
    import torch  # here, so that collecting tests does not wait for it

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        # Well apart logits: a greedy choice must not hang on the last bit of a sum.
        "lm_head.weight": random(VOCABULARY, HIDDEN, scale=8.0),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM, scale=change),
            f"{name}.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            f"{name}.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        }
        if experts:
            tensors[f"{name}.mlp.gate.weight"] = random(experts, HIDDEN, scale=4.0)
        for mlp in [f"{name}.mlp.experts.{number}" for number in range(experts)] or [f"{name}.mlp"]:
            tensors |= {
                f"{mlp}.gate_proj.weight": random(MLP, HIDDEN),
                f"{mlp}.up_proj.weight": random(MLP, HIDDEN),
                f"{mlp}.down_proj.weight": random(HIDDEN, MLP, scale=change),
            }
    return tensors


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<bos>", "<eos>", "<unk>"] + [f"w{number}" for number in range(3, VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<bos>", "<eos>", "<unk>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number}" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    _write_tokenizer_config(folder, chat_template=template)


def _write_tokenizer_config(folder: Path, **further: str) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": MAX_POSITIONS,
        **further,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
