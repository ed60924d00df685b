"""Requests that did not complete, in words: ``60 x error_frame: message of the server -> remedy``."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench.analysis.failures import merge_failures
from ebbench.analysis.summary import Summary


def failure_lines(summaries: Sequence[Summary]) -> list[str]:
    """One line per error class and cause, over all runs of a policy; the policy is named if there are several."""
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    lines = []
    for policy in policies:
        failures = merge_failures(summary.failures for summary in summaries if summary.policy == policy)
        name = f"{policy}: " if len(policies) > 1 else ""
        lines += [f"{name}{failure}" for failure in failures]
    return lines
