"""Numbers that a server sends: what is none is left out and named, and costs at most the one request."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ebbench.client.dialects import LARGEST_COUNT, finite_number, token_counts, whole_number
from ebbench.client.server_queries import parse, reported_settings
from tests.client.client_runs import column, plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, event, raw_server, said

ODD = ["7", {"text": 7}, [7], True, -7, 7.5, 2**40, 10**30, math.nan, math.inf]


@pytest.mark.parametrize("value", [*ODD, None])
def test_what_is_no_whole_number_in_range_is_none(value: Any) -> None:
    assert whole_number(value) is None


@pytest.mark.parametrize(("value", "number"), [(0, 0), (7, 7), (7.0, 7), (LARGEST_COUNT, LARGEST_COUNT)])
def test_whole_numbers_pass(value: Any, number: int) -> None:
    assert whole_number(value) == number


@pytest.mark.parametrize("value", [math.nan, math.inf, "nan", "-inf", "x", None, [], 10**400])
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    assert finite_number(value) is None


@pytest.mark.parametrize("usage", [[], "x", 7, {"completion_tokens": [[]]}, {"prompt_tokens_details": "x"}])
def test_usage_of_any_type_gives_counts(usage: Any) -> None:
    assert token_counts(usage)[:4] == (None, None, None, None)


def test_a_part_is_not_larger_than_its_whole() -> None:
    usage = {"prompt_tokens": 8, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 900}}
    counts = token_counts(usage | {"completion_tokens_details": {"reasoning_tokens": 4}})
    assert (counts.cached, counts.reasoning) == (None, None)
    assert counts.odd == {"cached_tokens": "900 of 8", "reasoning_tokens": "4 of 3"}


def usages(odd: Any) -> dict[str, dict[str, Any]]:
    good = {"completion_tokens": 3, "prompt_tokens": 8}
    return {
        "completion_tokens": {**good, "completion_tokens": odd},
        "prompt_tokens": {**good, "prompt_tokens": odd},
        "cached_tokens": {**good, "prompt_tokens_details": {"cached_tokens": odd}},
        "reasoning_tokens": {**good, "completion_tokens_details": {"reasoning_tokens": odd}},
        "prompt_tokens_details": {**good, "prompt_tokens_details": odd},
        "usage": odd,
    }


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_number_fails_its_own_request_at_most(odd: Any) -> None:
    """Each field is odd in one answer, and the last answer is good."""
    good = {"completion_tokens": 3, "prompt_tokens": 8}
    forms = [*usages(odd).values(), good]

    async def answer(asked: Asked) -> None:
        texts = event(said("a")) + event(said("b")) + event(said("c", "stop"))
        await asked.send(EVENTS + chunk(texts + event({"choices": [], "usage": forms[asked.number]})) + END)

    with raw_server(answer) as server:
        done = run(server.url, plan_of(len(forms), concurrency=1, input_tokens=8), ignore_eos=False)
    failed = {"completion_tokens": "bad_usage", "usage": "no_usage"}
    names = list(usages(odd))
    assert column(done, "error_class") == [*(failed.get(name) for name in names), None]
    assert column(done, "output_tokens")[1:5] == [3] * 4
    assert column(done, "input_tokens") == [8] * len(forms)
    assert column(done, "cached_tokens") == [None] * len(forms)
    for name in ("completion_tokens", "prompt_tokens", "cached_tokens", "reasoning_tokens"):
        assert any(
            f"{name} in the usage of 1 answer is no possible number" in text for text in map(str, done.warnings)
        ), name


@pytest.mark.parametrize("length", [*ODD[:-2], 0])
def test_an_odd_length_of_the_model_is_no_limit(length: Any) -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("a", "stop", usage={"completion_tokens": 1}))) + END)

    models = {"data": [{"id": 7}, None, {"id": "m", "max_model_len": length, "root": ["x"], "parent": {}}]}
    with raw_server(answer, {"/v1/models": json.dumps(models).encode()}) as server:
        done = run(server.url, plan_of(1, output_tokens=1))
    assert column(done, "status") == ["ok"]


def test_samples_without_a_value_are_left_out() -> None:
    page = 'a{q="1"} NaN\nb +Inf\nc -Inf\nd 1e400\ne 3\n'
    assert [name for name, _ in parse(page)] == ["e"]


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_:][a-z0-9_:]*", fullmatch=True),
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_pages_are_read_as_by_the_library_of_servers(figures: dict[str, tuple[str, float]]) -> None:
    registry = CollectorRegistry()
    for name, (label, value) in figures.items():
        Gauge(name, "what it is\nin lines", ["one", "other"], registry=registry).labels(label, "x").set(value)
    page = generate_latest(registry).decode()
    read = {
        (sample.name, json.dumps(sample.labels, ensure_ascii=False, separators=(",", ":"))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if math.isfinite(sample.value) and not sample.name.endswith("_created")
    }
    ours = {(name, json.dumps(json.loads(labels), ensure_ascii=False, separators=(",", ":"))): value
            for (name, labels), value in parse(page).items()}  # fmt: skip
    assert ours == read


@pytest.mark.parametrize("page", ["a{", "{}", 'a{b="c} 1', "# TYPE a\na 1", "\0", "a 1 2 3 4", 'a{b="c"} x', "=" * 500])
def test_a_page_that_cannot_be_read_has_no_samples_or_some(page: str) -> None:
    assert isinstance(parse(page), dict)


def test_metrics_that_are_no_numbers_do_not_end_the_run() -> None:
    async def answer(asked: Asked) -> None:
        await asked.send(EVENTS + chunk(event(said("a", "stop", usage={"completion_tokens": 1}))) + END)

    page = b"vllm:prefix_cache_queries_total NaN\nvllm:prefix_cache_hits_total +Inf\nvllm:num_requests_running NaN\n"
    with raw_server(answer, {"/metrics": page}) as server:
        done = run(server.url, plan_of(1, output_tokens=1), metrics_interval_s=0.05)
    assert column(done, "status") == ["ok"]
    assert done.facts["prefix_hit_rate"] is None


@pytest.mark.parametrize("value", ["nan", "-5", "1e400", "9" * 5000, "x", ""])
def test_odd_settings_in_labels_are_left_out(value: str) -> None:
    labels = {"num_gpu_blocks": value, "block_size": "16", "gpu_memory_utilization": value.replace("-5", "nan")}
    assert reported_settings([("vllm:cache_config_info", json.dumps(labels))]) == {"block_size": 16}
