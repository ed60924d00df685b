"""What is asked and when: workloads x scenarios -> :class:`ebbench.records.plan.Plan`.

Heavy modules load inside :func:`build_plan`, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbench.records.plan import Plan
    from ebbench.traffic.spec import ScenarioSpec
    from ebbench.workloads.spec import WorkloadSpec


def build_plan(
    workload: str,
    scenario: str | None = None,
    *,
    num_prompts: int | None = None,
    seed: int = 0,
    source: str = "auto",
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    saturation_rate: float | None = None,
    burstiness: float | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    length_distribution: str | None = None,
    speed: float | None = None,
    max_model_len: int | None = None,
    drop_too_long: bool = False,
    tokenizer: str | None = None,
    with_text: bool = True,
) -> Plan:
    """Build the request plan; the same arguments give the same plan byte for byte.

    ``workload``: a bundled name, ``trace:FILE`` or the path of a TOML file. ``scenario``: likewise; None means
    ``trace`` for traces and ``saturated`` otherwise. ``num_prompts``: sessions (a conversation is one session);
    None takes what the scenario or the workload asks. ``source``: ``auto``, ``hub``, ``file:PATH`` or ``profile``.
    ``max_concurrency``: open sessions; rates in sessions/s (``saturation_rate`` is what shares in a scenario refer
    to); lengths in tokens. ``burstiness``: shape of gamma gaps, 1 is Poisson, less is burstier. ``speed`` divides a
    trace's times.
    ``tokenizer`` (a name or folder) counts the tokens of text; None estimates them from characters.
    ``with_text`` False leaves out the prompts' text, which simulated engines do not read.

    Raises UsageError, InputFileError for a file in the wrong schema, RunError when a hub asked for by name
    cannot be read.
    """
    from ebbench.workloads.planner import Wish, make_plan

    return make_plan(
        Wish(
            workload, scenario, num_prompts=num_prompts, seed=seed, source=source, max_concurrency=max_concurrency,
            request_rate=request_rate, saturation_rate=saturation_rate, burstiness=burstiness, speed=speed,
            input_len=input_len, output_len=output_len, length_distribution=length_distribution,
            max_model_len=max_model_len, drop_too_long=drop_too_long, tokenizer=tokenizer, with_text=with_text,
        )
    )  # fmt: skip


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
