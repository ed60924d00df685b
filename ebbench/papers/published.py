"""The papers' numbers, read from the bundled reference tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ebbench.devices.profiles import find_profile, list_devices
from ebbench.installation import bundled_dir

MAIN_MODEL = "qwen3-8b"
"""The EB paper's model, where a table or figure of its has one."""
GPUS: Mapping[str, str] = {name: find_profile(name).short_name for name in ("rtx-pro-6000", "h200")}
MODELS: Mapping[str, str] = {
    "qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "gemma-3-1b-it": "Gemma-3-1B-IT",
}  # fmt: skip
WORKLOADS: Mapping[str, str] = {
    "sharegpt": "ShareGPT", "longbench": "LongBench", "wildchat": "WildChat", "numinamath": "NuminaMath",
}  # fmt: skip
SYNTHETIC: Mapping[str, str] = {
    "decode-heavy": "Decode-heavy", "balanced": "Balanced", "prefill-heavy": "Prefill-heavy",
}  # fmt: skip


METRICS: Mapping[str, tuple[str, str, float]] = {
    "rps": ("requests/s", "request_throughput", 1.0), "total_tokens_per_s": ("tokens/s", "total_token_throughput", 1.0),
    "ttft_s": ("TTFT s", "mean_ttft_ms", 1e-3), "ttft_ms": ("TTFT ms", "mean_ttft_ms", 1.0),
    "tpot_ms": ("TPOT ms", "mean_tpot_ms", 1.0),
}  # fmt: skip
"""Figures by their names in the reference tables: title, our key, factor for ours."""


@cache
def rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of a bundled reference CSV: of ``paper_tables`` by its file stem, of another folder as ``folder/stem``."""
    path: Path = bundled_dir("reference") / (f"{name}.csv" if "/" in name else f"paper_tables/{name}.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def gpu_title(device: str) -> str:
    """The papers' name of a device, or its own."""
    return (find_profile(device).short_name or device) if device in list_devices() else device


def model_title(model: str) -> str:
    """The papers' name of a model, or its own."""
    return MODELS.get(model, model)


def pick(name: str, column: str, **where: str) -> float | None:
    """The number in ``column`` of the row whose cells equal ``where``; None if the paper does not have it."""
    for row in rows(name):
        if all(row.get(key) == value for key, value in where.items()):
            text = row.get(column) or ""
            return float(text) if text else None
    return None


def best_sizes(device: str, policy: str, workload: str, model: str) -> tuple[int, int]:
    """Published best (batch size N, token budget B) of tables 14-16, completed where the papers have none.

    ``policy``: v0, v1 or eb; other policies use eb's. A GPU, model or workload without published values uses the
    nearest published cell: RTX PRO 6000, Qwen3-8B, ShareGPT.
    """
    gpu = GPUS.get(device, GPUS["rtx-pro-6000"])
    if workload in SYNTHETIC:
        prefix = "h200" if gpu == GPUS["h200"] else "rtxpro6000"
        where = {"workload": SYNTHETIC[workload], "scheduler": "v1" if policy == "v1" else "eb"}
        sizes = [pick("table16_synthetic_best_config", f"{prefix}_{what}", **where) for what in ("seqs", "tokens")]
    else:
        where = {
            "gpu": gpu, "scheduler": policy if policy in ("v0", "v1") else "eb",
            "workload": WORKLOADS.get(workload, WORKLOADS["sharegpt"]), "model": MODELS.get(model, MODELS["qwen3-8b"]),
        }  # fmt: skip
        table, metrics = "table14_15_best_config_and_sensitivity", ("max_num_seqs", "max_num_batched_tokens")
        sizes = [pick(table, "value", metric=metric, **where) for metric in metrics]
    return int(sizes[0] or (512 if workload in SYNTHETIC else 1024)), int(sizes[1] or 14336)
