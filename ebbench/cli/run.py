"""``ebbench run``: one plan, several policies, one engine; then the table, the winner and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.cli import client_flags as flags
from ebbench.cli import cluster_flags as cluster
from ebbench.cli.options import GoodputCommand

_WORKLOAD, _LOAD, _ENGINE, _OUTPUT = "Workload", "Load", "Engine", "Output"


def _opt(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=help, rich_help_panel=panel)
    return option


def run(
    workload: Annotated[str, typer.Argument(help="A workload (`ebbench workloads list`) or trace:FILE.")],
    policy: Annotated[
        list[str] | None,
        _opt(
            "--policy",
            "-p",
            help="A policy; repeat for several on the same plan. Default: v1 and ebplus.",
            panel=_ENGINE,
        ),
    ] = None,
    engine: Annotated[
        str, _opt("--engine", help="auto, sim, emulated, vllm or a server's URL.", panel=_ENGINE)
    ] = "auto",
    device: Annotated[
        str | None, _opt("--device", help="See `ebbench devices list`. Default: rtx-pro-6000.", panel=_ENGINE)
    ] = None,
    model: Annotated[
        str | None,
        _opt("--model", help="Name, or path of a Hugging Face config.json. Default: qwen3-8b.", panel=_ENGINE),
    ] = None,
    scenario: Annotated[
        str | None, _opt("--scenario", "-s", help="When requests come: a name or a TOML file.", panel=_LOAD)
    ] = None,
    num_prompts: Annotated[
        int | None,
        _opt(
            "--num-prompts", "-n", help="Requests to plan. Default: 4,000, or what the scenario says.", panel=_WORKLOAD
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None, _opt("--max-concurrency", "-c", help="Requests open at a time.", panel=_LOAD)
    ] = None,
    request_rate: Annotated[float | None, _opt("--request-rate", help="Requests/s, open loop.", panel=_LOAD)] = None,
    burstiness: Annotated[
        float | None, _opt("--burstiness", help="Shape of gamma gaps: 1 is Poisson, less is burstier.", panel=_LOAD)
    ] = None,
    saturation_rate: Annotated[
        float | None,
        _opt("--saturation-rate", help="Measured saturation in requests/s, for phases given as a share.", panel=_LOAD),
    ] = None,
    warmup: Annotated[
        int,
        _opt(
            "--warmup",
            "--num-warmups",
            help="Requests before the start, of the plan's lengths; not recorded.",
            panel=_LOAD,
        ),
    ] = 0,
    repeats: Annotated[int, _opt("--repeats", help="Runs a policy, seeds S, S+1, ...", panel=_LOAD)] = 1,
    max_num_seqs: Annotated[int, _opt("--max-num-seqs", help="N, sequences in a batch.", panel=_ENGINE)] = 1024,
    max_num_batched_tokens: Annotated[
        int, _opt("--max-num-batched-tokens", help="B, token budget of a step.", panel=_ENGINE)
    ] = 8192,
    max_model_len: Annotated[
        int | None,
        _opt("--max-model-len", help="Longest prompt plus answer. Default: 40,960 tokens.", panel=_ENGINE),
    ] = None,
    num_kv_blocks: Annotated[
        int | None,
        _opt("--num-kv-blocks", help="KV blocks of 16 tokens; default: what the device holds.", panel=_ENGINE),
    ] = None,
    no_prefix_caching: Annotated[
        bool, _opt("--no-prefix-caching", help="Do not reuse KV of shared prefixes.", panel=_ENGINE)
    ] = False,
    no_async_scheduling: Annotated[
        bool, _opt("--no-async-scheduling", help="Schedule a step only when the last has ended.", panel=_ENGINE)
    ] = False,
    enforce_eager: Annotated[
        bool, _opt("--enforce-eager", help="No CUDA graphs: every layer is launched by the host.", panel=_ENGINE)
    ] = False,
    seed: Annotated[int, _opt("--seed", help="Same seed, same plan, byte for byte.", panel=_WORKLOAD)] = 0,
    source: Annotated[str, _opt("--source", help="auto, hub, profile or file:PATH.", panel=_WORKLOAD)] = "auto",
    speed: Annotated[
        float | None, _opt("--speed", help="Time factor of a trace: 2 is twice as fast.", panel=_LOAD)
    ] = None,
    tokenizer: Annotated[
        str | None, _opt("--tokenizer", help="Counts the tokens of texts; default: estimated.", panel=_WORKLOAD)
    ] = None,
    input_len: Annotated[int | None, _opt("--input-len", help="Mean prompt tokens.", panel=_WORKLOAD)] = None,
    output_len: Annotated[int | None, _opt("--output-len", help="Mean answer tokens.", panel=_WORKLOAD)] = None,
    length_distribution: Annotated[
        str | None,
        _opt("--length-distribution", help="uniform, geometric, gamma:SHAPE or fixed.", panel=_WORKLOAD),
    ] = None,
    drop_too_long: Annotated[
        bool, _opt("--drop-too-long", help="Drop requests over --max-model-len.", panel=_WORKLOAD)
    ] = False,
    goodput: Annotated[
        list[str] | None,
        _opt("--goodput", help="Limits in ms: ttft:500 tpot:50 e2el:5000.", panel=_OUTPUT),
    ] = None,
    output_dir: Annotated[
        Path | None, _opt("--output-dir", "-o", help="Where to store; must not exist.", panel=_OUTPUT)
    ] = None,
    save_as_vllm: flags.SaveAsVllm = None,
    ramp_up: flags.RampUp = None,
    endpoint: flags.Endpoint = None,
    workers: flags.Workers = None,
    connect_timeout: flags.ConnectTimeout = None,
    idle_timeout: flags.IdleTimeout = None,
    total_timeout: flags.TotalTimeout = None,
    ready_timeout: flags.ReadyTimeout = None,
    ignore_eos: flags.IgnoreEos = None,
    temperature: flags.Temperature = None,
    extra_body: flags.ExtraBody = None,
    header: flags.Header = None,
    vocab_size: flags.VocabSize = None,
    reset_prefix_cache: flags.ResetPrefixCache = None,
    insecure: flags.Insecure = None,
    topology: cluster.Topology = None,
    dispatch: cluster.Dispatch = None,
    decode_dispatch: cluster.DecodeDispatch = None,
    replicas: cluster.Replicas = None,
    as_json: Annotated[bool, _opt("--json", help="One JSON list on stdout, nothing else.", panel=_OUTPUT)] = False,
    quiet: Annotated[bool, _opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False,
) -> None:
    """Run a workload under one or more scheduling policies and say which is best, by how much and why.

    Every policy gets the same requests at the same intended times. Results are kept in run directories.
    """
    from ebbench.analysis.slo import parse_slo
    from ebbench.cli.carry_out import Asked, carry_out
    from ebbench.cli.preflight import default_policies, is_server, parse_policies
    from ebbench.engines.base import EngineOptions

    options = EngineOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=EngineOptions.max_model_len if max_model_len is None else max_model_len,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_caching=not no_prefix_caching,
        async_scheduling=not no_async_scheduling,
        enforce_eager=enforce_eager,
        warmup=warmup,
    )
    if scenario is None and request_rate is not None and not workload.startswith("trace:"):
        scenario = "poisson" if burstiness is None else "gamma"  # as `vllm bench serve` reads these options
    asked = Asked(
        workload=workload,
        scenario=scenario,
        seed=seed,
        repeats=repeats,
        plan_settings={
            "num_prompts": num_prompts,
            "source": source,
            "max_concurrency": max_concurrency,
            "request_rate": request_rate,
            "burstiness": burstiness,
            "saturation_rate": saturation_rate,
            "input_len": input_len,
            "output_len": output_len,
            "length_distribution": length_distribution,
            "speed": speed,
            "tokenizer": tokenizer,
            "max_model_len": max_model_len if is_server(engine) else options.max_model_len,
            "drop_too_long": drop_too_long,
        },
        policies=parse_policies(policy or default_policies(engine)),
        engine=engine,
        device=device,
        model=model,
        options=options,
        slo=parse_slo(goodput or ()),
        output_dir=output_dir,
        quiet=quiet,
        default_policies=not policy,
        client={
            "endpoint": endpoint,
            "workers": workers,
            "connect_timeout_s": connect_timeout,
            "idle_timeout_s": idle_timeout,
            "total_timeout_s": total_timeout,
            "ready_timeout_s": ready_timeout,
            "ignore_eos": ignore_eos,
            "temperature": temperature,
            "extra_body": extra_body,
            "headers": header,
            "vocab_size": vocab_size,
            "reset_prefix_cache": reset_prefix_cache,
            "insecure": insecure or None,
        },
        ramp_up_s=ramp_up,
        save_as_vllm=save_as_vllm,
        cluster=cluster.ClusterAsked(topology, dispatch, decode_dispatch, replicas),
    )
    carry_out(asked, as_json=as_json)


run.command_class = GoodputCommand  # type: ignore[attr-defined]
