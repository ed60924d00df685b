"""Builds request plans: workload x scenario -> :class:`ebbench.records.plan.Plan`.

Heavy modules are imported inside :func:`build_plan`, so that importing this package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbench.records.plan import Plan


def build_plan(workload: str, scenario: str | None = None, **options: Any) -> Plan:
    """Build the request plan; ``options`` are the other fields of :class:`ebbench.workloads.options.PlanOptions`.

    Raises UsageError, InputFileError for a file in the wrong format, RunError if ``source="hub"`` cannot be read.
    """
    from ebbench.workloads.options import PlanOptions
    from ebbench.workloads.planner import make_plan

    return make_plan(PlanOptions(workload, scenario, **options))
