"""The kernel-table model against the measurements it interpolates, and against measurements that are not in it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.devices.base import Parallel, StepShape
from ebbench.devices.costs import TableCost, decode_shape, prefill_shape, published_calibration
from ebbench.devices.describe import marginal_curve
from ebbench.devices.layers import Collectives, expert_times, step_arrays
from ebbench.devices.library import SCHEMAS, kernel_table, read_table, select
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import DATA, find_model, find_profile
from ebbench.devices.surfaces import US, surfaces
from ebbench.errors import DataError
from ebbench.spec.server import HostCosts

AS_PROFILED = HostCosts(0.0, 0.0, 1.0)


@pytest.mark.parametrize("device", ["rtx-pro-6000", "rtx-4090"])
def test_joint_tables_come_back_at_their_grid_points(device: str) -> None:
    raw = surfaces(find_profile(device), find_model("llama-3.1-8b").mixers[0], "bfloat16")
    assert raw is not None
    tables = raw[0].tables(mixed_excess=1.0)
    rows = select("mixed", device=device, heads=32, kv_heads=8).to_pylist()
    checked = 0
    for row in rows:
        chunk, before, seqs, context = (row[c] for c in ("chunk", "before", "seqs", "context"))
        if chunk in (64, 512, 2048) and before in (0, 2048) and seqs in (32, 128) and context in (512, 4096):
            ours = tables.step_s(((chunk, before),), seqs, seqs * context)
            assert ours == pytest.approx(row["time_us"] * US, rel=0.06)
            checked += 1
    assert checked == 24


@pytest.mark.parametrize(("device", "worst"), [("rtx-pro-6000", 0.32)])
def test_mixed_attention_agrees_with_another_profile_beyond_the_table(device: str, worst: float) -> None:
    """512 requests, 51 to 204 of them prompts: far beyond 128 decodes and one chunk (eb-vllm's kernel sweep)."""
    raw = surfaces(find_profile(device), find_model("llama-3.1-8b").mixers[0], "bfloat16")
    assert raw is not None
    tables = raw[0].tables(mixed_excess=1.0)
    path = Path(__file__).parents[2] / "reports" / "reference" / "eb_vllm" / "attention_kernel_rtxpro6000.csv"
    errors = []
    for row in csv.DictReader(path.open(encoding="utf-8")):
        if row["batch"] in ("mixed_10pct", "mixed_20pct", "mixed_40pct"):
            length, prompts, seqs = (int(row[c]) for c in ("prefill_len", "num_prefill", "num_decode"))
            ours = tables.step_s(((length, 0),) * prompts, seqs, seqs * length)
            errors.append(ours * 1e3 / float(row["time_ms"]) - 1)
    assert len(errors) == 15
    assert max(map(abs, errors)) < worst


CALIBRATED = [
    (device, model)
    for device in ("rtx-pro-6000", "h200")
    for model in ("qwen3-8b", "llama-3.1-8b", "mathstral-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b")
]


@pytest.mark.parametrize(("device", "model"), CALIBRATED)
def test_decode_steps_agree_with_the_published_calibration(device: str, model: str) -> None:
    """No number of calibration.csv is in the tables; 512 decodes of 512 tokens, eager mode, within 14 %."""
    published = published_calibration(find_profile(device), find_model(model))
    assert published is not None
    cost = load_device(device, model, async_scheduling=False, eager=True).cost
    line = published.alpha_d + published.beta_d * 512
    assert cost.step_s(decode_shape(512, 512)) == pytest.approx(line, rel=0.14)


def test_mixing_costs_more_from_the_published_decode_share_on() -> None:
    """Figure 1: mixing costs more above a decode share of about 0.2 on RTX PRO 6000, on H200 only near 0.8."""
    narrow = marginal_curve(load_device("rtx-pro-6000", "qwen3-8b", async_scheduling=False).cost, 512).crossover
    wide = marginal_curve(load_device("h200", "qwen3-8b", async_scheduling=False).cost, 512).crossover
    assert narrow is not None
    assert 0.1 < narrow < 0.3
    assert wide is None or wide > 0.7


def test_sliding_layers_stop_growing_with_context() -> None:
    cost = load_device("h200", "gemma-3-1b-it", host=AS_PROFILED).cost
    assert isinstance(cost, TableCost)
    (_, full), (_, sliding) = cost.attention
    inside = sliding.step_s((), 64, 64 * 512)
    assert sliding.step_s((), 64, 64 * 4096) == pytest.approx(inside)
    assert full.step_s((), 64, 64 * 4096) > 2 * full.step_s((), 64, 64 * 512)


def test_heads_between_two_profiled_geometries_lie_between_their_costs() -> None:
    """Qwen3-14B has 40 query heads on 8 KV heads; 32 and 64 are profiled."""
    profile = find_profile("rtx-pro-6000")
    step = (((512, 0),), 128, 128 * 512)
    costs = []
    for name in ("qwen3-8b", "qwen3-14b", "qwen3-32b"):
        raw = surfaces(profile, find_model(name).mixers[0], "bfloat16")
        assert raw is not None
        costs.append(raw[0].tables(1.0).step_s(*step))
    assert costs[0] < costs[1] < costs[2]


@pytest.mark.usefixtures("without_library")
def test_unknown_experts_are_scaled_from_the_nearest_and_say_so(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "mixtral", "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 32,'
        '"num_key_value_heads": 8, "intermediate_size": 1000, "vocab_size": 32000, "num_local_experts": 7,'
        '"num_experts_per_tok": 3, "moe_intermediate_size": 999}'
    )
    device = load_device("h200", str(config))
    assert any("those of 2 of 8 experts of 4096 x 14336, scaled" in warning for warning in map(str, device.warnings))
    assert device.cost.step_s(prefill_shape(512)) > 0


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_packaged_tables_pass_their_own_checks(kind: str) -> None:
    assert kernel_table(kind).num_rows > 1000
    assert b"licence" in pq.read_schema(DATA / "kernels" / f"{kind}.parquet").metadata


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.rename_columns([*t.column_names[:-1], "time_ms"]), "'time_ms' is unknown"),
        (lambda t: t.drop_columns(["tokens"]), "'tokens' is missing"),
        (lambda t: t.set_column(5, "time_us", pa.array([-1.0] * t.num_rows, pa.float32())), "not positive"),
        (lambda t: t.set_column(5, "time_us", pa.array([None] * t.num_rows, pa.float32())), "'time_us' has a hole"),
    ],
)
def test_bad_tables_are_refused_with_the_column(tmp_path: Path, change: Callable[[str], str], named: str) -> None:
    table = change(kernel_table("gemm").slice(0, 3))
    pq.write_table(table, tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=named):
        read_table(tmp_path / "bad.parquet", "gemm")


def test_a_step_without_sampled_sequences_has_no_cost_of_the_output_head() -> None:
    cost = load_device("rtx-pro-6000", "qwen3-8b", host=AS_PROFILED).cost
    chunk = StepShape(((2048, 0),), 0, 0, 0)
    assert cost.step_s(chunk) < cost.step_s(chunk._replace(sampled_seqs=1))


@pytest.mark.parametrize("device", ["rtx-pro-6000", "h200"])
@pytest.mark.parametrize("before", [0, 511])
def test_a_chunk_of_one_token_takes_as_long_as_a_decode(device: str, before: int) -> None:
    """vLLM tells prompts from decodes by the tokens of a step: the last token of a prompt found in the cache is one."""
    cost = load_device(device, "qwen3-8b").cost
    others = ((300, 0),)
    for chunks in ((), others):
        alone = cost.step_s(StepShape((*chunks, (1, before)), 127, 127 * 600, 128 + len(chunks)))
        decode = cost.step_s(StepShape(chunks, 128, 127 * 600 + before + 1, 128 + len(chunks)))
        assert alone == decode


def test_every_layer_with_experts_pays_for_its_router() -> None:
    """A product in 16 bits of the hidden size and the number of experts, whatever the experts' type."""
    profile, model = find_profile("h200"), replace(find_model("minimax-m2.5"), router_dtype="bfloat16")
    idle = replace(model, experts=0, dense_intermediate=0, intermediate=0)  # the layers without their MLPs
    with_experts, without = (step_arrays(profile, each) for each in (model, idle))
    (points, times), _, _ = expert_times(profile, model, Parallel())
    router = select("gemm", device="h200", dtype="bfloat16", n=512, k=3072, tokens=64).to_pydict()["time_us"]
    assert with_experts is not None
    assert without is not None
    assert len(router) == 1
    beside = (with_experts.dense[64] - without.dense[64]) / model.layers - np.interp(64, points, times)
    assert beside == pytest.approx(router[0] * US, rel=0.3)  # widths below 512 were not measured


def test_norms_over_all_heads_add_their_sums_over_the_gpus() -> None:
    profile, model, four = find_profile("h200"), find_model("minimax-m2.5"), Parallel(tp=4)
    apart = replace(model, joint_norms=False)
    for shape, reduced in ((four, model.layers), (Parallel(), 0)):
        joint, own = (step_arrays(profile, each, shape) for each in (model, apart))
        assert joint is not None
        assert own is not None
        sums_s = Collectives(profile, "nvlink", 4).all_reduce_s(np.array([8.0]), 8.0)[0]
        assert joint.dense[8] - own.dense[8] == pytest.approx(reduced * sums_s)
        assert not reduced or sums_s > 1e-6
