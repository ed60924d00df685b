"""Settings that cannot work are refused before anything runs or is written."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench.engines.checks import check_counts, check_fits, check_options
from ebbench.engines.setup import is_server
from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.policy import PolicySpec, descriptions, parse_policy

__all__ = ["check_counts", "check_fits", "check_options", "default_policies", "is_server", "parse_policies"]


def default_policies(engine: str) -> tuple[str, ...]:
    """Policies to run when none is given."""
    return ("v1",) if is_server(engine) else ("v1", "ebplus")


def parse_policies(names: Sequence[str]) -> list[PolicySpec]:
    """Policies in the order given. Raises UsageError for a repeated one, UnknownNameError for an unknown kind."""
    specs: list[PolicySpec] = []
    for name in names:
        kind = name.strip().partition(":")[0]
        if kind not in descriptions():
            if "," in kind:
                raise UsageError(f"policy {kind!r}: give each policy its own --policy")
            raise UnknownNameError("policy", kind, descriptions())
        spec = parse_policy(name)
        _check_seconds(spec)
        if spec in specs:
            raise UsageError(f"policy {spec.name} is given twice; give each policy once, --repeats repeats it")
        specs.append(spec)
    return specs


def _check_seconds(spec: PolicySpec) -> None:
    """A policy's targets are in seconds, --goodput's limits in milliseconds: refuse what is surely the other unit."""
    for key, most in (("ttft", 3600), ("tpot", 5)):
        given = getattr(spec, key)
        if given is not None and given >= most:
            raise UsageError(
                f"policy {spec.name}: {key}={given:g} is in seconds, and {most:,} s or more is no target; "
                f"for {given:g} ms write {key}={given / 1000:g}"
            )
