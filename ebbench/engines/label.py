"""The policy's name on a run of a server that ebbench did not start: as stated by the user, or by the server."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.client.server_reports import POLICY, read_reports
from ebbench.engines.base import Engine
from ebbench.engines.endpoint import EndpointEngine
from ebbench.errors import UsageError
from ebbench.records.manifest import RunWarning
from vllm_eb.policy import PolicyError, PolicySpec, parse_policy

_IS_A_LABEL = (
    "The server schedules by its own settings and does not report them; the policy is only the label of this run"
)
STATED_LABEL = RunWarning("policy-is-a-label", f"{_IS_A_LABEL}, stated by you and not verified.")
DEFAULT_LABEL = RunWarning(
    "policy-is-a-label",
    f"{_IS_A_LABEL}, taken by default since none was stated.",
    "Give the policy it was started with as --policy.",
)


@dataclass(frozen=True)
class PolicyLabel:
    """The policy that a run is labelled with, and what qualifies that."""

    policy: PolicySpec
    warnings: tuple[RunWarning, ...] = ()


def labelled(engine: Engine, policy: PolicySpec, *, stated: bool = True) -> PolicyLabel:
    """The label of runs on a server. One with the vllm_eb plugin reports its policy in /metrics.

    ``stated``: the user named the policy, and did not leave it at its default. Raises UsageError if the server reports
    another policy than was stated, RunError if it is not ready.
    """
    name = read_reports(engine.url, engine.client).get(POLICY) if isinstance(engine, EndpointEngine) else None
    try:
        reported = None if name is None else parse_policy(name)
    except PolicyError:
        reported = None  # of a version of the plugin that we do not know
    if reported is None:
        return PolicyLabel(policy, (STATED_LABEL if stated else DEFAULT_LABEL,))
    if stated and reported != policy:
        raise UsageError(
            f"the server reports policy {reported.name}, not {policy.name}: leave --policy out, or "
            "start the server with the policy that you mean"
        )
    return PolicyLabel(reported)
