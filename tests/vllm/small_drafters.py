"""Models with random weights that draft, and heads for them: MTP, EAGLE and EAGLE-3 as vLLM's CPU build runs them.

A layer of these models adds little to its input, so the next token hangs mostly on the last one. The heads guess it
from the last one alone: some drafts are accepted and some are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm import small_model
from tests.vllm.small_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP

if TYPE_CHECKING:
    import torch

TOKENS = 3
LAYERS_OF_EAGLE3 = 8  # its head reads the hidden states of three: the third, a middle and the third last one
PROJECTIONS = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}


@dataclass(frozen=True)
class Drafter:
    """A model's folder, and what a server of it takes as ``--speculative-config``."""

    model: Path
    config: dict[str, Any]


def n_grams(folder: Path) -> Drafter:
    """Tokens that followed the last ones before; no weights."""
    config = {"method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return Drafter(small_model.build(folder / "model"), config)


def mtp(folder: Path, *, spells: bool = False) -> Drafter:
    """MiMo: a Qwen2 model and a layer for multi-token prediction, in one checkpoint."""
    import torch

    model = small_model.build(folder / "model", spells=spells, change=0.3)
    small_model.write_config(model, architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1)
    norms_of_qwen3 = (".q_norm.", ".k_norm.")
    weights = {
        name: tensor
        for name, tensor in small_model.weights(change=0.3).items()
        if not any(norm in name for norm in norms_of_qwen3)
    }
    layer = "model.mtp_layers.0"
    weights |= _silent_layer(layer) | _ones(
        f"{layer}.{norm}_layernorm" for norm in ("input", "token", "hidden", "final")
    )
    weights[f"{layer}.input_proj.weight"] = _first_half().roll(HIDDEN, 1)  # the embedding comes second
    for name in (layer, *(f"model.layers.{number}" for number in range(LAYERS))):
        weights |= {f"{name}.self_attn.{part}.bias": torch.zeros(size) for part, size in PROJECTIONS.items()}
    small_model.write_weights(model, weights)
    return Drafter(model, {"method": "mtp", "num_speculative_tokens": TOKENS})


def eagle(folder: Path, *, spells: bool = False) -> Drafter:
    """The head's layer adds nothing to the last token's embedding."""
    model = small_model.build(folder / "model", spells=spells, change=0.3)
    return _headed("eagle", model, folder / "head", _silent_layer("layers.0") | {"fc.weight": _first_half()})


def eagle3(folder: Path) -> Drafter:
    """The head's attention sees the last token alone, and passes half of its embedding on."""
    import torch

    model = small_model.build(folder / "model", layers=LAYERS_OF_EAGLE3, change=0.15)
    layer, half = "layers.0", KV_HEADS * HEAD_DIM
    weights = _silent_layer(layer, 2 * HIDDEN) | {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}
    weights |= _ones(("norm", f"{layer}.input_layernorm", f"{layer}.hidden_norm"))
    for part, size in PROJECTIONS.items():  # queries and keys all alike: rotated, those of the same place fit best
        weights[f"{layer}.self_attn.{part}.bias"] = torch.full((size,), 0.0 if part == "v_proj" else 7.0)
    weights[f"{layer}.self_attn.v_proj.weight"] = _first_half()[:half]
    weights[f"{layer}.self_attn.o_proj.weight"][:half, :half] = torch.eye(half)
    weights[f"{layer}.self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    return _headed("eagle3", model, folder / "head", weights, attention_bias=True)


DRAFTERS: dict[str, Callable[[Path], Drafter]] = {"ngram": n_grams, "mtp": mtp, "eagle": eagle, "eagle3": eagle3}


def _headed(method: str, model: Path, head: Path, weights: dict[str, torch.Tensor], **config: Any) -> Drafter:
    """A drafter whose head has a folder of its own; it shares the model's embedding and output layer."""
    small_model.write_config(head, architectures=["LlamaForCausalLM"], model_type="llama", layers=1, **config)
    small_model.write_weights(head, weights)
    return Drafter(model, {"method": method, "model": str(head), "num_speculative_tokens": TOKENS})


def _silent_layer(name: str, inputs: int = HIDDEN) -> dict[str, torch.Tensor]:
    """A decoder layer whose output is its input. ``inputs``: values per token that its attention reads."""
    import torch

    shapes = {f"self_attn.{part}": (size, inputs) for part, size in PROJECTIONS.items()}
    shapes |= {"self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM), "mlp.down_proj": (HIDDEN, MLP)}
    shapes |= {"mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN)}
    weights = {f"{name}.{part}.weight": torch.zeros(shape) for part, shape in shapes.items()}
    return weights | _ones((f"{name}.post_attention_layernorm",))


def _ones(norms: Iterable[str]) -> dict[str, torch.Tensor]:
    import torch

    return {f"{norm}.weight": torch.ones(HIDDEN) for norm in norms}


def _first_half() -> torch.Tensor:
    """Maps two hidden states to the first of them."""
    import torch

    return torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
