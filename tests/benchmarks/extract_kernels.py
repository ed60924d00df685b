"""Builds the packaged kernel tables from published sources: ``python -m tests.benchmarks.extract_kernels --help``.

Needs the extra ``tables`` (aiconfigurator-core) and a checkout of LLMServingSim's profiler output, neither of which is
needed at run time. The tables keep: weights and KV cache in bfloat16 and FP8, no sliding window, a coarser grid of
sizes, attention of the supported models and of their slices on 2, 4 and 8 GPUs, every shape of experts, collectives
inside one server.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbench.devices import library
from ebbench.devices.library import SCHEMAS
from ebbench.devices.profiles import DATA

AIC_COLLECTIVES = (
    f"aiconfigurator-core {library.VERSION}, all-reduce measured under vLLM, all-gather and reduce-scatter under NCCL"
)
SIM_MODELS = {
    ("rtx-pro-6000", "llama-3.1-8b", 32, 8, 128): "RTXPRO6000/meta-llama/Llama-3.1-8B",
    ("rtx-pro-6000", "qwen3-30b-a3b", 32, 4, 128): "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507",
    ("rtx-pro-6000", "qwen3-32b", 64, 8, 128): "RTXPRO6000/Qwen/Qwen3-32B",
    ("rtx-4090", "llama-3.1-8b", 32, 8, 128): "RTX4090/meta-llama/Llama-3.1-8B",
}
GEMM_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
GEMM_MIN_SIZE = 512  # smaller projections do not occur in the supported models
DTYPES = ("bfloat16", "fp8", "fp8_block")
KV_DTYPES = ("bfloat16", "fp8")
GEOMETRIES = tuple(
    (heads, kv, dim)
    for dim, kv, many in (
        (128, 8, (8, 16, 24, 32, 40, 48, 64)),
        (128, 4, (16, 20, 24, 32)),
        (128, 2, (8, 10, 12, 16, 32)),
        (128, 1, (4, 5, 8, 16)),
        (64, 8, (32, 64)),
        (64, 4, (32,)),
        (64, 2, (16, 24)),
        (64, 1, (8,)),
        (256, 1, (4, 8)),
        (256, 4, (16,)),
    )
    for heads in many
)
EXPERT_DTYPES = (*DTYPES, "w4a16_mxfp4", "w4a8_mxfp4_mxfp8")
# Kind of link -> the all-reduce table measured over it, per device. The RTX PRO 6000 was measured in two servers, whose
# tables differ by a factor of 2.5 in bandwidth and 4 in latency: without and with peer access between its GPUs.
COLLECTIVES = {
    "rtx-pro-6000": {"pcie": "0.19.0", "pcie-peer": "0.24.0"},
    "l40s": {"pcie": "0.14.0"},
    "h100": {"nvlink": "0.24.0"},
    "h200": {"nvlink": "0.24.0"},
    "b200": {"nvlink": "0.24.0"},
    "b300": {"nvlink": "0.24.0"},
    "a100": {"nvlink": "0.14.0"},
}
# Kind of link and the NCCL version under which the other collectives were measured.
NCCL = {
    "rtx-pro-6000": ("pcie-peer", "2.29.2"),
    "l40s": ("pcie", "2.27.3"),
    "h100": ("nvlink", "2.29.2"),
    "h200": ("nvlink", "2.29.2"),
    "b200": ("nvlink", "2.29.2"),
    "b300": ("nvlink", "2.29.2"),
    "a100": ("nvlink", "2.27.3"),
}
GROUP_SIZES = (2, 4, 8)
ELEMENT_BYTES = 2  # message_size counts bfloat16 elements
MIXED_CHUNKS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED_CONTEXTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llmservingsim", type=Path, required=True, help="folder holding RTX4090/ and RTXPRO6000/")
    parser.add_argument("--out", type=Path, default=DATA / "kernels")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    systems = _aic_systems()
    versions = f"vLLM {library.VLLM} (A100: {library.VLLM_OF['a100_sxm']})"
    aic = f"{library.LABEL}, tables measured under {versions}"
    sim = "casys-kaist/LLMServingSim, profiled under vLLM 0.19.0 (copyright KAIST CASYS)"
    _write(args.out, "gemm", _gemm(systems), aic, "Apache-2.0")
    _write(args.out, "decode", _decode(systems), aic, "Apache-2.0")
    _write(args.out, "prefill", _fastest(_prefill(systems)), aic, "Apache-2.0")
    _write(args.out, "moe", _fastest(_moe(systems)), aic, "Apache-2.0")
    _write(args.out, "collective", _collectives(systems), AIC_COLLECTIVES, "Apache-2.0")
    _write(args.out, "layer", _layers(args.llmservingsim), sim, "MIT")
    _write(args.out, "mixed", _mixed(args.llmservingsim), sim, "MIT")


def _aic_systems() -> Path:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit("aiconfigurator-core is not installed: pip install 'ebbench[tables]'")
    return Path(spec.origin).parent / "systems" / "data"


def _write(out: Path, kind: str, rows: Iterable[tuple[object, ...]], source: str, licence: str) -> None:
    schema = SCHEMAS[kind]
    columns = list(zip(*sorted(set(rows), key=str), strict=True))
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    order = [(name, "ascending") for name in schema.names if name != "time_us"]
    table = table.sort_by(order).replace_schema_metadata({"source": source, "licence": licence})
    pq.write_table(table, out / f"{kind}.parquet", compression="zstd", compression_level=19)
    print(f"{kind}: {table.num_rows} rows, {(out / f'{kind}.parquet').stat().st_size} bytes")


def _aic_rows(systems: Path, device: str, family: str, name: str, keep: pc.Expression) -> list[dict[str, object]]:
    version = library.VLLM_OF.get(library.SYSTEMS[device], library.VLLM)
    path = systems / library.SYSTEMS[device] / family / "vllm" / version / f"{name}_perf.parquet"
    rows: list[dict[str, object]] = pq.read_table(path).filter(keep).to_pylist()
    return rows


def _us(row: dict[str, object]) -> float:
    return round(float(str(row["latency"])) * 1e3, 3)


def _gemm(systems: Path) -> Iterator[tuple[object, ...]]:
    large = (pc.field("n") >= GEMM_MIN_SIZE) & (pc.field("k") >= GEMM_MIN_SIZE)
    keep = pc.field("gemm_dtype").isin(list(DTYPES)) & large & pc.field("m").isin(list(GEMM_TOKENS))
    for device in COLLECTIVES:
        for row in _aic_rows(systems, device, "gemm", "gemm", keep):
            yield device, row["gemm_dtype"], row["n"], row["k"], row["m"], _us(row)


def _attention(systems: Path, name: str) -> Iterator[tuple[str, dict[str, object]]]:
    types = pc.field("kv_cache_dtype").isin(list(KV_DTYPES))
    for device in COLLECTIVES:
        for row in _aic_rows(systems, device, "attention", name, types):
            geometry = (row["num_heads"], row["num_key_value_heads"], row["head_dim"])
            if geometry in GEOMETRIES and not row.get("window_size", 0):  # older tables only hold full attention
                yield device, row


def _heads(row: dict[str, object]) -> tuple[object, ...]:
    return row["kv_cache_dtype"], row["num_heads"], row["num_key_value_heads"], row["head_dim"]


def _fastest(rows: Iterable[tuple[object, ...]]) -> Iterator[tuple[object, ...]]:
    """Of rows that differ only in their time, which comes last, the fastest: one that was measured twice, or kernels
    among which vLLM chooses."""
    best: dict[tuple[object, ...], float] = {}
    for *key, time_us in rows:
        best[tuple(key)] = min(best.get(tuple(key), float("inf")), float(str(time_us)))
    for columns, fastest_us in best.items():
        yield (*columns, fastest_us)


def _decode(systems: Path) -> Iterator[tuple[object, ...]]:
    for device, row in _attention(systems, "generation_attention"):
        yield (device, *_heads(row), row["batch_size"], int(str(row["step"])) + 1, _us(row))


def _prefill(systems: Path) -> Iterator[tuple[object, ...]]:
    for device, row in _attention(systems, "context_attention"):
        # Blackwell tables list one-token prompts for the decode kernel too; only the prefill kernel is used.
        if "prefill" in str(row["kernel_source"]) or "flash_attn" in str(row["kernel_source"]):
            yield (device, *_heads(row), row["batch_size"], row["isl"], _us(row))


def _moe(systems: Path) -> Iterator[tuple[object, ...]]:
    keep = (
        pc.field("moe_dtype").isin(list(EXPERT_DTYPES))
        & pc.field("moe_tp_size").isin([1, *GROUP_SIZES])
        & pc.field("moe_ep_size").isin([1, *GROUP_SIZES])
        & (pc.field("distribution") == "power_law_1.01")
    )
    names = ("hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size", "num_tokens")
    for device in COLLECTIVES:
        for row in _aic_rows(systems, device, "moe", "moe", keep):
            yield (device, row["moe_dtype"], *(row[name] for name in names), _us(row))


def _collectives(systems: Path) -> Iterator[tuple[object, ...]]:
    """All-reduces as measured in vLLM, all-gathers and reduce-scatters as measured in NCCL."""
    for device, links in COLLECTIVES.items():
        root = systems / library.SYSTEMS[device] / "comm"
        for link, version in links.items():
            for row in _all(root / "vllm" / version / "custom_allreduce_perf.parquet"):
                mode = str(row["backend"]).removeprefix("vllm_")
                yield (device, link, "all_reduce", mode, *_message(row))
        link, version = NCCL[device]
        times_by_size: dict[tuple[object, ...], list[float]] = {}
        for row in _all(root / "nccl" / version / "nccl_perf.parquet"):
            gpus, size, time_us = _message(row)
            if row["nccl_dtype"] == "half" and row["op_name"] in ("all_gather", "reduce_scatter"):
                times_by_size.setdefault((row["op_name"], "eager", gpus, size), []).append(time_us)
        for key, times in times_by_size.items():
            if key[2] in GROUP_SIZES:
                yield device, link, *key, round(sum(times) / len(times), 3)


def _all(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return rows


def _message(row: dict[str, object]) -> tuple[int, int, float]:
    return int(str(row["num_gpus"])), int(str(row["message_size"])) * ELEMENT_BYTES, _us(row)


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _tables(root: Path, folder: str) -> Iterator[tuple[int, Path]]:
    for tp in (1, 2):
        tables = root / folder / "bf16" / f"tp{tp}"
        if tables.is_dir():
            yield tp, tables


def _layers(root: Path) -> Iterator[tuple[object, ...]]:
    for (device, model, *_), folder in SIM_MODELS.items():
        for tp, tables in _tables(root, folder):
            for name, count in (("dense", "tokens"), ("per_sequence", "sequences")):
                for row in _csv(tables / f"{name}.csv"):
                    yield device, model, row["layer"], tp, int(row[count]), float(row["time_us"])


def _mixed(root: Path) -> Iterator[tuple[object, ...]]:
    """Joint attention, also of slices; a slice with the geometry of another model is stored as that model."""
    whole = {(device, *heads) for device, _, *heads in SIM_MODELS}
    for (device, _, heads, kv_heads, head_dim), folder in SIM_MODELS.items():
        for tp, tables in _tables(root, folder):
            geometry = (heads // tp, kv_heads // tp, head_dim)
            if tp > 1 and (device, *geometry) in whole:
                continue
            for row in _csv(tables / "attention.csv"):
                chunk, before, seqs, context = (
                    int(row[c]) for c in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
                )
                if chunk in MIXED_CHUNKS and before in MIXED_CONTEXTS and context in MIXED_CONTEXTS:
                    yield device, *geometry, chunk, before, seqs, context, float(row["time_us"])


if __name__ == "__main__":
    main()
