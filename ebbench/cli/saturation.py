"""The saturated rate that scenarios with shares refer to, measured in virtual time if it was not given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ebbench.cli.run_policies import RunConfig
    from ebbench.config.topology import TopologySpec
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine


def needs_saturation(config: RunConfig, engine: Engine) -> bool:
    """Whether the scenario's rates are shares of a saturated rate that was not given, on an engine in virtual time.

    In real time saturating a server takes minutes, which the user should decide: the rate must then be given, for
    example as measured by ``ebbench capacity``.
    """
    from ebbench.engines.base import VIRTUAL_TIME
    from ebbench.traffic.spec import load_scenario

    given = [config.plan_settings[name] for name in ("request_rate", "saturation_rate")]
    if engine.name not in VIRTUAL_TIME or config.scenario is None or any(value is not None for value in given):
        return False
    phases = load_scenario(config.scenario).phases
    return any(phase.share is not None and phase.rate is None for phase in phases)


def _units(topology: TopologySpec) -> int:
    """Number of scheduling units that decode."""
    pool = topology.decode or topology.replicas
    assert pool is not None  # a topology has either
    return pool.units


def with_saturation(config: RunConfig, engine: Engine, device: Device) -> tuple[RunConfig, str]:
    """The configuration with the measured rate, and a message about it.

    Measured under the first policy, since all policies get the same plan: a closed loop with twice the sequences that
    fit into a batch and three times as many sessions; the rate is that of completions in the steady window.
    """
    from ebbench.analysis.columns import RequestColumns
    from ebbench.analysis.steady import completed_sessions_per_s, steady_windows
    from ebbench.engines.sim import SimEngine
    from ebbench.records.manifest import phase_facts
    from ebbench.workloads import build_plan

    topology = engine.topology if isinstance(engine, SimEngine) else None
    concurrency = 2 * config.options.max_num_seqs * (_units(topology) if topology is not None else 1)
    of_load = ("request_rate", "burstiness", "speed", "time_unit", "duration_s", "saturation_rate")
    settings = {
        **config.plan_settings,
        **dict.fromkeys(of_load),
        "max_concurrency": concurrency,
        "num_prompts": 3 * concurrency,
    }
    plan = build_plan(config.workload, "saturated", seed=config.seed, **settings)
    result = engine.run(plan, config.policies[0], device, replace(config.options, warmup=0), None)
    columns = RequestColumns.of(result.requests)
    rate = completed_sessions_per_s(columns, steady_windows(columns, phase_facts(plan)))
    rate = float(np.format_float_positional(rate, precision=4, fractional=False)) if rate else rate
    sentence = (
        f"saturation measured: {rate:g} sessions/s under {config.policies[0].name} (closed loop of {concurrency:,} "
        "sessions); --saturation-rate sets another"
    )
    return replace(config, plan_settings={**config.plan_settings, "saturation_rate": rate}), sentence
