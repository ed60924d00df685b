"""KV caches that vLLM servers printed at their start, against ours (``reports/reference/kv_cache``).

Their memory: the GPU's is the one printed, so that only the estimate of what vLLM takes before the KV cache is scored.
Their tokens: of the memory printed, so that only the layout of the cache is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices.base import Parallel, quantised, start_up
from ebbench.devices.capacity import kv_capacity_tokens, layout_with
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.profiles import DeviceProfile, find_model
from ebbench.installation import bundled_dir
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.published import rows

STARTS, TOKENS = "kv_cache/starts", "kv_cache/tokens"
MODELS = bundled_dir("reference") / "kv_cache" / "models"
SOURCE, LAYOUTS = "KV cache at the start", "KV cache in tokens"


def kv_cells() -> list[PublishedFigure]:
    """One figure per start: GiB of KV cache per GPU, by GPU, version and share of the memory.

    ``fitted``: a size in ``devices.capacity`` was set on it.
    """
    return [
        PublishedFigure(
            SOURCE, "several", row["model"], f"{row['gpu']}, tp={row['tp']}, vLLM {row['vllm']}, {row['utilization']}",
            "v1", "kv_gib", float(row["kv_gib"]), kv_gib(row), fitted=row["used"] == "yes",
        )
        for row in rows(STARTS)
    ] + [
        PublishedFigure(
            LAYOUTS, "several", row["model"], _tokens_name(row), "v1", "kv_tokens", float(row["tokens"]),
            kv_tokens(row),
        )
        for row in rows(TOKENS)
    ]  # fmt: skip


def _tokens_name(row: Mapping[str, str]) -> str:
    version = row["vllm"] and f", vLLM {row['vllm']}"
    return f"{row['gpu']}, tp={row['tp']}{version}, {row['kv_gib']} GiB, KV {row['kv_cache_dtype']}"


def _model(name: str) -> ModelGeometry:
    stored = MODELS / name
    return find_model(str(stored) if stored.is_dir() else name)


def kv_tokens(row: Mapping[str, str]) -> float:
    """Tokens of the printed memory by our layout, as vLLM counts them."""
    model = replace(_model(row["model"]), positions=int(row["max_model_len"]))
    model = quantised(model, None, row["kv_cache_dtype"]).with_drafter(int(row["drafter_layers"]))
    parallel = Parallel(tp=int(row["tp"]))
    layout = layout_with(
        model, parallel, int(row["max_num_batched_tokens"]), row["vllm"] or DEFAULT_VLLM,
        prefix_caching=row["prefix_caching"] == "yes",
    )  # fmt: skip
    memory_bytes = float(row["kv_gib"]) * 2**30
    if layout is None:
        return memory_bytes / model.sliced(parallel.tp).kv_bytes_per_token
    return layout.tokens_of(int(memory_bytes // layout.block_bytes))


def kv_gib(row: Mapping[str, str]) -> float:
    """Our estimate for a start of the table, in GiB per GPU."""
    memory_bytes = int(float(row["memory_gib"]) * 2**30)
    gpu = DeviceProfile(row["gpu"], row["gpu"], memory_bytes, 1.0, 1.0, "printed at the start")  # rates are not used
    model, tp = _model(row["model"]), int(row["tp"])
    budget = int(row["max_num_batched_tokens"])
    layout = layout_with(model, Parallel(tp=tp), budget, row["vllm"].split()[0])
    tokens = kv_capacity_tokens(
        gpu, model, start_up(row["rules"]), parallel=Parallel(tp=tp), layout=layout,
        gpu_memory_utilization=float(row["utilization"]), max_num_seqs=int(row["max_num_seqs"]),
        max_num_batched_tokens=budget, eager=row["eager"] == "yes",
    )  # fmt: skip
    part = model.sliced(tp)
    kept = tokens * part.kv_bytes_per_token if layout is None else layout.blocks_of(tokens) * layout.block_bytes
    return kept / 2**30
