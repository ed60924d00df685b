"""The plugin varies draft lengths only where vLLM is prepared for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_eb.compat import refuse_fixed_drafts, seldom_drafts, verified_drafts
from vllm_eb.config import ConfigError


def test_drafts_of_a_fixed_length_are_refused_with_what_to_add() -> None:
    refuse_fixed_drafts(SimpleNamespace(num_spec_tokens=3, dynamic_sd_lookup=[3, 3]))
    for scheduler in (SimpleNamespace(num_spec_tokens=3, dynamic_sd_lookup=None), SimpleNamespace(num_spec_tokens=3)):
        with pytest.raises(ConfigError, match=r'"num_speculative_tokens_per_batch_size": \[\[1, 1, 3\]\]'):
            refuse_fixed_drafts(scheduler)


def scheduled(drafts: dict[str, list[int]], *others: str) -> SimpleNamespace:
    """A step with these drafts, and one token of each of the others."""
    tokens = {name: 1 + len(drafted) for name, drafted in drafts.items()} | dict.fromkeys(others, 1)
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def test_drafts_are_counted_by_position() -> None:
    """Of drafts of 3, 1 and 2 tokens, 3, 0 and 1 are accepted; those that are gone or without a token do not count.

    Some ended before the next schedule(), some after it. "a" is the new request of an id that ended, "z" of no step.
    """
    scheduler = SimpleNamespace(
        num_spec_tokens=3, requests=dict.fromkeys("abcdef"), finished_req_ids={"silent and gone"}
    )
    ended = frozenset({"gone", "a", "z"})
    drafts = {"a": [0] * 3, "b": [0], "c": [0] * 2, "gone": [0] * 3, "d": [0], "silent and gone": [0]}
    step = scheduled(drafts, "prompt", "e", "f")
    made = {"prompt": [1], "e": [], "f": [], "a": [1, 2, 3, 4], "b": [1], "c": [1, 2], "gone": [1, 2], "d": []}
    made["silent and gone"] = []
    output = SimpleNamespace(
        req_ids=list(made),
        sampled_token_ids=list(made.values()),
        req_id_to_index={name: place for place, name in enumerate(made)},
    )
    assert verified_drafts(scheduler, step, output, None, ended) == ([3, 2, 1], [2, 1, 1])
    # Eight decodes, of which two had no draft: with n-grams all count that are still there and got a token.
    assert verified_drafts(scheduler, step, output, 8, ended) == ([5, 5, 5], [2, 1, 1])


def test_a_short_draft_beside_none_is_not_taken_for_full_length() -> None:
    """Three tokens, two tokens and a single one are as many as two full drafts of two; so are two and three of one."""
    scheduler = SimpleNamespace(num_spec_tokens=2, requests=dict.fromkeys("abc"), finished_req_ids=set())
    output = SimpleNamespace(req_ids=list("abc"), sampled_token_ids=[[1, 2, 3], [1, 2], [1]], req_id_to_index={})
    for drafts, others, drafted in (
        ({"a": [0, 0], "b": [0]}, ("c",), [2, 1]),
        ({"a": [0, 0], "b": [0, 0], "c": [0, 0]}, (), [3, 3]),
        ({"a": [0, 0], "b": [0]}, (), [2, 1]),
    ):
        assert verified_drafts(scheduler, scheduled(drafts, *others), output, None, frozenset()) == (drafted, [2, 1])


def test_only_n_grams_leave_decodes_without_a_draft() -> None:
    for method, seldom in (("ngram", True), ("mtp", False), ("eagle3", False)):
        config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        assert seldom_drafts(config) == seldom
