"""LoRA adapters with random weights for the small model, in peft's files: written by hand, no download."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.small_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

RANK = 8
_OUTPUTS = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}


def build_adapter(folder: Path, seed: int) -> Path:
    """Write adapter_config.json and adapter_model.safetensors, large enough to change what the model says."""
    import torch  # here, so that collecting tests does not wait for it
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, outputs in _OUTPUTS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "small",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(_OUTPUTS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
