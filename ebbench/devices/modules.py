"""Names of a decoder's weights as checkpoints have them, with their sizes: quantization configurations name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.mixers import Mixer, Product

ATTENTION, MLP, EXPERTS = "attention", "mlp", "experts"
_LATENT = (("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa", "kv_a_proj"), ("kv_b_proj",), ("o_proj",))
_STATE = (("in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj", "qkv_proj"), ("out_proj", "o_proj"))
_INDEX = (("indexer.wq_b", "indexer.q_proj"), ("indexer.wk", "indexer.k_proj"))


@dataclass(frozen=True)
class ModuleNames:
    """Parts of a layer: attention, what has a state in its place, MLP, experts."""

    attention: str = "self_attn"
    state: str = "linear_attn"
    mlp: str = "mlp"
    experts: str = "mlp.experts"


class Module(NamedTuple):
    """Weights of one kind that one configuration entry may name by any of ``names``, within ``layers.N``."""

    kind: str
    names: tuple[str, ...]
    params: int


def modules_of(
    model: ModelGeometry, names: ModuleNames, mixers: Sequence[Sequence[Mixer]], mlps: Sequence[str], dense: str
) -> Iterator[Module]:
    """The weights of all layers; ``mixers`` and ``mlps``: of every layer, of which ``dense`` is a dense MLP's name."""
    for layer, (own, mlp) in enumerate(zip(mixers, mlps, strict=True)):
        at = f"layers.{layer}"
        for mixer in own:
            part = names.state if mixer.kind == "state" else names.attention
            for ends, params in _of_mixer(mixer):
                yield Module(ATTENTION, tuple(f"{at}.{part}.{end}" for end in ends), params)
        if mlp == dense:
            width = model.dense_intermediate if model.experts else model.intermediate
            yield from _of_mlp(model, f"{at}.{names.mlp}", width)
        elif mlp:
            shared = tuple(f"{at}.{names.mlp}{part}" for part in (".shared_experts", ".shared_expert", ""))
            yield from _of_mlp(model, shared, model.shared_intermediate)
            ends = ("0.down_proj", "0.w2", "down_proj")
            yield Module(
                EXPERTS, tuple(f"{at}.{names.experts}.{end}" for end in ends), model.experts * model.expert_params
            )


def _of_mixer(mixer: Mixer) -> Iterator[tuple[tuple[str, ...], int]]:
    if mixer.measured_alike:
        fused, out = mixer.products
        kept = mixer.cached or 0
        queries = fused.params - kept * fused.rows
        yield ("q_proj",), max(queries, 0)
        for name in ("k_proj", "v_proj"):
            yield (name,), (fused.params - max(queries, 0)) // 2
        yield ("o_proj",), out.params
        return
    named = {"latent": _LATENT, "index": _INDEX}.get(mixer.kind, _STATE)
    if mixer.kind == "latent" and len(mixer.products) == len(_LATENT) - 1:
        named = (("q_proj",), *_LATENT[2:])
    yield from zip(named, _as_many(mixer.products, len(named)), strict=True)


def _as_many(products: Sequence[Product], count: int) -> list[int]:
    """Sizes of the products, the middle ones together if there are more than ``count``."""
    sizes = [one.params for one in products]
    return [*sizes[: count - 1], sum(sizes[count - 1 :])] if sizes else [0] * count


def _of_mlp(model: ModelGeometry, at: str | tuple[str, ...], width: int) -> Iterator[Module]:
    if not width:
        return
    places = (at,) if isinstance(at, str) else at
    ends = ("gate_proj", "up_proj", "down_proj")[3 - model.mlp_matrices :]
    for end in ends:
        yield Module(MLP, tuple(f"{place}.{end}" for place in places), model.hidden * width)
