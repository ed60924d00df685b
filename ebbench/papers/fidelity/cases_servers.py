"""Published measurements of vLLM servers, of several GPUs and of Gemma, as cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import nan

from ebbench.config.topology import PoolSpec, parse_topology
from ebbench.devices.base import Parallel, quantised, start_up
from ebbench.devices.capacity import kv_capacity_tokens, layout_with
from ebbench.devices.profiles import find_model, find_profile
from ebbench.errors import UsageError
from ebbench.grouping import by_key
from ebbench.installation import REFERENCE
from ebbench.papers.eb.disaggregation import FOUR, TWO, four_gpus, two_gpus
from ebbench.papers.fidelity.case import CONNECTOR_SETTING, DEVICES, Case, Published
from ebbench.papers.protocols import Protocol, real_protocol
from ebbench.papers.published import WORKLOADS, best_sizes, rows

SERVERS = "servers/vllm"
GROUP = "servers"
SILICON = "silicon/vllm_dense"
SILICON_FITTED = ("4", "1024")  # the points on which the host constants of the H100 are fitted
SILICON_BUDGET, SILICON_SEQS = 8192, 256  # vLLM's defaults for a server on these GPUs; the engine arguments are unknown
DEFAULT_SEQS = 1024  # vLLM's default for a server on these GPUs, where a source sets none
ROUNDS = 4  # requests per slot
TTFT_NOTE = "TTFT is defined differently by source"
NUMINAMATH_NOTE = "answers of 4,000 tokens contradict the published TPOT and N; their length was not published"
FAILED_NOTE = "out of memory in print"
_METRICS = {  # the reference tables' name of a figure: our name, and the factor to our unit
    "total_tokens_per_s": ("tokens_per_s", 1.0),
    "ttft_s": ("ttft_mean_s", 1.0),
    "ttft_ms": ("ttft_mean_s", 1e-3),
    "tpot_ms": ("tpot_mean_ms", 1.0),
}


def server_cases() -> list[Case]:
    """All cases of this module."""
    return [*measured_servers(), *silicon(), *table17(), *table19(), *table20()]


def measured_servers() -> Iterator[Case]:
    """vLLM servers with the arguments of their runs (``reports/reference/servers``): InferenceX, inference-perf and
    LLMServingSim.

    Closed loops have the client's concurrency, open loops its rate and, as connections, its limit (their client's
    ``constant`` load has exponential gaps, scaled to the stage's duration); three runs repeat recorded requests.
    Settings were fixed before the first run of ours by the source's own arguments.
    """
    for row in rows(SERVERS):
        single = row["topology"] == "tp=1"
        topology = None if single else parse_topology(row["topology"])
        seqs = int(row["max_num_seqs"] or DEFAULT_SEQS)
        yield Case(
            _server_name(row), row["gpu"], row["model"], "v1",
            Protocol("v1", _server_plan(row), seqs, int(row["max_num_batched_tokens"]), warmup=0, topology=topology),
            tuple(_server_figures(row)), group=GROUP,
            quantization="fp8" if row["precision"] == "fp8" else None, kv_cache_dtype=row["kv_cache_dtype"] or "auto",
            moe_backend="marlin" if row["moe_backend"] == "marlin" else "auto",
            async_scheduling=row["async_scheduling"] == "yes", vllm_version=row["vllm"],
            gpu_memory_utilization=float(row["gpu_memory_utilization"]), front_end_ms=None,
        )  # fmt: skip


def _server_name(row: Mapping[str, str]) -> str:
    lengths = f"{row['input_tokens']} in, {row['output_tokens']} out" if row["input_tokens"] else "300 of ShareGPT"
    load = f"{row['requests_per_s']}/s" if row["requests_per_s"] else f"c={row['concurrency']}"
    limit = f", N={row['max_num_seqs']}" if row["requests_per_s"] else ""
    shared = ", shared prefix" if row["prefix_share"] else ""
    return f"{row['topology']}, {lengths}" + (f", {load}{limit}{shared}" if row["input_tokens"] else "")


def _server_plan(row: Mapping[str, str]) -> dict[str, str | int | float]:
    if not row["input_tokens"]:
        log = f"log:{REFERENCE}servers/rtxpro6000-{row['model']}.csv"
        return {"workload": log, "scenario": "trace", "time_unit": "s"}
    load: dict[str, str | int | float] = {
        "num_prompts": int(row["prompts"]), "max_concurrency": int(row["concurrency"]),
    }  # fmt: skip
    if row["spread"]:
        lengths = f"{row['input_tokens']}-{row['output_tokens']}"
        return {"workload": f"{REFERENCE}workloads/inferencex-{lengths}.toml", **load}
    shared = {"prefix_share": float(row["prefix_share"])} if row["prefix_share"] else {}
    return {
        "workload": "balanced", "input_len": int(row["input_tokens"]), "output_len": int(row["output_tokens"]),
        "length_distribution": "fixed", "scenario": f"{REFERENCE}scenarios/inference-perf.toml",
        "request_rate": float(row["requests_per_s"]), **load, **shared,
    }  # fmt: skip


def _server_figures(row: Mapping[str, str]) -> Iterator[Published]:
    source = row["source"]
    yield Published("tpot_mean_ms", float(row["tpot_mean_ms"]), source)
    yield Published("ttft_mean_s", float(row["ttft_mean_ms"]) / 1e3, source)
    if row["output_tokens_per_s"]:
        yield Published("output_tokens_per_s", float(row["output_tokens_per_s"]), source)


def silicon() -> Iterator[Case]:
    """Qwen3-32B in 16 bits on 2 to 8 H100 (aiconfigurator-core's sample).

    Left out: the rows of Llama-3.1-70B in FP8, which are InferenceX's runs (:func:`measured_servers`), and 24 FP8
    points of Qwen3-32B and Llama-3.1-8B. At their concurrency and latencies the prompts alone would take longer than
    the run (for Llama-3.1-8B on one H200 95,000 prompt tokens/s, 1.5 of 2.0 PFLOP/s, in addition to decoding), so they
    are not closed loops of one engine.
    """
    for row in rows(SILICON):
        if row["model"] != "Qwen/Qwen3-32B" or row["precision"] == "fp8":
            continue
        tp, inputs, outputs = row["tp"], row["input_tokens"], row["output_tokens"]
        concurrency = int(row["concurrency"])
        source = f"silicon, 16 bits, tp={tp}"
        plan: dict[str, str | int] = {
            "workload": f"{REFERENCE}workloads/silicon-{inputs}-{outputs}.toml",
            "num_prompts": max(ROUNDS * concurrency, 32),
            "max_concurrency": concurrency,
        }
        yield Case(
            f"{inputs} in, {outputs} out, c={concurrency}", "h100", "qwen3-32b", "v1",
            Protocol("v1", plan, SILICON_SEQS, SILICON_BUDGET, warmup=0, topology=parse_topology(f"tp={tp}")),
            (
                Published("tpot_mean_ms", float(row["tpot_ms"]), source),
                Published("ttft_mean_s", float(row["ttft_ms"]) / 1e3, source, False, TTFT_NOTE),
            ),
            fitted=(tp, inputs) == SILICON_FITTED, group="silicon", vllm_version="0.12",
        )  # fmt: skip


def table17() -> Iterator[Case]:
    """Gemma-3-1B-IT on real workloads (table 17); v0 was measured with another code base and is left out."""
    for row in rows("paper_tables/table17_gemma_rps"):
        if row["workload"] == "wildchat":
            continue  # message lengths were not published
        for scheduler in ("v1", "eb"):
            note = NUMINAMATH_NOTE if row["workload"] == "numinamath" else ""
            title = WORKLOADS[row["workload"]]
            sizes = best_sizes(DEVICES[row["gpu"]], scheduler, row["workload"], "gemma-3-1b-it")
            yield Case(
                title, DEVICES[row["gpu"]], "gemma-3-1b-it", scheduler,
                real_protocol(row["workload"], "gemma-3-1b-it", scheduler, sizes),
                (Published("requests_per_s", float(row[scheduler]), "table 17", not note, note),), group="table 17",
            )  # fmt: skip


def table19() -> Iterator[Case]:
    """Two GPUs: replicas and one prefill with one decode server (table 19)."""
    cells = by_key(
        ((row["gpu"], row["concurrency"], setting), published_number(row["metric"], row[setting], "table 19"))
        for row, setting in product(rows("paper_tables/table19_two_gpu"), TWO)
        if row.get(setting)
    )
    for (gpu, concurrency, setting), published in cells.items():
        device = DEVICES[gpu]
        yield Case(
            f"c={concurrency}", device, "qwen3-8b", setting, two_gpus(TWO[setting], device, int(concurrency)),
            tuple(published), group="table 19",
        )  # fmt: skip


def published_number(metric: str, value: str, source: str) -> Published:
    """A number of a reference table, by its name there."""
    name, scale = _METRICS[metric]
    return Published(name, float(value) * scale, source)


def table20() -> Iterator[Case]:
    """Four GPUs: replicas and three splits (table 20).

    A setting that ran out of memory in print has no figures to score; it is repeated since it cannot be the fastest.
    """
    cells: dict[tuple[str, str, str, str], list[Published]] = {}
    for row in rows("paper_tables/table20_four_gpus"):
        figures = cells.setdefault((row["gpu"], row["workload"], row["concurrency"], row["setting"]), [])
        if row["value"]:
            figures.append(published_number(row["metric"], row["value"], "table 20"))
        elif row["metric"] == "total_tokens_per_s":
            figures.append(Published("tokens_per_s", nan, "table 20", False, FAILED_NOTE))
    for (gpu, workload, concurrency, setting), published in cells.items():
        device = DEVICES[gpu]
        yield Case(
            f"{workload}, c={concurrency}", device, "qwen3-8b", setting,
            four_gpus(FOUR[setting], device, workload, int(concurrency)), tuple(published),
            fitted=(workload, setting) == CONNECTOR_SETTING, group="table 20",
        )  # fmt: skip


# Runs of ``vllm bench serve`` published by GPUStack's performance lab, as cases.
#
# Settings, fixed before the first run of ours (2026-11-23); no constant was fitted on these rows:
#
# - ``vllm serve`` without arguments takes N = 1024 and B = 8192 on GPUs of 70 GiB and more, 256 and 2048 on smaller
#   ones and on an A100 (``EngineArgs.get_batch_defaults``; the same in vLLM 0.9.2 to 0.11), 0.9 of the memory, no
#   asynchronous scheduling.
# - All prompts are sent at once unless the row has a concurrency. The random data set has prompts of one length; the
#   chat template adds 8 tokens (counted for Qwen3; gpt-oss has a longer one, whose fixed part is in the prefix cache).
# - Answers of the random data set have the mean length reported, rounded. Some models ended theirs early; how the
#   lengths scattered is not published, and prompts that are prefilled one after the other put the requests out of step
#   anyway.
# - ShareGPT: the totals are published, the single lengths are not. They are drawn with the mean of the 1,000 and of the
#   100 prompts (``reference:workloads/sharegpt-gpustack-*.toml``); their spread is assumed.
# - The A100's pages (2026-11-24) had been read when its device was made; of that only the facts of the GPU and rules
#   were chosen, before its first run: host constants as of other devices on which none is fitted, mixed attention from
#   the RTX 4090 (FlashAttention 2 on both), no factor on matrix products. It has 80 GB: Qwen3-32B ran on one.
# - Scored are throughput, mean TTFT and mean TPOT. Throughput is in requests/s where lengths are known and in tokens/s
#   where they are drawn. The answer of the tool is the group ``gpustack``; without the API server the same cases are
#   variants, to tell causes apart.
#
# Corrected after the first run, from what is published about the runs; the first run's figures stand in
# reports/fidelity/notes/gpustack.md:
#
# - vLLM 0.9.2 to 0.11 admit a prompt when its first chunk fits (``scheduler_reserve_full_isl`` came later). Ours asked
#   for all of it, as vLLM 0.32 does.
# - The FP8 weights of Qwen3-235B-A22B have one scale per block. Ours had one per tensor (``--quantization fp8``), whose
#   tables of experts are 2.5 times slower.

GPUSTACK = "gpustack/vllm_serve"
GPUSTACK_GROUP = "gpustack"
GPUSTACK_MODELS = {
    "Qwen/Qwen3-8B": "qwen3-8b", "Qwen/Qwen3-14B": "qwen3-14b", "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "qwen3-235b-a22b-fp8", "openai/gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
PRECISIONS = {  # printed -> (--quantization, --kv-cache-dtype); static scales of activations are not modelled
    "bf16": (None, "auto"), "mxfp4": (None, "auto"), "fp8": (None, "auto"), "fp8 dynamic": ("fp8", "auto"),
    "bf16, kv fp8": (None, "fp8"),
}  # fmt: skip
GPUSTACK_DEVICES = {"H100": "h100", "RTX": "rtx-4090", "A100": "a100"}  # by the first word of the printed GPU
# N and B of `vllm serve` without arguments
GPUSTACK_SIZES = {"h100": (1024, 8192), "rtx-4090": (256, 2048), "a100": (256, 2048)}
TEMPLATE_TOKENS = 8


def gpustack() -> Iterator[Case]:
    """All published vLLM runs that a simulated device can repeat: without the pipeline of two GPUs and static FP8."""
    for row in rows(GPUSTACK):
        if row["precision"] in PRECISIONS and "-pp" not in row["serve_arguments"]:
            yield _gpustack_case(row)


def _gpustack_case(row: Mapping[str, str]) -> Case:
    device = GPUSTACK_DEVICES[row["gpu"].split()[0]]
    quantization, kv_cache_dtype = PRECISIONS[row["precision"]]
    seqs, budget = GPUSTACK_SIZES[device]
    if "--max-num-batched-tokens" in row["serve_arguments"]:
        budget = int(row["serve_arguments"].partition("--max-num-batched-tokens ")[2].split()[0])
    parallel = f"tp={row['tp']},ep={row['ep']}" if row["ep"] != "1" else f"tp={row['tp']}"
    topology = None if parallel == "tp=1" else parse_topology(parallel)
    case = Case(
        _gpustack_name(row, budget), device, GPUSTACK_MODELS[row["model"]], "v1",
        Protocol("v1", _gpustack_plan(row), seqs, budget, warmup=0, topology=topology),
        tuple(_gpustack_figures(row)), group=GPUSTACK_GROUP, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        async_scheduling="--async-scheduling" in row["serve_arguments"], scheduler_reserve_full_isl=False,
        vllm_version=row["vllm"], front_end_ms=None,
    )  # fmt: skip
    return replace(case, refused=_refusal(case, kv_capacity(case)))


def _gpustack_name(row: Mapping[str, str], budget: int) -> str:
    """Workload, concurrency, precision where several exist, and arguments that differ from the defaults."""
    parts = [row["workload"], f"c={row['max_concurrency']}" if row["max_concurrency"] else "all at once"]
    if row["precision"] not in ("bf16", "mxfp4"):
        parts.append(row["precision"])
    parts += [f"{key}={row[key]}" for key in ("tp", "ep") if row[key] != "1"]
    parts += ["async"] if "--async-scheduling" in row["serve_arguments"] else []
    parts += ["B=16384"] if budget == 16_384 else []
    return ", ".join(parts)


def _gpustack_plan(row: Mapping[str, str]) -> dict[str, str | int]:
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


def _gpustack_figures(row: Mapping[str, str]) -> Iterator[Published]:
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
