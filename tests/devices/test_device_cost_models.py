"""Properties every cost model must have, whatever its tables say."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbench.devices.base import CostModel, StepShape
from ebbench.devices.loader import load_device

CASES = [
    ("rtx-pro-6000", "qwen3-8b", "table"),
    ("rtx-pro-6000", "qwen3-14b", "table"),
    ("rtx-pro-6000", "qwen3-30b-a3b", "table"),
    ("rtx-pro-6000", "gemma-3-1b-it", "table"),
    ("rtx-4090", "llama-3.1-8b", "table"),
    ("h200", "qwen3-8b", "table"),
    ("h100", "qwen2.5-coder-7b", "table"),
    ("l40s", "qwen3-4b", "table"),
    ("b300", "qwen3-30b-a3b", "table"),
    ("a100", "qwen3-14b", "table"),
    ("a100", "qwen3-30b-a3b", "table"),
    ("rtx-pro-6000", "qwen3-8b", "linear"),
    ("h200", "qwen3-30b-a3b", "linear"),
    ("l40s", "llama-3.1-8b", "roofline"),
]
# Interpolation between measured points may fall by rounding; nothing more.
TOLERANCE = 1 + 1e-9


@cache
def model(case: tuple[str, str, str]) -> CostModel:
    device, name, cost = case
    return load_device(device, name, cost=cost).cost


cases = st.sampled_from(CASES)
# A chunk of one token has rules of its own: it is computed as a decode.
lengths = st.just(1) | st.integers(1, 4096)
chunks = st.lists(st.tuples(lengths, st.integers(0, 8192)), max_size=6)
decodes = st.integers(0, 2048)
contexts = st.integers(1, 16_384)


def shape(prefill: list[tuple[int, int]], seqs: int, context: int) -> StepShape:
    return StepShape(tuple(prefill), seqs, seqs * context, seqs + len(prefill))


@settings(deadline=None, max_examples=300)
@given(cases, chunks, decodes, contexts)
def test_step_times_are_positive_and_repeatable(
    case: tuple[str, str, str], prefill: list[tuple[int, int]], seqs: int, context: int
) -> None:
    if not prefill and not seqs:
        return
    step = shape(prefill, seqs, context)
    assert 0 < model(case).step_s(step) < 3600
    assert model(case).step_s(step) == model(case).step_s(step)


@settings(deadline=None, max_examples=300)
@given(cases, chunks, decodes, contexts, st.integers(1, 512))
@example(("rtx-pro-6000", "qwen3-8b", "table"), [(51, 429), (1, 6397), (11, 49)], 0, 4, 3)  # short ones join a long one
def test_more_decodes_or_context_never_take_less(
    case: tuple[str, str, str], prefill: list[tuple[int, int]], seqs: int, context: int, more: int
) -> None:
    cost = model(case)
    base = cost.step_s(shape(prefill, seqs + 1, context))
    assert cost.step_s(shape(prefill, seqs + 1 + more, context)) * TOLERANCE >= base
    assert cost.step_s(shape(prefill, seqs + 1, context + more)) * TOLERANCE >= base


@settings(deadline=None, max_examples=300)
@given(cases, st.integers(1, 8192), st.integers(0, 8192), st.integers(1, 2048))
@example(("h200", "qwen3-8b", "table"), 1, 536, 1)  # a decode, then a prompt
def test_more_prompt_never_takes_less(case: tuple[str, str, str], chunk: int, before: int, more: int) -> None:
    cost = model(case)
    base = cost.step_s(shape([(chunk, before)], 0, 0))
    assert cost.step_s(shape([(chunk + more, before)], 0, 0)) * TOLERANCE >= base
    assert cost.step_s(shape([(chunk, before + more)], 0, 0)) * TOLERANCE >= base
    assert cost.step_s(shape([(chunk, before), (more, 0)], 0, 0)) * TOLERANCE >= base


@settings(deadline=None, max_examples=300)
@given(cases, chunks.filter(bool), st.integers(1, 2048), contexts)
@example(("l40s", "qwen3-4b", "table"), [(6, 1), (1, 8192)], 2, 235)  # the same
@example(("l40s", "qwen3-4b", "table"), [(1, 1)], 3, 7628)  # a short one joins long ones
def test_a_mixed_step_costs_at_least_either_part(
    case: tuple[str, str, str], prefill: list[tuple[int, int]], seqs: int, context: int
) -> None:
    cost = model(case)
    mixed = cost.step_s(shape(prefill, seqs, context))
    assert mixed * TOLERANCE >= cost.step_s(shape(prefill, 0, 0))
    assert mixed * TOLERANCE >= cost.step_s(shape([], seqs, context))


@pytest.mark.parametrize("case", [c for c in CASES if c[2] == "table"], ids=lambda c: "-".join(c[:2]))
def test_overlapping_the_host_never_slows_a_step(case: tuple[str, str, str]) -> None:
    beside = load_device(case[0], case[1]).cost
    before = load_device(case[0], case[1], async_scheduling=False).cost
    for step in (shape([], 32, 512), shape([(512, 0)], 256, 700), shape([(2048, 0)], 0, 0)):
        assert beside.step_s(step) <= before.step_s(step)
