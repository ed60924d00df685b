"""Units of several GPUs: every way to name a model gives the same one, and what cannot be divided is refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ebbench.config.topology import parse_topology
from ebbench.devices.base import Parallel, PassCost, StepShape
from ebbench.devices.costs import TableCost
from ebbench.devices.layers import Collectives, _gemm_tables
from ebbench.devices.library import select
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import DATA, find_model, find_profile
from ebbench.errors import UsageError
from tests.cluster.cluster_worlds import plan, run

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


def test_a_model_from_a_config_file_is_divided_like_the_bundled_one(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    alone, shared = first_step_s(path, "dp=1"), first_step_s(path, "tp=2")
    assert shared < 0.8 * alone
    assert shared == first_step_s("qwen3-8b", "tp=2")


def test_step_times_measured_on_one_gpu_are_not_divided() -> None:
    linear = load_device("h200", "qwen3-8b", cost="linear")
    with pytest.raises(UsageError, match="cannot be divided among several"):
        run("tp=2", plan([(100, 4)], [0.0]), on=linear)


def tp_shapes() -> list[StepShape]:
    return [
        StepShape(((512, 0),), 0, 0, 1),
        StepShape(((2048, 0),), 0, 0, 1),
        StepShape((), 32, 32 * 512, 32),
        StepShape((), 128, 128 * 2048, 128),
        StepShape(((1024, 1024),), 64, 64 * 1024, 65),
    ]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_slice_takes_longer_than_its_share_and_less_than_the_whole(tp: int) -> None:
    """Norms, sampling and the fixed parts of kernels do not divide; without collectives a slice is still faster."""
    one = load_device("h100", "qwen3-8b").cost
    several = load_device("h100", "qwen3-8b", parallel=Parallel(tp=tp)).cost
    assert isinstance(one, TableCost)
    assert isinstance(several, TableCost)
    for shape in tp_shapes():
        assert one.gpu_s(shape) / tp < several.gpu_s(shape) < one.gpu_s(shape)


# LLMServingSim's own times of one GPU's slice over two, without collectives, against our slicing of the geometry.
SLICED = [("llama-3.1-8b", 0.15), ("qwen3-32b", 0.15), ("qwen3-30b-a3b", 0.15)]


@pytest.mark.parametrize(("name", "worst"), SLICED)
def test_sliced_products_meet_those_measured_on_a_slice(name: str, worst: float) -> None:
    """Attention apart, whose slices are measured tables themselves; the products of one layer at 64 to 2,048 tokens."""
    profile, model = find_profile("rtx-pro-6000"), find_model(name)
    part = model.sliced(2)
    gemm = _gemm_tables("rtx-pro-6000", "bfloat16")
    assert gemm is not None
    layers = ("qkv_proj", "o_proj") if model.experts else ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    measured = {
        (r["layer"], r["tokens"]): r["time_us"]
        for r in select("layer", device=profile.name, model=name, tp=2).to_pylist()
    }
    for tokens in (64, 256, 1024, 2048):
        theirs = sum(measured[layer, tokens] for layer in layers) * 1e-6
        inner = part.shared_intermediate if part.experts else part.intermediate
        products = [*part.mixers[0].products, *part.mlp_products(inner)]
        ours = sum(float(np.interp(tokens, *gemm(one.columns, one.rows))) for one in products)
        assert ours == pytest.approx(theirs, rel=worst)


def test_the_link_decides_what_a_collective_takes() -> None:
    slow, fast = (
        load_device("rtx-pro-6000", "qwen3-8b", parallel=Parallel(tp=2, link=link)) for link in ("pcie", "pcie-peer")
    )
    for shape in tp_shapes():
        assert fast.cost.step_s(shape) < slow.cost.step_s(shape)
    assert "link pcie (" in slow.provenance
    assert "link pcie-peer (" in fast.provenance
    assert load_device("rtx-pro-6000", "qwen3-8b", parallel=Parallel(tp=2)).cost == slow.cost


def test_collectives_that_were_not_measured_are_a_formula_and_said() -> None:
    device = load_device("rtx-pro-6000", "qwen3-8b", parallel=Parallel(tp=4))
    assert any("were not measured" in warning and "15 GB/s" in warning for warning in map(str, device.warnings))


@pytest.mark.parametrize("gpus", [4, 8])
def test_the_link_formula_is_not_faster_than_measured_easier_cases(gpus: int) -> None:
    profile, tokens = find_profile("rtx-pro-6000"), np.array([1.0, 64.0, 512.0, 513.0, 8192.0])
    slow = Collectives(profile, "pcie", gpus)
    for times in (Collectives.all_reduce_s, Collectives.all_gather_s, Collectives.reduce_scatter_s):
        ours = times(slow, tokens, 8192.0)
        assert (ours >= times(Collectives(profile, "pcie", 2), tokens, 8192.0)).all()
        assert (ours >= times(Collectives(profile, "pcie-peer", gpus), tokens, 8192.0)).all()
    assert "and at least that measured on 2 GPUs and over pcie-peer; " in str(slow.warnings[0])


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_borrowed_collectives_are_named(gpus: int) -> None:
    own, lent = (Collectives(find_profile(name), "pcie", gpus) for name in ("rtx-4090", "l40s"))
    sizes = np.array([1.0, 64.0, 2048.0])
    for times in (Collectives.all_reduce_s, Collectives.all_gather_s, Collectives.reduce_scatter_s):
        assert np.array_equal(times(own, sizes, 8192.0), times(lent, sizes, 8192.0))
    assert not lent.warnings
    (said,) = map(str, own.warnings)
    assert said.startswith(
        f"collectives among {gpus} rtx-4090 over pcie were not measured: those of l40s stand for them; "
    )
    assert own.provenance.endswith(" of l40s")


def test_a_device_file_without_a_link_is_refused_where_gpus_share(tmp_path: Path) -> None:
    text = (DATA / "profiles" / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text[: text.index("[links.")])
    on = load_device(str(path), "qwen3-8b")
    with pytest.raises(UsageError, match=r"names no link.*\[links.pcie\]"):
        run("tp=2", plan([(100, 4)], [0.0]), on=on)
    with pytest.raises(UsageError, match="how fast GPUs like h100 pass KV on"):
        run("1p1d", plan([(100, 4)], [0.0]), on=on)
    run("dp=2,lockstep=on", plan([(100, 4)], [0.0]), on=on)  # ranks that share nothing need none


def test_pipeline_parallelism_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="pipeline parallelism is not modelled: there is no measured run"):
        parse_topology("tp=2,pp=2")


def test_shared_experts_compute_the_tokens_of_all_units() -> None:
    """Attention and dense part of the largest unit, then its share of the experts for the tokens of all units."""
    cost = load_device("h200", "qwen3-30b-a3b", parallel=Parallel(dp=2, ep=2)).cost
    assert isinstance(cost, PassCost)
    large, small = StepShape(((2048, 0),), 0, 0, 1), StepShape(((1024, 0),), 0, 0, 1)
    assert cost.pass_s([large], 2) < cost.pass_s([large, small], 2) < cost.pass_s([large, large], 2)
    decode = StepShape((), 64, 64 * 512, 64)  # inside a CUDA graph: a smaller batch is padded to the largest
    assert cost.pass_s([decode, StepShape((), 8, 8 * 512, 8)], 2) == cost.pass_s([decode, decode], 2)


def test_shared_experts_are_slower_than_replicas_at_equal_load() -> None:
    """Over two RTX PRO 6000 a published run of dp=2 with experts shared is slower per token than two replicas."""
    requests = plan([(512, 32)] * 32, [0.0] * 32)
    on = load_device("rtx-pro-6000", "qwen3-30b-a3b")
    shared, apart = (
        run(text, requests, on=on).requests["end_ns"].to_numpy().max() for text in ("tp=1,dp=2,ep=2", "dp=2")
    )
    assert shared > apart


def test_ranks_of_a_dense_model_in_lockstep_step_together() -> None:
    """As with data parallelism up to vLLM 0.13: every pass lasts as long as its slowest rank."""
    requests = plan([(400 * (1 + i % 4), 20 + i) for i in range(16)], [0.0] * 16)
    on = load_device("rtx-pro-6000", "qwen3-8b")
    together, apart = (run(text, requests, on=on) for text in ("dp=2,lockstep=on", "dp=2"))
    spans: dict[int, set[tuple[int, int]]] = {0: set(), 1: set()}
    for row in together.steps.to_pylist():
        spans[row["instance"]].add((row["start_ns"], row["end_ns"]))
    ends = sorted(spans[0] | spans[1])
    assert all(before[1] <= after[0] for before, after in pairwise(ends)), "passes overlap"
    assert len(spans[0] & spans[1]) > 0.8 * min(len(spans[0]), len(spans[1]))
    assert together.requests["end_ns"].to_numpy().mean() > apart.requests["end_ns"].to_numpy().mean()


def test_one_request_is_as_fast_in_lockstep() -> None:
    requests = plan([(1000, 30)], [0.0])
    on = load_device("rtx-pro-6000", "qwen3-8b")
    together, apart = (run(text, requests, on=on).requests for text in ("dp=2,lockstep=on", "dp=2"))
    assert together.equals(apart)


@pytest.mark.parametrize(
    ("topology", "model", "reason"),
    [
        ("lockstep=on", "qwen3-8b", "dp >= 2 units without ep"),
        ("dp=4,ep=4,lockstep=on", "qwen3-30b-a3b", "dp >= 2 units without ep"),
        ("dp=2,lockstep=on", "qwen3-30b-a3b", "share its experts: write ep=2"),
    ],
)
def test_lockstep_is_for_several_units_of_a_dense_model(topology: str, model: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run(topology, plan([(10, 2)], [0.0]), on=load_device("rtx-pro-6000", model))


def test_a_topology_in_lockstep_is_named_as_it_is_written() -> None:
    written = {"dp=4": 4, "tp=2,dp=4": 8, "instances=2,dp=2": 4, "2p2d,dp=2": 8}
    for sizes, gpus in written.items():
        spec = parse_topology(f"{sizes},lockstep=on")
        assert (spec.label, spec.gpus) == (f"{sizes},lockstep=on", gpus)


def test_ranks_in_lockstep_refill_in_the_same_passes_under_marginal() -> None:
    """A pass with prompts holds those of all ranks that have some waiting, and the run is shorter than under v1."""
    rng = np.random.default_rng(0)
    requests = plan([(int(rng.integers(500, 1500)), int(rng.integers(40, 160))) for _ in range(600)], [0.0] * 600)
    on = load_device("rtx-pro-6000", "qwen3-8b")
    ends, together = {}, {}
    for policy in ("v1", "marginal"):
        made = run("dp=4,lockstep=on", requests, on=on, policy=policy, max_num_seqs=32, max_num_batched_tokens=14336)
        ends[policy] = made.requests["end_ns"].to_numpy().max()
        ranks = Counter(row["start_ns"] for row in made.steps.to_pylist() if row["prefill_tokens"])
        together[policy] = sum(ranks.values()) / len(ranks)
    assert ends["marginal"] < 0.95 * ends["v1"]
    assert together["marginal"] > 1.2 * together["v1"]
