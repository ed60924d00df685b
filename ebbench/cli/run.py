"""``ebbench run``: one plan, several policies, one engine; then the table, the winner and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.cli import client_flags as flags
from ebbench.cli import cluster_flags as cluster
from ebbench.cli import load_flags as load
from ebbench.cli.options import GoodputCommand, opt

_OUTPUT = "Output"


def run(
    workload: Annotated[str, typer.Argument(help="A workload (`ebbench workloads list`) or trace:FILE.")],
    policy: Annotated[
        list[str] | None,
        opt(
            "--policy",
            "-p",
            help="A policy; repeat for several on the same plan. Default: v1 and ebplus.",
            panel=load.ENGINE,
        ),
    ] = None,
    engine: Annotated[
        str, opt("--engine", help="auto, sim, emulated, vllm or a server's URL.", panel=load.ENGINE)
    ] = "auto",
    device: Annotated[
        str | None, opt("--device", help="See `ebbench devices list`. Default: rtx-pro-6000.", panel=load.ENGINE)
    ] = None,
    model: Annotated[
        str | None,
        opt("--model", help="Name, or path of a Hugging Face config.json. Default: qwen3-8b.", panel=load.ENGINE),
    ] = None,
    scenario: load.Scenario = None,
    num_prompts: load.NumPrompts = None,
    max_concurrency: load.MaxConcurrency = None,
    request_rate: load.RequestRate = None,
    burstiness: load.Burstiness = None,
    saturation_rate: load.SaturationRate = None,
    warmup: load.Warmup = 0,
    repeats: load.Repeats = 1,
    max_num_seqs: load.MaxNumSeqs = 1024,
    max_num_batched_tokens: load.MaxNumBatchedTokens = 8192,
    max_model_len: load.MaxModelLen = None,
    num_kv_blocks: load.NumKvBlocks = None,
    no_prefix_caching: load.NoPrefixCaching = False,
    no_async_scheduling: load.NoAsyncScheduling = False,
    enforce_eager: load.EnforceEager = False,
    seed: load.Seed = 0,
    source: load.Source = "auto",
    speed: load.Speed = None,
    tokenizer: load.Tokenizer = None,
    input_len: load.InputLen = None,
    output_len: load.OutputLen = None,
    length_distribution: load.LengthDistribution = None,
    drop_too_long: load.DropTooLong = False,
    goodput: Annotated[
        list[str] | None,
        opt("--goodput", help="Limits in ms: ttft:500 tpot:50 e2el:5000.", panel=_OUTPUT),
    ] = None,
    output_dir: Annotated[
        Path | None, opt("--output-dir", "-o", help="Where to store; must not exist.", panel=_OUTPUT)
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
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=_OUTPUT)] = False,
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False,
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
