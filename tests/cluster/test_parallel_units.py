"""Units of several GPUs: every way to name a model gives the same one, and what cannot be divided is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_worlds import plan, run

from ebbench.devices import load_device
from ebbench.errors import UsageError

# Qwen3-8B, as its published config.json has it.
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip


def config_file(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


def first_step_s(model: str, topology: str, device: str = "h200") -> float:
    result = run(topology, plan([(2000, 4)], [0.0]), on=load_device(device, model))
    row = result.steps.to_pylist()[0]
    return float(row["end_ns"] - row["start_ns"]) / 1e9


def test_a_model_read_from_a_config_file_is_divided_like_the_same_model_by_name(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    alone, shared = first_step_s(path, "dp=1"), first_step_s(path, "tp=2")
    assert shared < 0.8 * alone
    assert shared == first_step_s("qwen3-8b", "tp=2")


def test_step_times_measured_on_one_gpu_are_not_divided() -> None:
    linear = load_device("h200", "qwen3-8b", cost="linear")
    with pytest.raises(UsageError, match="cannot be divided among several"):
        run("tp=2", plan([(100, 4)], [0.0]), on=linear)
