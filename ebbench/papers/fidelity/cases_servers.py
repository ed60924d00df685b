"""Published measurements of vLLM servers, of several GPUs and of Gemma, as cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import nan

from ebbench.config.topology import parse_topology
from ebbench.installation import REFERENCE
from ebbench.papers.eb.disaggregation import FOUR, TWO, four_gpus, two_gpus
from ebbench.papers.fidelity.case import CONNECTOR_SETTING, DEVICES, Case, Published, reference_rows
from ebbench.papers.protocols import Protocol, real_protocol
from ebbench.papers.published import WORKLOADS, best_sizes

SERVERS = "servers/vllm.csv"
GROUP = "servers"
SILICON = "silicon/vllm_dense.csv"
SILICON_FITTED = ("4", "1024")  # the points on which the host constants of the H100 are fitted
SILICON_BUDGET, SILICON_SEQS = 8192, 256  # vLLM's defaults for a server on these GPUs; the engine arguments are unknown
DEFAULT_SEQS = 1024  # vLLM's default for a server on these GPUs, where a source sets none
EVEN = 50.0  # burstiness of a client that sends at nearly equal gaps
ROUNDS = 4  # requests per slot
OVERLOAD_NOTE = "more than the server completes: measured from the send over 440 connections, ours from the arrival"
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

    Closed loops have the client's concurrency, open loops its rate and, as connections, its limit; three runs repeat
    recorded requests. Settings were fixed before the first run of ours by the source's own arguments.
    """
    for row in reference_rows(SERVERS):
        single = row["topology"] == "tp=1"
        topology = None if single else parse_topology(row["topology"])
        seqs = int(row["max_num_seqs"] or DEFAULT_SEQS)
        yield Case(
            _server_name(row), row["gpu"], row["model"], "v1",
            Protocol("v1", _server_plan(row), seqs, int(row["max_num_batched_tokens"]), warmup=0, topology=topology),
            tuple(_server_figures(row)), group=GROUP,
            quantization="fp8" if row["precision"] == "fp8" else None, kv_cache_dtype=row["kv_cache_dtype"] or "auto",
            async_scheduling=row["async_scheduling"] == "yes", vllm_version=row["vllm"],
            gpu_memory_utilization=float(row["gpu_memory_utilization"]), front_end_ms=None,
        )  # fmt: skip


def _server_name(row: Mapping[str, str]) -> str:
    lengths = f"{row['input_tokens']} in, {row['output_tokens']} out" if row["input_tokens"] else "300 of ShareGPT"
    load = f"{row['requests_per_s']}/s" if row["requests_per_s"] else f"c={row['concurrency']}"
    limit = f", N={row['max_num_seqs']}" if row["requests_per_s"] else ""
    shared = ", shared prefix" if row["cache_hit_rate"] else ""
    return (
        f"{row['topology']}, {lengths}, {load}{limit}{shared}"
        if row["input_tokens"]
        else f"{row['topology']}, {lengths}"
    )


def _server_plan(row: Mapping[str, str]) -> dict[str, str | int | float]:
    if not row["input_tokens"]:
        log = f"log:{REFERENCE}servers/rtxpro6000-{row['model']}.csv"
        return {"workload": log, "scenario": "trace", "time_unit": "s"}
    load: dict[str, str | int | float] = {
        "num_prompts": int(row["prompts"]), "max_concurrency": int(row["concurrency"]),
    }  # fmt: skip
    if row["spread"]:
        return {
            "workload": f"{REFERENCE}workloads/inferencex-{row['input_tokens']}-{row['output_tokens']}.toml",
            **load,
        }
    shared = {"cache_hit_rate": float(row["cache_hit_rate"])} if row["cache_hit_rate"] else {}
    return {
        "workload": "balanced", "input_len": int(row["input_tokens"]), "output_len": int(row["output_tokens"]),
        "length_distribution": "fixed", "scenario": "gamma", "burstiness": EVEN,
        "request_rate": float(row["requests_per_s"]), **load, **shared,
    }  # fmt: skip


def _server_figures(row: Mapping[str, str]) -> Iterator[Published]:
    source = row["source"]
    yield Published("tpot_mean_ms", float(row["tpot_mean_ms"]), source)
    note = OVERLOAD_NOTE if _overloaded(row) else ""
    yield Published("ttft_mean_s", float(row["ttft_mean_ms"]) / 1e3, source, not note, note)
    if row["output_tokens_per_s"]:
        yield Published("output_tokens_per_s", float(row["output_tokens_per_s"]), source)


def _overloaded(row: Mapping[str, str]) -> bool:
    """Whether an open loop sent more than the server completed."""
    if not row["requests_per_s"]:
        return False
    completed = float(row["output_tokens_per_s"]) / float(row["output_tokens"])
    return completed < 0.95 * float(row["requests_per_s"])


def silicon() -> Iterator[Case]:
    """Qwen3-32B in 16 bits on 2 to 8 H100 (aiconfigurator-core's sample).

    Left out: the rows of Llama-3.1-70B in FP8, which are InferenceX's runs (:func:`measured_servers`), and 24 FP8
    points of Qwen3-32B and Llama-3.1-8B. At their concurrency and latencies the prompts alone would take longer than
    the run (for Llama-3.1-8B on one H200 95,000 prompt tokens/s, 1.5 of 2.0 PFLOP/s, in addition to decoding), so they
    are not closed loops of one engine.
    """
    for row in reference_rows(SILICON):
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
    for row in reference_rows("paper_tables/table17_gemma_rps.csv"):
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
    cells: dict[tuple[str, str, str], list[Published]] = {}
    for row in reference_rows("paper_tables/table19_two_gpu.csv"):
        for setting in TWO:
            if row.get(setting):
                number = _published(row["metric"], row[setting], "table 19")
                cells.setdefault((row["gpu"], row["concurrency"], setting), []).append(number)
    for (gpu, concurrency, setting), published in cells.items():
        device = DEVICES[gpu]
        yield Case(
            f"c={concurrency}", device, "qwen3-8b", setting, two_gpus(TWO[setting], device, int(concurrency)),
            tuple(published), group="table 19",
        )  # fmt: skip


def _published(metric: str, value: str, source: str) -> Published:
    name, scale = _METRICS[metric]
    return Published(name, float(value) * scale, source)


def table20() -> Iterator[Case]:
    """Four GPUs: replicas and three splits (table 20).

    A setting that ran out of memory in print has no figures to score; it is repeated since it cannot be the fastest.
    """
    cells: dict[tuple[str, str, str, str], list[Published]] = {}
    for row in reference_rows("paper_tables/table20_four_gpus.csv"):
        figures = cells.setdefault((row["gpu"], row["workload"], row["concurrency"], row["setting"]), [])
        if row["value"]:
            figures.append(_published(row["metric"], row["value"], "table 20"))
        elif row["metric"] == "total_tokens_per_s":
            figures.append(Published("tokens_per_s", nan, "table 20", False, FAILED_NOTE))
    for (gpu, workload, concurrency, setting), published in cells.items():
        device = DEVICES[gpu]
        yield Case(
            f"{workload}, c={concurrency}", device, "qwen3-8b", setting,
            four_gpus(FOUR[setting], device, workload, int(concurrency)), tuple(published),
            fitted=(workload, setting) == CONNECTOR_SETTING, group="table 20",
        )  # fmt: skip
