"""``ebbench run``: one plan, one or more policies, one engine; then the table, the verdict and the reasons."""

from __future__ import annotations

import typer

from ebbench.cli.client_flags import ClientFlags
from ebbench.cli.cluster_flags import ClusterOptions
from ebbench.cli.load_flags import VllmOptions, WorkloadArgument
from ebbench.cli.options import GoodputCommand, grouped
from ebbench.cli.run_flags import EngineFlags, LoadFlags, OutputFlags, WorkloadFlags, plan_settings


@grouped
def run(
    context: typer.Context,
    workload: WorkloadArgument,
    engine: EngineFlags,
    load: LoadFlags,
    requests: WorkloadFlags,
    output: OutputFlags,
    client: ClientFlags,
    cluster: ClusterOptions,
    vllm_options: VllmOptions = None,
) -> None:
    """Run a workload under one or more scheduling policies and show which is best, by how much and why.

    Every policy gets the same requests at the same intended times. Results are stored in run directories.

    Options for vLLM go after --: `ebbench run sharegpt --engine vllm -- --quantization fp8`.
    """
    from ebbench.analysis.slo import parse_slo
    from ebbench.cli.preflight import default_policies, parse_policies
    from ebbench.cli.repeats import parse_repeats
    from ebbench.cli.run_policies import RunConfig, run_policies
    from ebbench.engines.setup import topology_of

    engine.refuse_for_server(context)
    topology = topology_of(cluster.topology, load.scenario_of(workload), None)
    policies = parse_policies(engine.policy or default_policies(engine.engine, topology))
    repeats, until_clear = parse_repeats(load.repeats, load.max_repeats, policies=len(policies))
    config = RunConfig(
        workload=workload,
        scenario=load.scenario_of(workload),
        seed=requests.seed,
        repeats=repeats,
        until_clear=until_clear,
        plan_settings=plan_settings(requests, load, engine.length_limit),
        policies=policies,
        **engine.settings(load.warmup),
        slo=parse_slo(output.goodput or ()),
        price_per_hour=output.price_per_hour,
        output_dir=output.output_dir,
        save_as_vllm=output.save_as_vllm,
        all_percentiles=output.all_percentiles,
        quiet=output.quiet,
        client=client,
        cluster=cluster,
        vllm_options=tuple(vllm_options or ()),
    )
    run_policies(config, as_json=output.as_json)


run.command_class = GoodputCommand  # type: ignore[attr-defined]
