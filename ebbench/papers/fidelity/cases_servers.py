"""Published measurements of several GPUs, of FP8 and of Gemma, as cases."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

from ebbench.config.topology import parse_topology
from ebbench.papers.eb.disaggregation import FOUR, TWO, four_gpus, two_gpus
from ebbench.papers.fidelity.case import CONNECTOR_SETTING, DEVICES, Case, Published, best_settings, reference_rows
from ebbench.papers.protocols import Protocol, real_protocol
from ebbench.resources import REFERENCE

SILICON = "silicon/vllm_dense.csv"
SILICON_DEVICES = {"h100_sxm": "h100", "h200_sxm": "h200"}
SILICON_MODELS = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-70B": "llama-3.1-70b"}
SILICON_FITTED = ("h100", "qwen3-32b", "4", "1024")  # the points on which the host constants of the H100 are fitted
SILICON_BUDGET, SILICON_SEQS = 8192, 256  # vLLM's defaults for a server on these GPUs; the engine arguments are unknown
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
    return [*silicon(), *table17(), *table19(), *table20()]


def silicon() -> Iterator[Case]:
    """vLLM servers on 1 to 8 GPUs: Qwen3-32B in 16 bits, Llama-3.1-70B in FP8 (aiconfigurator-core's sample).

    Left out: 24 FP8 points of Qwen3-32B and Llama-3.1-8B. At their concurrency and latencies the prompts alone would
    take longer than the run (for Llama-3.1-8B on one H200 95,000 prompt tokens/s, 1.5 of 2.0 PFLOP/s, in addition to
    decoding), so they are not closed loops of one engine.
    """
    for row in reference_rows(SILICON):
        if row["model"] not in SILICON_MODELS or (row["precision"] == "fp8") != (row["model"].endswith("70B")):
            continue
        device, model, tp = SILICON_DEVICES[row["gpu"]], SILICON_MODELS[row["model"]], row["tp"]
        inputs, outputs, concurrency = row["input_tokens"], row["output_tokens"], int(row["concurrency"])
        fp8 = row["precision"] == "fp8"
        source = f"silicon, {'FP8' if fp8 else '16 bits'}, tp={tp}"
        fitted = (device, model, tp, inputs) == SILICON_FITTED
        plan: dict[str, str | int] = {
            "workload": f"{REFERENCE}workloads/silicon-{inputs}-{outputs}.toml",
            "num_prompts": max(ROUNDS * concurrency, 32),
            "max_concurrency": concurrency,
        }
        yield Case(
            f"{inputs} in, {outputs} out, c={concurrency}", device, model, "v1",
            Protocol("v1", plan, SILICON_SEQS, SILICON_BUDGET, warmup=0, topology=parse_topology(f"tp={tp}")),
            (
                Published("tpot_mean_ms", float(row["tpot_ms"]), source),
                Published("ttft_mean_s", float(row["ttft_ms"]) / 1e3, source, False, TTFT_NOTE),
            ),
            fitted=fitted, group="silicon", quantization="fp8" if fp8 else None,
            vllm_version="0.12",
        )  # fmt: skip


def table17() -> Iterator[Case]:
    """Gemma-3-1B-IT on real workloads (table 17); v0 was measured with another code base and is left out."""
    best = best_settings()
    for row in reference_rows("paper_tables/table17_gemma_rps.csv"):
        if row["workload"] == "wildchat":
            continue  # message lengths were not published
        for scheduler in ("v1", "eb"):
            note = NUMINAMATH_NOTE if row["workload"] == "numinamath" else ""
            title = {"sharegpt": "ShareGPT", "longbench": "LongBench", "numinamath": "NuminaMath"}[row["workload"]]
            sizes = best[row["gpu"], "Gemma-3-1B-IT", title, scheduler]
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
        found = cells.setdefault((row["gpu"], row["workload"], row["concurrency"], row["setting"]), [])
        if row["value"]:
            found.append(_published(row["metric"], row["value"], "table 20"))
        elif row["metric"] == "total_tokens_per_s":
            found.append(Published("tokens_per_s", nan, "table 20", False, FAILED_NOTE))
    for (gpu, workload, concurrency, setting), published in cells.items():
        device = DEVICES[gpu]
        yield Case(
            f"{workload}, c={concurrency}", device, "qwen3-8b", setting,
            four_gpus(FOUR[setting], device, workload, int(concurrency)), tuple(published),
            fitted=(workload, setting) == CONNECTOR_SETTING, group="table 20",
        )  # fmt: skip
