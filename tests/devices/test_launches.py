"""Launches of kernels without CUDA graphs: their number by a model's structure, and what the authors measured."""

from __future__ import annotations

import pytest

from ebbench.devices.base import SINGLE, Parallel
from ebbench.devices.costs import decode_shape, published_calibration
from ebbench.devices.launches import launches
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, find_profile


@pytest.mark.parametrize(
    ("model", "per_layer"),
    [("llama-3.1-8b", 10), ("qwen3-8b", 12), ("gemma-3-1b-it", 14), ("qwen3-30b-a3b", 23), ("gpt-oss-120b", 23)],
)
def test_launches_follow_from_the_layers(model: str, per_layer: int) -> None:
    geometry = find_model(model)
    assert launches(geometry, SINGLE) == per_layer * geometry.layers


def test_collectives_and_quantised_activations_are_launches_too() -> None:
    dense, blocks = find_model("llama-3.1-70b"), find_model("minimax-m2.5")
    assert launches(dense, Parallel(tp=4)) - launches(dense, SINGLE) == 2 * dense.layers
    alike = launches(find_model("qwen3-30b-a3b"), SINGLE) / 48  # but in 16 bits, on one GPU
    quantised, reduced, normed = 2 + 2, 2, 1
    assert launches(blocks, Parallel(tp=4)) == (alike + quantised + reduced + normed) * blocks.layers
    split = Parallel(tp=1, dp=2, ep=2)
    assert launches(blocks, split) - launches(blocks, SINGLE) == 2 * blocks.layers


@pytest.mark.parametrize(
    "model",
    ["llama-3.1-8b", "qwen3-8b", "mathstral-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b", "qwen3-30b-a3b"],
)
def test_a_few_decodes_without_graphs_take_what_the_authors_measured(model: str) -> None:
    """Zhang et al.'s lines of decodes on one H200: a dense layer 210 to 250 us, one with experts 506."""
    published = published_calibration(find_profile("h200"), find_model(model))
    assert published is not None
    cost = load_device("h200", model, async_scheduling=False, eager=True).cost
    assert cost.step_s(decode_shape(16, 512)) == pytest.approx(published.alpha_d + 16 * published.beta_d, rel=0.04)
