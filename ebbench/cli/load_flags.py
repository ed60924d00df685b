"""Arguments and options that several commands share: requests, arrivals, latency limits, scheduler limits, vLLM's own.

None selects the default of the option's target; commands with other defaults set them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ebbench.cli import completion
from ebbench.cli.options import opt
from ebbench.config.defaults import DEFAULT_VLLM

WORKLOAD, LOAD, ENGINE, LIMITS = "Workload", "Load", "Engine", "Limits"

WorkloadArgument = Annotated[
    str,
    typer.Argument(help="A workload (`ebbench workloads list`), or log:FILE.", autocompletion=completion.workloads),
]
VllmOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- VLLM_OPTIONS",
        help="With --engine vllm, after --: options for `vllm serve`.",
        show_default=False,
    ),
]
SESSIONS = "Sessions"

NumPrompts = Annotated[
    int | None,
    opt(
        "--num-prompts",
        "-n",
        help="Sessions to plan: single requests or conversations. Default: what scenario, workload or trace hold.",
        panel=WORKLOAD,
    ),
]
Seed = Annotated[int, opt("--seed", help="Seed of the plan; equal seeds give byte-identical plans.", panel=WORKLOAD)]
Source = Annotated[str, opt("--source", help="auto, hub, profile or file:PATH.", panel=WORKLOAD)]
Tokenizer = Annotated[
    str | None, opt("--tokenizer", help="Tokenizer that counts the tokens of texts; default: estimate.", panel=WORKLOAD)
]
PrefixShare = Annotated[
    float | None,
    opt("--prefix-share", help="Share of synthetic prompts that is their group's common prefix.", panel=WORKLOAD),
]
PrefixGroups = Annotated[
    int | None, opt("--prefix-groups", help="Groups with a common prefix each; default: 1.", panel=WORKLOAD)
]
CacheHitRate = Annotated[
    float | None,
    opt("--cache-hit-rate", help="Choose the common prefixes for this prefix cache hit rate.", panel=WORKLOAD),
]
Columns = Annotated[
    str | None,
    opt(
        "--columns",
        help="A log's columns: input=A,output=B,time=C,session=D; default: by their names.",
        panel=WORKLOAD,
    ),
]
KeepText = Annotated[
    bool, opt("--keep-text", help="Send a log's own prompts; default: only their lengths are read.", panel=WORKLOAD)
]
InputLen = Annotated[int | None, opt("--input-len", help="Mean prompt tokens.", panel=WORKLOAD)]
OutputLen = Annotated[int | None, opt("--output-len", help="Mean output tokens.", panel=WORKLOAD)]
LengthDistribution = Annotated[
    str | None, opt("--length-distribution", help="uniform, geometric, gamma:SHAPE or fixed.", panel=WORKLOAD)
]
DropTooLong = Annotated[bool, opt("--drop-too-long", help="Drop requests longer than --max-model-len.", panel=WORKLOAD)]

Scenario = Annotated[
    str | None,
    opt(
        "--scenario",
        "-s",
        help="When requests arrive: a name or a TOML file.",
        panel=LOAD,
        complete=completion.scenarios,
    ),
]
MaxConcurrency = Annotated[int | None, opt("--max-concurrency", "-c", help="Most sessions open at a time.", panel=LOAD)]
RequestRate = Annotated[
    float | None,
    opt(
        "--request-rate",
        help="Sessions/s, open loop; inf: all at once, up to --max-concurrency.",
        panel=LOAD,
    ),
]
Burstiness = Annotated[
    float | None, opt("--burstiness", help="Shape of gamma gaps: 1 is Poisson, less is burstier.", panel=LOAD)
]
RateScale = Annotated[
    float | None,
    opt("--rate-scale", help="Factor of the rates in a scenario or a fitted workload.", panel=LOAD),
]
SaturationRate = Annotated[
    float | None,
    opt("--saturation-rate", help="Measured saturation in sessions/s, for phases given as a share.", panel=LOAD),
]
Speed = Annotated[float | None, opt("--speed", help="Time factor of a trace: 2 is twice as fast.", panel=LOAD)]
Duration = Annotated[
    float | None,
    opt("--duration", help="Seconds after which no session is released; open ones run to their end.", panel=LOAD),
]
TimeUnit = Annotated[
    str | None,
    opt(
        "--time-unit",
        help="Unit of a trace's times: s, ms, us or ns. Default: derived from the file; required if ambiguous.",
        panel=LOAD,
    ),
]
Goodput = Annotated[
    list[str] | None,
    opt(
        "--goodput",
        help="Limits in ms: ttft:2000 tpot:50 e2el:9000, met by --attainment of the requests; or ttft:p99:2000.",
        panel=LIMITS,
    ),
]
Attainment = Annotated[
    float, opt("--attainment", help="Share of the requests that must meet the limits.", panel=LIMITS)
]
ThinkTime = Annotated[
    str | None,
    opt("--think-time", help="Pause before each later turn: seconds, or exponential:mean=20.", panel=SESSIONS),
]
ToolTime = Annotated[
    str | None, opt("--tool-time", help="The same where the client runs a tool; see --tool-share.", panel=SESSIONS)
]
ToolShare = Annotated[
    float | None, opt("--tool-share", help="Share of the later turns that follow a tool call.", panel=SESSIONS)
]
SubAgents = Annotated[
    str | None,
    opt(
        "--sub-agents",
        help="Parallel requests between turns: 3, or count=3,share=0.5,turns=2, with input= and output= tokens.",
        panel=SESSIONS,
    ),
]
ThinkingLen = Annotated[
    int | None,
    opt("--thinking-len", help="Mean thinking tokens before each answer, in addition to it.", panel=SESSIONS),
]
LoraAssignment = Annotated[
    str | None,
    opt("--lora-assignment", help="Adapters by name, one per session, over HTTP: sql=3,chat=1,base.", panel=WORKLOAD),
]
Images = Annotated[
    str | None, opt("--images", help="Images in every prompt: tokens=256,count=2,side=448.", panel=WORKLOAD)
]
AbandonAfter = Annotated[
    str | None,
    opt("--abandon-after", help="Clients hang up on an incomplete answer after this time.", panel=SESSIONS),
]
Warmup = Annotated[
    int,
    opt(
        "--warmup", "--num-warmups", help="Requests before the start, of the plan's lengths; not recorded.", panel=LOAD
    ),
]
Repeats = Annotated[
    str,
    opt(
        "--repeats",
        help="Runs per policy, seeds S, S+1, ...; auto: until one policy is clearly better, at most --max-repeats.",
        panel=LOAD,
    ),
]
MaxRepeats = Annotated[int, opt("--max-repeats", help="Most repeats with --repeats auto.", panel=LOAD)]

MaxNumSeqs = Annotated[int, opt("--max-num-seqs", help="N, most sequences in a batch.", panel=ENGINE)]
MaxNumBatchedTokens = Annotated[int, opt("--max-num-batched-tokens", help="B, token budget per step.", panel=ENGINE)]
MaxNumActiveSeqs = Annotated[
    int | None, opt("--max-num-active-seqs", help="Most sequences that run, where fewer than N.", panel=ENGINE)
]
MaxNumQueuedReqs = Annotated[
    int | None,
    opt("--max-num-queued-reqs", help="Open requests from which on further ones are refused (503).", panel=ENGINE),
]
MaxNumQueuedTokens = Annotated[
    int | None,
    opt("--max-num-queued-tokens", help="Queued prompt tokens from which on requests are refused.", panel=ENGINE),
]
LongPrefillTokenThreshold = Annotated[
    int,
    opt("--long-prefill-token-threshold", help="Most tokens of one prompt per step; 0: no limit.", panel=ENGINE),
]
LongPrefillTokenThresholdAdaptive = Annotated[
    bool,
    opt("--long-prefill-token-threshold-adaptive", help="Raise it to a request's share of B.", panel=ENGINE),
]
NoSchedulerReserveFullIsl = Annotated[
    bool,
    opt("--no-scheduler-reserve-full-isl", help="Admit a prompt as soon as its first chunk fits.", panel=ENGINE),
]
MaxModelLen = Annotated[
    int | None, opt("--max-model-len", help="Longest prompt plus output. Default: 40,960 tokens.", panel=ENGINE)
]
NumKvBlocks = Annotated[
    int | None, opt("--num-kv-blocks", help="KV blocks of 16 tokens; default: the device's capacity.", panel=ENGINE)
]
GpuMemoryUtilization = Annotated[
    float | None,
    opt("--gpu-memory-utilization", help="Share of the GPU's memory for vLLM; default: vLLM's own.", panel=ENGINE),
]
VllmVersion = Annotated[
    str | None,
    opt(
        "--vllm-version",
        help=f"Version by whose rules a simulated server sizes its KV cache. Default: {DEFAULT_VLLM}.",
        panel=ENGINE,
    ),
]
NoPrefixCaching = Annotated[bool, opt("--no-prefix-caching", help="Do not reuse KV of shared prefixes.", panel=ENGINE)]
NoAsyncScheduling = Annotated[
    bool, opt("--no-async-scheduling", help="Schedule a step only when the previous one has ended.", panel=ENGINE)
]
Quantization = Annotated[
    str | None, opt("--quantization", help="Data type of the weights, if not the model's own: fp8.", panel=ENGINE)
]
AssumeDecoder = Annotated[
    bool,
    opt(
        "--assume-decoder",
        help="Read a config.json of an unknown type or with unknown keys as an ordinary decoder; results say so.",
        panel=ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    opt("--kv-cache-dtype", help="Data type of the KV cache: auto (the model's own), bfloat16 or fp8.", panel=ENGINE),
]
EnforceEager = Annotated[
    bool, opt("--enforce-eager", help="Do not use CUDA graphs: the host launches every layer.", panel=ENGINE)
]
ApiServer = Annotated[
    str,
    opt(
        "--api-server",
        help="vLLM's API server, simulated: auto (where it would be busy), datacenter, FILE.toml or off.",
        panel=ENGINE,
        complete=completion.api_servers_or_auto,
    ),
]
ApiServerCount = Annotated[
    int | None,
    opt("--api-server-count", help="Its processes per engine; default: one per data-parallel unit.", panel=ENGINE),
]
