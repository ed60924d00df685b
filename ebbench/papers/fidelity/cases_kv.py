"""KV cache memory that vLLM servers printed at their start, against ours (``reports/reference/kv_cache``).

The GPU's memory is the one printed, so that only the estimate of what vLLM takes before the KV cache is scored.
"""

from __future__ import annotations

from ebbench.devices.base import Parallel, start_up
from ebbench.devices.capacity import in_flight_tokens, kv_capacity_tokens
from ebbench.devices.geometry import kv_layout
from ebbench.devices.profiles import DeviceProfile, find_model
from ebbench.papers.fidelity.case import reference_rows
from ebbench.papers.fidelity.scores import PublishedFigure

STARTS = "kv_cache/starts.csv"
SOURCE = "KV cache at the start"


def kv_cells() -> list[PublishedFigure]:
    """One figure per start: GiB of KV cache per GPU, by GPU, version and share of the memory.

    ``fitted``: a size in ``devices.startup`` or ``devices.capacity`` was set on it.
    """
    return [
        PublishedFigure(
            SOURCE, "several", row["model"], _name(row), "v1", "kv_gib", float(row["kv_gib"]), kv_gib(row),
            fitted=row["used"] == "yes",
        )
        for row in reference_rows(STARTS)
    ]  # fmt: skip


def _name(row: dict[str, str]) -> str:
    return f"{row['gpu']}, tp={row['tp']}, vLLM {row['vllm']}, {row['utilization']}"


def kv_gib(row: dict[str, str]) -> float:
    """Our estimate for a start of the table, in GiB per GPU."""
    memory_bytes = int(float(row["memory_gib"]) * 2**30)
    gpu = DeviceProfile(row["gpu"], row["gpu"], memory_bytes, 1.0, 1.0, "printed at the start")  # rates are not used
    model, tp = find_model(row["model"]), int(row["tp"])
    budget = int(row["max_num_batched_tokens"])
    tokens = kv_capacity_tokens(
        gpu, model, start_up(row["rules"]), parallel=Parallel(tp=tp),
        gpu_memory_utilization=float(row["utilization"]), max_num_seqs=int(row["max_num_seqs"]),
        max_num_batched_tokens=budget, eager=row["eager"] == "yes",
    )  # fmt: skip
    part = model.sliced(tp)
    layout = kv_layout(part, in_flight_tokens(budget, async_scheduling=True))
    kept = tokens * part.kv_bytes_per_token if layout is None else layout.blocks_of(tokens) * layout.block_bytes
    return kept / 2**30
