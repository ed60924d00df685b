"""Checks of settings before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbench.config.topology import TopologySpec
from ebbench.engines.checks import check_counts, check_fits, check_options
from ebbench.errors import UnknownNameError, UsageError
from ebbench.spec.server import is_server
from vllm_eb.policy import PolicySpec, UnknownPolicyError, descriptions, parse_policy, settings_of

__all__ = [
    "check_counts",
    "check_fits",
    "check_options",
    "default_policies",
    "each_once",
    "is_server",
    "parse_policies",
]


def default_policies(engine: str, topology: TopologySpec | None = None) -> tuple[str, ...]:
    """Policies to run by default; where prefill is apart from decode there is nothing to decide."""
    alone = is_server(engine) or (topology is not None and topology.disaggregated)
    return ("v1",) if alone else ("v1", "ebplus")


def parse_policies(names: Sequence[str]) -> list[PolicySpec]:
    """Policies in the order given. Raises UsageError for a repeated one, UnknownNameError for an unknown kind."""
    specs: list[PolicySpec] = []
    for name in names:
        kind = name.strip().partition(":")[0]
        if "," in kind:
            raise UsageError(f"policy {kind!r}: give each policy its own --policy")
        try:
            spec = parse_policy(name)
        except UnknownPolicyError:
            raise UnknownNameError("policy", kind, descriptions()) from None
        _check_seconds(spec)
        if spec in specs:
            raise UsageError(f"policy {spec.name} is given twice; give each policy once")
        specs.append(spec)
    return specs


def each_once(option: str, values: Sequence[Any]) -> None:
    """Raise UsageError for a value that an option of alternatives lists twice: its results would stand there twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UsageError(f"{option} {value} is given twice; give it once")


def _check_seconds(spec: PolicySpec) -> None:
    """A policy's targets are in s, --goodput's limits in ms: raise UsageError for a value probably in the other
    unit."""
    for key, about in settings_of(type(spec)).items():
        given, most = getattr(spec, key), about.doubtful_from
        if about.unit == "s" and given is not None and most is not None and given >= most:
            raise UsageError(
                f"policy {spec.name}: {key}={given:g} is in seconds, and {most:,g} s or more is not a valid target; "
                f"for {given:g} ms write {key}={given / 1000:g}"
            )
