"""Options that say which requests are sent and when, and the scheduler's limits, for all commands that make plans.

None is the default of what the option sets; where commands differ, the default is theirs.
"""

from __future__ import annotations

from typing import Annotated

from ebbench.cli import completion
from ebbench.cli.options import opt

WORKLOAD, LOAD, ENGINE = "Workload", "Load", "Engine"

NumPrompts = Annotated[
    int | None,
    opt(
        "--num-prompts",
        "-n",
        help="Sessions to plan: single requests or conversations. Default: what scenario, workload or trace hold.",
        panel=WORKLOAD,
    ),
]
Seed = Annotated[int, opt("--seed", help="Same seed, same plan, byte for byte.", panel=WORKLOAD)]
Source = Annotated[str, opt("--source", help="auto, hub, profile or file:PATH.", panel=WORKLOAD)]
Tokenizer = Annotated[
    str | None, opt("--tokenizer", help="Counts the tokens of texts; default: estimated.", panel=WORKLOAD)
]
InputLen = Annotated[int | None, opt("--input-len", help="Mean prompt tokens.", panel=WORKLOAD)]
OutputLen = Annotated[int | None, opt("--output-len", help="Mean answer tokens.", panel=WORKLOAD)]
LengthDistribution = Annotated[
    str | None, opt("--length-distribution", help="uniform, geometric, gamma:SHAPE or fixed.", panel=WORKLOAD)
]
DropTooLong = Annotated[bool, opt("--drop-too-long", help="Drop requests over --max-model-len.", panel=WORKLOAD)]

Scenario = Annotated[
    str | None,
    opt(
        "--scenario", "-s", help="When requests come: a name or a TOML file.", panel=LOAD, complete=completion.scenarios
    ),
]
MaxConcurrency = Annotated[int | None, opt("--max-concurrency", "-c", help="Sessions open at a time.", panel=LOAD)]
RequestRate = Annotated[
    float | None,
    opt("--request-rate", help="Sessions/s, open loop; inf: all at once, or as --max-concurrency lets.", panel=LOAD),
]
Burstiness = Annotated[
    float | None, opt("--burstiness", help="Shape of gamma gaps: 1 is Poisson, less is burstier.", panel=LOAD)
]
SaturationRate = Annotated[
    float | None,
    opt("--saturation-rate", help="Measured saturation in sessions/s, for phases given as a share.", panel=LOAD),
]
Speed = Annotated[float | None, opt("--speed", help="Time factor of a trace: 2 is twice as fast.", panel=LOAD)]
Duration = Annotated[
    float | None,
    opt("--duration", help="Seconds after which nothing more is released; what runs then ends.", panel=LOAD),
]
TimeUnit = Annotated[
    str | None,
    opt(
        "--time-unit",
        help="Unit of a trace's times: s, ms, us or ns. Default: read off the file; required where that is ambiguous.",
        panel=LOAD,
    ),
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
        help="Runs per policy, seeds S, S+1, ...; auto: until it is clear which policy is better, or --max-repeats.",
        panel=LOAD,
    ),
]
MaxRepeats = Annotated[int, opt("--max-repeats", help="With --repeats auto: at most so many.", panel=LOAD)]

MaxNumSeqs = Annotated[int, opt("--max-num-seqs", help="N, sequences in a batch.", panel=ENGINE)]
MaxNumBatchedTokens = Annotated[int, opt("--max-num-batched-tokens", help="B, token budget of a step.", panel=ENGINE)]
MaxModelLen = Annotated[
    int | None, opt("--max-model-len", help="Longest prompt plus answer. Default: 40,960 tokens.", panel=ENGINE)
]
NumKvBlocks = Annotated[
    int | None, opt("--num-kv-blocks", help="KV blocks of 16 tokens; default: what the device holds.", panel=ENGINE)
]
NoPrefixCaching = Annotated[bool, opt("--no-prefix-caching", help="Do not reuse KV of shared prefixes.", panel=ENGINE)]
NoAsyncScheduling = Annotated[
    bool, opt("--no-async-scheduling", help="Schedule a step only when the last has ended.", panel=ENGINE)
]
Quantization = Annotated[
    str | None, opt("--quantization", help="Weights in another type than the model's own: fp8.", panel=ENGINE)
]
KvCacheDtype = Annotated[
    str, opt("--kv-cache-dtype", help="Type of the KV cache: auto (the model's own), bfloat16 or fp8.", panel=ENGINE)
]
EnforceEager = Annotated[
    bool, opt("--enforce-eager", help="No CUDA graphs: every layer is launched by the host.", panel=ENGINE)
]
ApiServer = Annotated[
    str,
    opt(
        "--api-server",
        help="Simulate vLLM's API server: datacenter, FILE.toml (what yours costs) or off.",
        panel=ENGINE,
        complete=completion.api_servers,
    ),
]
ApiServerCount = Annotated[
    int | None,
    opt("--api-server-count", help="Its processes per engine; default: one per data-parallel unit.", panel=ENGINE),
]
