"""Shared prefixes of synthetic prompts: groups, shares, and hit rates that runs then have."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.client.prefix_cache import repeated_share
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.records.plan import block_tokens, token_ids
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy


def hit_rate(plan: Any) -> float:
    """Share of the prompt tokens that a simulated server with ample memory found cached."""
    options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=8192)
    result = SimEngine().run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), options, None)
    table = result.requests
    return float(table["cached_tokens"].to_numpy().sum() / table["input_tokens"].to_numpy().sum())


def test_the_share_of_every_prompt_is_common_to_its_group() -> None:
    plan = build_plan("balanced", num_prompts=200, prefix_share=0.6, prefix_groups=4)
    ids, lengths = plan.table["hash_ids"].to_pylist(), plan.table["input_tokens"].to_numpy()
    assert block_tokens(plan.table) == 16
    named = np.array([16 * len(one) for one in ids])
    assert np.abs(named - 0.6 * lengths).max() <= 8
    first = [one[0] for one in ids]
    assert sorted(np.bincount(np.unique(first, return_inverse=True)[1])) == [50] * 4
    prompts = [
        token_ids(content, one, 0, length, 1000, 16)
        for content, one, length in zip(plan.table["content"].to_pylist(), ids, lengths.tolist(), strict=True)
    ]
    twin = next(row for row in range(1, 200) if first[row] == first[0])
    common = min(named[twin], named[0])
    assert np.array_equal(prompts[twin][:common], prompts[0][:common])
    assert not np.array_equal(prompts[twin][common:][:40], prompts[0][common:][:40])


@pytest.mark.parametrize("groups", [1, 20])
def test_runs_have_the_hit_rate_asked_for(groups: int) -> None:
    plan = build_plan(
        "balanced", "constant", request_rate=0.5, num_prompts=300, output_len=30, cache_hit_rate=0.4,
        prefix_groups=groups, seed=3,
    )  # fmt: skip
    assert plan.facts["planned_hit_rate"] == pytest.approx(0.4, abs=0.01)
    assert hit_rate(plan) == pytest.approx(0.4, abs=0.01)
    assert repeated_share(plan.table) == pytest.approx(0.4, abs=0.01)


def test_conversations_share_prefixes_too() -> None:
    options: dict[str, Any] = {"num_prompts": 60, "source": "profile", "seed": 1}
    plain, shared = build_plan("wildchat", **options), build_plan("wildchat", prefix_share=0.9, **options)
    assert shared.facts["planned_hit_rate"] > 0.5
    assert hit_rate(shared) > hit_rate(plain)


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.05, 0.8), groups=st.integers(1, 8), seed=st.integers(0, 99))
def test_planned_hit_rates_are_met_or_refused(rate: float, groups: int, seed: int) -> None:
    try:
        plan = build_plan("balanced", num_prompts=80, cache_hit_rate=rate, prefix_groups=groups, seed=seed)
    except UsageError:
        with pytest.raises(UsageError, match="cannot be reached"):
            build_plan("balanced", num_prompts=80, cache_hit_rate=rate, prefix_groups=groups, seed=seed)
        return
    assert plan.facts["planned_hit_rate"] == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix_share": 1.5}, "between 0 and 1"),
        ({"prefix_groups": 3}, "needs --prefix-share or --cache-hit-rate"),
        ({"prefix_share": 0.5, "cache_hit_rate": 0.5}, "leave one of them out"),
        ({"prefix_share": 0.5, "prefix_groups": 0}, "at least 1"),
        (
            {"cache_hit_rate": 0.9, "prefix_groups": 20, "num_prompts": 30},
            "cannot be reached: 20 groups of 30",
        ),
    ],
)
def test_wrong_prefix_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_plan("balanced", **arguments)


def test_recorded_prompts_keep_their_own_prefixes(data: Any) -> None:
    with pytest.raises(UsageError, match="brings its own"):
        build_plan(f"log:{data / 'mooncake.jsonl'}", prefix_share=0.5)
    with pytest.raises(UsageError, match="add --source profile"):
        build_plan("sharegpt", source=f"file:{data / 'sharegpt.json'}", prefix_share=0.5)
