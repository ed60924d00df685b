"""Build the packaged kernel tables from their published sources: ``python -m ebbench.devices.extract --help``.

Needs the extra ``tables`` (aiconfigurator-core) and a checkout of LLMServingSim's profiler output; neither is
needed at run time. What is kept: bfloat16, one GPU, no sliding window, a thinned grid of sizes.
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

from ebbench.devices.kerneltables import SCHEMAS

AIC_VERSION = "0.12.0"
AIC_SYSTEMS = {
    "rtx-pro-6000": "rtx_pro_6000_server",
    "l40s": "l40s",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b300": "b300_sxm",
}
AIC_VLLM = "0.24.0"
SIM_MODELS = {
    ("rtx-pro-6000", "llama-3.1-8b", 32, 8, 128): "RTXPRO6000/meta-llama/Llama-3.1-8B",
    ("rtx-pro-6000", "qwen3-30b-a3b", 32, 4, 128): "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507",
    ("rtx-pro-6000", "qwen3-32b", 64, 8, 128): "RTXPRO6000/Qwen/Qwen3-32B",
    ("rtx-4090", "llama-3.1-8b", 32, 8, 128): "RTX4090/meta-llama/Llama-3.1-8B",
}
GEMM_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
GEMM_MIN_SIZE = 512  # smaller projections do not occur in the models served here
GEOMETRIES = tuple(
    (heads, kv, dim)
    for dim, kv, many in (
        (128, 8, (8, 16, 24, 32, 40, 48, 64)),
        (128, 4, (16, 24, 32)),
        (128, 2, (12, 16)),
        (64, 8, (32, 64)),
        (64, 2, (16, 24)),
        (256, 1, (4, 8)),
        (256, 4, (16,)),
    )
    for heads in many
)
MIXED_CHUNKS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED_CONTEXTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llmservingsim", type=Path, required=True, help="folder holding RTX4090/ and RTXPRO6000/")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "kernels")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    systems = _aic_systems()
    aic = f"aiconfigurator-core {AIC_VERSION}, tables measured under vLLM {AIC_VLLM}"
    sim = "casys-kaist/LLMServingSim, profiled under vLLM 0.19.0 (copyright KAIST CASYS)"
    _write(args.out, "gemm", _gemm(systems), aic, "Apache-2.0")
    _write(args.out, "decode", _decode(systems), aic, "Apache-2.0")
    _write(args.out, "prefill", _prefill(systems), aic, "Apache-2.0")
    _write(args.out, "moe", _moe(systems), aic, "Apache-2.0")
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
    path = systems / AIC_SYSTEMS[device] / family / "vllm" / AIC_VLLM / f"{name}_perf.parquet"
    rows: list[dict[str, object]] = pq.read_table(path).filter(keep).to_pylist()
    return rows


def _us(row: dict[str, object]) -> float:
    return round(float(str(row["latency"])) * 1e3, 3)


def _gemm(systems: Path) -> Iterator[tuple[object, ...]]:
    large = (pc.field("n") >= GEMM_MIN_SIZE) & (pc.field("k") >= GEMM_MIN_SIZE)
    keep = (pc.field("gemm_dtype") == "bfloat16") & large & pc.field("m").isin(list(GEMM_TOKENS))
    for device in AIC_SYSTEMS:
        for row in _aic_rows(systems, device, "gemm", "gemm", keep):
            yield device, row["n"], row["k"], row["m"], _us(row)


def _attention(systems: Path, name: str) -> Iterator[tuple[str, dict[str, object]]]:
    plain = (pc.field("kv_cache_dtype") == "bfloat16") & (pc.field("window_size") == 0)
    for device in AIC_SYSTEMS:
        for row in _aic_rows(systems, device, "attention", name, plain):
            if (row["num_heads"], row["num_key_value_heads"], row["head_dim"]) in GEOMETRIES:
                yield device, row


def _decode(systems: Path) -> Iterator[tuple[object, ...]]:
    for device, row in _attention(systems, "generation_attention"):
        context = int(str(row["step"])) + 1
        yield (
            device,
            row["num_heads"],
            row["num_key_value_heads"],
            row["head_dim"],
            row["batch_size"],
            context,
            _us(row),
        )


def _prefill(systems: Path) -> Iterator[tuple[object, ...]]:
    for device, row in _attention(systems, "context_attention"):
        # Blackwell tables list one-token prompts under the decode kernel as well; the prefill kernel is meant.
        if "prefill" in str(row["kernel_source"]) or "flash_attn" in str(row["kernel_source"]):
            yield (
                device,
                row["num_heads"],
                row["num_key_value_heads"],
                row["head_dim"],
                row["batch_size"],
                row["isl"],
                _us(row),
            )


def _moe(systems: Path) -> Iterator[tuple[object, ...]]:
    keep = (
        (pc.field("moe_dtype") == "bfloat16")
        & (pc.field("moe_tp_size") == 1)
        & (pc.field("moe_ep_size") == 1)
        & (pc.field("distribution") == "power_law_1.01")
    )
    for device in AIC_SYSTEMS:
        best: dict[tuple[object, ...], float] = {}
        for row in _aic_rows(systems, device, "moe", "moe", keep):
            key = tuple(row[c] for c in ("hidden_size", "inter_size", "num_experts", "topk", "num_tokens"))
            best[key] = min(best.get(key, float("inf")), _us(row))
        for key, time_us in best.items():
            yield (device, *key, time_us)


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _layers(root: Path) -> Iterator[tuple[object, ...]]:
    for (device, model, *_), folder in SIM_MODELS.items():
        tables = root / folder / "bf16" / "tp1"
        for row in _csv(tables / "dense.csv"):
            yield device, model, row["layer"], int(row["tokens"]), float(row["time_us"])
        for row in _csv(tables / "per_sequence.csv"):
            yield device, model, row["layer"], int(row["sequences"]), float(row["time_us"])


def _mixed(root: Path) -> Iterator[tuple[object, ...]]:
    for (device, _, heads, kv_heads, head_dim), folder in SIM_MODELS.items():
        for row in _csv(root / folder / "bf16" / "tp1" / "attention.csv"):
            chunk, before, seqs, context = (
                int(row[c]) for c in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            )
            if chunk in MIXED_CHUNKS and before in MIXED_CONTEXTS and context in MIXED_CONTEXTS:
                yield device, heads, kv_heads, head_dim, chunk, before, seqs, context, float(row["time_us"])


if __name__ == "__main__":
    main()
