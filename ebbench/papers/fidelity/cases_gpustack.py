"""Runs of ``vllm bench serve`` published by GPUStack's performance lab, as cases.

Settings, fixed before the first run of ours (2026-11-23); no constant was fitted on these rows:

- ``vllm serve`` without arguments takes N = 1024 and B = 8192 on GPUs of 70 GiB and more, 256 and 2048 on smaller ones
  and on an A100 (``EngineArgs.get_batch_defaults``; the same in vLLM 0.9.2 to 0.11), 0.9 of the memory, no asynchronous
  scheduling.
- All prompts are sent at once unless the row has a concurrency. The random data set has prompts of one length; the
  chat template adds 8 tokens (counted for Qwen3; gpt-oss has a longer one, whose fixed part is in the prefix cache).
- Answers of the random data set have the mean length reported, rounded. Some models ended theirs early; how the lengths
  scattered is not published, and prompts that are prefilled one after the other put the requests out of step anyway.
- ShareGPT: the totals are published, the single lengths are not. They are drawn with the mean of the 1,000 and
  of the 100 prompts (``reference:workloads/sharegpt-gpustack-*.toml``); their spread is assumed.
- The A100's pages (2026-11-24) had been read when its device was made; of that only the facts of the GPU and rules were
  chosen, before its first run: host constants as of other devices on which none is fitted, mixed attention from the
  RTX 4090 (FlashAttention 2 on both), no factor on matrix products. It has 80 GB: Qwen3-32B ran on one.
- Scored are throughput, mean TTFT and mean TPOT. Throughput is in requests/s where lengths are known and in tokens/s
  where they are drawn. The answer of the tool is the group ``gpustack``; behind the API server and with the fused
  sampler's KV capacity (``fused_sampler``) the same cases are variants, to tell causes apart.

Corrected after the first run, from what is published about the runs; the first run's figures stand in
reports/fidelity/notes/gpustack.md:

- vLLM 0.9.2 to 0.11 admit a prompt when its first chunk fits (``scheduler_reserve_full_isl`` came later). Ours asked
  for all of it, as vLLM 0.32 does.
- The FP8 weights of Qwen3-235B-A22B have one scale per block. Ours had one per tensor (``--quantization fp8``), whose
  tables of experts are 2.5 times slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ebbench.config.topology import PoolSpec, parse_topology
from ebbench.devices.base import Parallel, quantised, start_up
from ebbench.devices.capacity import kv_capacity_tokens, layout_with
from ebbench.devices.profiles import find_model, find_profile
from ebbench.errors import UsageError
from ebbench.installation import REFERENCE
from ebbench.papers.fidelity.case import Case, Published, reference_rows
from ebbench.papers.protocols import Protocol

GPUSTACK = "gpustack/vllm_serve.csv"
GROUP = "gpustack"
FUSED_GROUP = "gpustack with fused sampler"
FUSED = ", fused sampler"
"""Ends the source of cells with the KV capacity that FlashInfer's sampler leaves."""
WITH_FUSED = "0.10"
"""A version that takes FlashInfer's sampler where FlashInfer is installed; 0.11 asks for an environment variable."""
MODELS = {
    "Qwen/Qwen3-8B": "qwen3-8b", "Qwen/Qwen3-14B": "qwen3-14b", "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "qwen3-235b-a22b-fp8", "openai/gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
PRECISIONS = {  # printed -> (--quantization, --kv-cache-dtype); static scales of activations are not modelled
    "bf16": (None, "auto"), "mxfp4": (None, "auto"), "fp8": (None, "auto"), "fp8 dynamic": ("fp8", "auto"),
    "bf16, kv fp8": (None, "fp8"),
}  # fmt: skip
DEVICES = {"H100": "h100", "RTX": "rtx-4090", "A100": "a100"}  # by the first word of the printed GPU
# N and B of `vllm serve` without arguments
SIZES = {"h100": (1024, 8192), "rtx-4090": (256, 2048), "a100": (256, 2048)}
TEMPLATE_TOKENS = 8


def gpustack() -> Iterator[Case]:
    """All published vLLM runs that a simulated device can repeat: without the pipeline of two GPUs and static FP8."""
    for row in reference_rows(GPUSTACK):
        if row["precision"] in PRECISIONS and "-pp" not in row["serve_arguments"]:
            yield _case(row)


def fused_sampler() -> Iterator[Case]:
    """The cases of vLLM 0.11 with the KV cache that FlashInfer's sampler leaves; the older ones have that anyway."""
    for case in gpustack():
        if case.vllm_version.startswith("0.11"):
            yield _with_fused_sampler(case)


def _case(row: Mapping[str, str]) -> Case:
    device = DEVICES[row["gpu"].split()[0]]
    quantization, kv_cache_dtype = PRECISIONS[row["precision"]]
    seqs, budget = SIZES[device]
    if "--max-num-batched-tokens" in row["serve_arguments"]:
        budget = int(row["serve_arguments"].partition("--max-num-batched-tokens ")[2].split()[0])
    parallel = f"tp={row['tp']},ep={row['ep']}" if row["ep"] != "1" else f"tp={row['tp']}"
    topology = None if parallel == "tp=1" else parse_topology(parallel)
    case = Case(
        _name(row, budget), device, MODELS[row["model"]], "v1",
        Protocol("v1", _plan(row), seqs, budget, warmup=0, topology=topology),
        tuple(_published(row)), group=GROUP, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        async_scheduling="--async-scheduling" in row["serve_arguments"], scheduler_reserve_full_isl=False,
        vllm_version=row["vllm"], front_end_ms=None,
    )  # fmt: skip
    return replace(case, refused=_refusal(case, kv_capacity(case)))


def _name(row: Mapping[str, str], budget: int) -> str:
    """Workload, concurrency, precision where several exist, and arguments that differ from the defaults."""
    parts = [row["workload"], f"c={row['max_concurrency']}" if row["max_concurrency"] else "all at once"]
    if row["precision"] not in ("bf16", "mxfp4"):
        parts.append(row["precision"])
    parts += [f"{key}={row[key]}" for key in ("tp", "ep") if row[key] != "1"]
    parts += ["async"] if "--async-scheduling" in row["serve_arguments"] else []
    parts += ["B=16384"] if budget == 16_384 else []
    return ", ".join(parts)


def _plan(row: Mapping[str, str]) -> dict[str, str | int]:
    count = int(row["completed"])
    load: dict[str, str | int] = {"num_prompts": count, "max_concurrency": int(row["max_concurrency"] or count)}
    if row["workload"] == "sharegpt":
        prompts = 100 if count == 100 else 1000
        return {"workload": f"{REFERENCE}workloads/sharegpt-gpustack-{prompts}.toml", **load}
    inputs, outputs = _lengths(row)
    return {
        "workload": "balanced", "input_len": inputs + TEMPLATE_TOKENS, "output_len": outputs,
        "length_distribution": "fixed", **load,
    }  # fmt: skip


def _lengths(row: Mapping[str, str]) -> tuple[int, int]:
    """Prompt and answer of a row of the random data set in tokens; the answer is the mean one, where it is printed."""
    inputs, outputs = (int(part) for part in row["workload"].split("-")[1:])
    if row["output_tokens"]:
        outputs = round(int(row["output_tokens"]) / int(row["completed"]))
    return inputs, outputs


def _published(row: Mapping[str, str]) -> Iterator[Published]:
    source = f"GPUStack, {row['model'].partition('/')[2].partition('-Instruct')[0]}"
    if row["workload"] == "sharegpt":
        yield Published("tokens_per_s", float(row["total_tokens_per_s"]), source)
    elif row["duration_s"]:
        yield Published("requests_per_s", int(row["completed"]) / float(row["duration_s"]), source)
    else:  # every answer had its full length: input and output rates agree with that within 0.2 %
        yield Published("requests_per_s", float(row["output_tokens_per_s"]) / _lengths(row)[1], source)
    yield Published("ttft_mean_s", float(row["ttft_mean_ms"]) / 1e3, source)
    yield Published("tpot_mean_ms", float(row["tpot_mean_ms"]), source)


def kv_capacity(case: Case) -> int | str:
    """KV tokens of a case's unit, or the reason why its model does not fit."""
    model = quantised(find_model(case.model), case.quantization, case.kv_cache_dtype)
    topology = case.protocol.topology
    pool = PoolSpec() if topology is None else topology.replicas
    assert pool is not None
    parallel, budget = Parallel(tp=pool.tp, ep=pool.ep), case.protocol.max_num_batched_tokens
    try:
        return kv_capacity_tokens(
            find_profile(case.device), model, start_up(case.vllm_version), parallel=parallel,
            max_num_seqs=case.protocol.max_num_seqs, max_num_batched_tokens=budget,
            layout=layout_with(model, parallel, budget, case.vllm_version),
        )  # fmt: skip
    except UsageError as error:
        return str(error).partition(";")[0]


def _refusal(case: Case, capacity: int | str) -> str:
    """Why no simulated server can execute this run; "" if one can."""
    if isinstance(capacity, str):
        return capacity
    plan = case.protocol.plan
    longest = int(plan.get("input_len", 0)) + int(plan.get("output_len", 0))
    return f"one request needs {longest:,} KV tokens, {capacity:,} fit by our estimate" if longest > capacity else ""


def _with_fused_sampler(case: Case) -> Case:
    published = tuple(replace(number, source=number.source + FUSED) for number in case.published)
    fused = replace(case, published=published, group=FUSED_GROUP, vllm_version=WITH_FUSED)
    return replace(fused, refused=_refusal(fused, kv_capacity(fused)))
