"""Stand-ins for the models that vLLM's tests name: configuration and tokenizer, weights only where answers are made.

vLLM's VLLM_MODEL_REDIRECT_PATH takes them in place of the hub's, so the tests need no network.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm import small_model

IMAGE = "<image>"
WORDS = 1000


def build(folder: Path) -> Path:
    """Write the stand-ins; returns the file that says which model is replaced by which folder."""
    _save(folder / "opt", "OPTConfig", "OPTForCausalLM", {})
    _llava(folder / "llava")
    small_model.build(folder / "small")
    redirect = folder / "redirect.json"
    named = {
        "facebook/opt-125m": "opt",
        "facebook/opt-350m": "opt",
        "llava-hf/llava-1.5-7b-hf": "llava",
        "Qwen/Qwen2.5-VL-3B-Instruct": "llava",
        "hmellor/tiny-random-LlamaForCausalLM": "small",
        "Qwen/Qwen3-0.6B": "small",
    }
    redirect.write_text(json.dumps({name: str(folder / stand_in) for name, stand_in in named.items()}), "utf-8")
    return redirect


def _save(folder: Path, kind: str, architecture: str, settings: dict[str, object]) -> None:
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, kind)(architectures=[architecture], **settings)
    config.save_pretrained(folder)
    _tokenizer(folder)


def _llava(folder: Path) -> None:
    """LLaVA 1.5's image size and patches, hence its number of tokens per image; the rest is tiny."""
    side, patch = 336, 14
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": side, "patch_size": patch, "projection_dim": 64,
    }  # fmt: skip
    text = {"model_type": "llama", "vocab_size": WORDS, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    settings = {"vision_config": vision, "text_config": text, "image_token_index": 4}
    _save(folder, "LlavaConfig", "LlavaForConditionalGeneration", settings)
    images = {
        "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side},
    }  # fmt: skip
    processor = {
        "processor_class": "LlavaProcessor", "patch_size": patch, "vision_feature_select_strategy": "default",
        "image_token": IMAGE, "num_additional_image_tokens": 1,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<s>", "<pad>", "</s>", "<unk>", IMAGE]
    words = [*special, *(f"w{number}" for number in range(len(special), WORDS))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "unk_token": "<unk>", "additional_special_tokens": [IMAGE], "model_max_length": 4096,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
