"""Builds request plans: workload x scenario -> :class:`ebbench.records.plan.Plan`.

Heavy modules are imported inside :func:`build_plan`, so that importing this package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbench.records.plan import Plan
    from ebbench.traffic.spec import ScenarioSpec
    from ebbench.workloads.spec import WorkloadSpec


def build_plan(workload: str, scenario: str | None = None, **options: Any) -> Plan:
    """Build the request plan; ``options`` are the other fields of :class:`ebbench.workloads.options.PlanOptions`.

    Raises UsageError, InputFileError for a file in the wrong format, RunError if ``source="hub"`` cannot be read.
    """
    from ebbench.workloads.options import PlanOptions
    from ebbench.workloads.planner import make_plan

    return make_plan(PlanOptions(workload, scenario, **options))


def list_workloads() -> list[str]:
    """Names of the bundled workloads."""
    from ebbench.workloads import spec

    return spec.list_workloads()


def load_workload(name_or_path: str) -> WorkloadSpec:
    """Load a workload file by name or path. Raises UsageError."""
    from ebbench.workloads import spec

    return spec.load_workload(name_or_path)


def list_scenarios() -> list[str]:
    """Names of the bundled scenarios."""
    from ebbench.traffic import spec

    return spec.list_scenarios()


def load_scenario(name_or_path: str) -> ScenarioSpec:
    """Load a scenario file by name or path. Raises UsageError."""
    from ebbench.traffic import spec

    return spec.load_scenario(name_or_path)
