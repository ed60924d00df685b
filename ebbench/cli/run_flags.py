"""Options of ``ebbench run``, one dataclass per heading of its help; client and cluster options have their own
modules."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli import load_flags as load
from ebbench.cli.options import ALL_PERCENTILES, opt
from ebbench.traffic.choice import scenario_meant

if TYPE_CHECKING:
    from ebbench.engines.base import EngineOptions

_OUTPUT = "Output"


@dataclass(frozen=True)
class EngineFlags:
    """Policies, engine, device, and the limits of the scheduler."""

    policy: Annotated[
        list[str] | None,
        opt(
            "--policy",
            "-p",
            help="A policy; repeat for several on the same plan. Default: v1 and ebplus; v1 with a decode pool.",
            panel=load.ENGINE,
            complete=completion.policies,
        ),
    ] = None
    engine: Annotated[
        str,
        opt(
            "--engine",
            help="auto, sim, emulated, vllm or a server's URL.",
            panel=load.ENGINE,
            complete=completion.engines,
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        opt(
            "--device",
            help="See `ebbench devices list`. Default: rtx-pro-6000; for vllm, this machine.",
            panel=load.ENGINE,
            complete=completion.devices,
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        opt(
            "--calibration",
            help="Costs of this machine for eb, ebplus and marginal in engine vllm (`ebbench calibrate`).",
            panel=load.ENGINE,
        ),
    ] = None
    model: Annotated[
        str | None,
        opt(
            "--model",
            help="Name, or path of a Hugging Face config.json. Default: qwen3-8b.",
            panel=load.ENGINE,
            complete=completion.models,
        ),
    ] = None
    assume_decoder: load.AssumeDecoder = False
    max_num_seqs: load.MaxNumSeqs = 1024
    max_num_batched_tokens: load.MaxNumBatchedTokens = 8192
    max_num_active_seqs: load.MaxNumActiveSeqs = None
    max_num_queued_reqs: load.MaxNumQueuedReqs = None
    max_num_queued_tokens: load.MaxNumQueuedTokens = None
    long_prefill_token_threshold: load.LongPrefillTokenThreshold = 0
    long_prefill_token_threshold_adaptive: load.LongPrefillTokenThresholdAdaptive = False
    no_scheduler_reserve_full_isl: load.NoSchedulerReserveFullIsl = False
    max_model_len: load.MaxModelLen = None
    num_kv_blocks: load.NumKvBlocks = None
    gpu_memory_utilization: load.GpuMemoryUtilization = None
    vllm_version: load.VllmVersion = None
    no_prefix_caching: load.NoPrefixCaching = False
    no_async_scheduling: load.NoAsyncScheduling = False
    enforce_eager: load.EnforceEager = False
    quantization: load.Quantization = None
    kv_cache_dtype: load.KvCacheDtype = "auto"
    api_server: load.ApiServer = "auto"
    api_server_count: load.ApiServerCount = None

    def refuse_for_server(self, context: typer.Context) -> None:
        """Raise UsageError for settings on the command line that a server which already runs would not take."""
        from ebbench.cli.unused_options import given_options
        from ebbench.engines.checks import refuse_server_settings, refuse_simulated
        from ebbench.engines.setup import is_server

        if is_server(self.engine):
            refuse_server_settings(self.engine, given_options(context, _OF_A_START))
            refuse_simulated(self.options(0), "endpoint")

    def options(self, warmup: int) -> EngineOptions:
        """The engine's options with ``warmup`` warm-up requests."""
        from ebbench.devices.apiserver import first_choice
        from ebbench.engines.base import EngineOptions

        return EngineOptions(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=EngineOptions.max_model_len if self.max_model_len is None else self.max_model_len,
            num_kv_blocks=self.num_kv_blocks,
            gpu_memory_utilization=self.gpu_memory_utilization,
            vllm_version=self.vllm_version,
            enable_prefix_caching=not self.no_prefix_caching,
            async_scheduling=not self.no_async_scheduling,
            enforce_eager=self.enforce_eager,
            warmup=warmup,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            api_server=first_choice(self.api_server, self.api_server_count),
            api_server_count=self.api_server_count,
            max_num_active_seqs=self.max_num_active_seqs,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=not self.no_scheduler_reserve_full_isl,
        )

    @property
    def length_limit(self) -> int | None:
        """Longest prompt plus output in tokens; None for a server, which has a limit of its own, unless it is given."""
        from ebbench.engines.base import EngineOptions
        from ebbench.engines.setup import is_server

        own = None if is_server(self.engine) else EngineOptions.max_model_len
        return own if self.max_model_len is None else self.max_model_len

    def settings(self, warmup: int) -> dict[str, Any]:
        """The fields of RunConfig that these options set."""
        from ebbench.devices.apiserver import only_if_busy
        from ebbench.devices.profiles import as_decoder

        given = {name: getattr(self, name) for name in ("engine", "device", "calibration")}
        given["model"] = as_decoder(self.model) if self.assume_decoder and self.model else self.model
        return given | {
            "options": self.options(warmup), "default_policies": not self.policy,
            "api_server_if_busy": only_if_busy(self.api_server, self.api_server_count),
        }  # fmt: skip


_OF_A_START = tuple(
    one.name
    for one in fields(EngineFlags)
    if one.name
    not in (
        "policy", "engine", "device", "model", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "api_server",
        "api_server_count", "vllm_version",
    )
)  # fmt: skip
"""Options that take effect where a server is started. The others name what is measured, are refused elsewhere, or are
B and N, which ``run`` takes with any engine: for a running server it says that they change nothing."""


@dataclass(frozen=True)
class LoadFlags:
    """When requests arrive, what happens between the turns of a session, and the number of repeats."""

    scenario: load.Scenario = None
    max_concurrency: load.MaxConcurrency = None
    request_rate: load.RequestRate = None
    burstiness: load.Burstiness = None
    saturation_rate: load.SaturationRate = None
    rate_scale: load.RateScale = None
    warmup: load.Warmup = 0
    repeats: load.Repeats = "1"
    max_repeats: load.MaxRepeats = 30
    speed: load.Speed = None
    time_unit: load.TimeUnit = None
    duration_s: load.Duration = None
    think_time: load.ThinkTime = None
    tool_time: load.ToolTime = None
    tool_share: load.ToolShare = None
    sub_agents: load.SubAgents = None
    abandon_after: load.AbandonAfter = None
    thinking_len: load.ThinkingLen = None
    lora_assignment: load.LoraAssignment = None
    images: load.Images = None

    def scenario_of(self, workload: str) -> str | None:
        """The given scenario, or the one that the other options imply by the rules of `vllm bench serve`."""
        return scenario_meant(workload, self.scenario, self.request_rate, self.burstiness)


@dataclass(frozen=True)
class RequestFlags:
    """Which requests are sent, except their number."""

    seed: load.Seed = 0
    source: load.Source = "auto"
    tokenizer: load.Tokenizer = None
    columns: load.Columns = None
    keep_text: load.KeepText = False
    prefix_share: load.PrefixShare = None
    prefix_groups: load.PrefixGroups = None
    cache_hit_rate: load.CacheHitRate = None
    input_len: load.InputLen = None
    output_len: load.OutputLen = None
    length_distribution: load.LengthDistribution = None
    drop_too_long: load.DropTooLong = False


@dataclass(frozen=True)
class WorkloadFlags(RequestFlags):
    """Which requests are sent."""

    num_prompts: load.NumPrompts = None


@dataclass(frozen=True)
class OutputFlags:
    """Where results go, and in which form."""

    goodput: Annotated[
        list[str] | None,
        opt("--goodput", help="Limits in ms: ttft:500 tpot:50 e2el:5000.", panel=_OUTPUT),
    ] = None
    price_per_hour: Annotated[
        float | None,
        opt("--price-per-hour", help="Price of everything that serves; gives cost per million tokens.", panel=_OUTPUT),
    ] = None
    output_dir: Annotated[
        Path | None, opt("--output-dir", "-o", help="Directory to create for the results.", panel=_OUTPUT)
    ] = None
    save_as_vllm: Annotated[
        Path | None,
        opt("--save-as-vllm", help="Write the result also as `vllm bench serve` does (JSON).", panel=_OUTPUT),
    ] = None
    all_percentiles: Annotated[bool, opt("--all-percentiles", help=ALL_PERCENTILES, panel=_OUTPUT)] = False
    as_json: Annotated[bool, opt("--json", help="One JSON list on stdout, nothing else.", panel=_OUTPUT)] = False
    quiet: Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False


def plan_settings(requests: RequestFlags, load: LoadFlags, max_model_len: int | None) -> dict[str, object]:
    """The fields of PlanOptions that the options set, except workload, scenario and seed."""
    from ebbench.workloads.options import PlanOptions

    given = vars(requests) | vars(load) | {"max_model_len": max_model_len}
    names = [field.name for field in fields(PlanOptions) if field.name not in ("workload", "scenario", "seed")]
    return {name: given[name] for name in names if name in given}
