"""The interference convexity index of the EB paper (appendix A.3): from published times and costs, and from ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.papers.eb.figure01 import CONTEXT_TOKENS, FIGURE1_MODEL
from ebbench.papers.eb.kernel_parts import GPUS, composed, step_parts, table_cost_of
from ebbench.papers.published import EB_PAPER, gpu_title, rows
from ebbench.papers.table import PaperOptions, PaperTable, Published, no_cells
from ebbench.runs.store import RunStore

TOKENS = 4096
SHARES = tuple(round(0.1 * i, 1) for i in range(11))
_NOTES = (
    f"{EB_PAPER}, appendix A.3: the quadratic coefficient of a step's kernel time over the decode share r at "
    f"{TOKENS:,} tokens, over the time of a pure decode step; negative is concave. The text's two values (Qwen3-4B) "
    "are not legible in our copy; it calls both negative, the RTX PRO 6000's more so, and says that more negative "
    "favours EB.",
    "Over all steps, ours and the published step times are negative as in the text. But the published costs of mixed "
    "batches with which EB+ runs are positive, the RTX PRO 6000's too, although the text has them follow from this "
    "index (appendix A.4): they curve the other way.",
    "The index hangs on the pure steps, from which mixed ones are set off: over mixed steps alone it is about zero for "
    "the published step times and positive for ours on H200.",
    "Ours: GPU time from kernel tables. A mixed attention call on H200 was not measured; there it is a fitted "
    "multiple of the pure decode cost.",
)


def convexity_index(shares: Sequence[float], times: Sequence[float], decode: float) -> float:
    """Quadratic coefficient of ``times`` over ``shares`` by least squares, over the time ``decode`` of a pure decode
    step."""
    return float(np.polyfit(np.asarray(shares, float), np.asarray(times, float), 2)[0] / decode)


def _indices(times: Mapping[float, float]) -> tuple[float, float]:
    """The index over mixed steps alone, and with both pure steps (shares 0 and 1) among the points."""
    mixed = {share: time for share, time in times.items() if 0.0 < share < 1.0}
    alone, together = (convexity_index(list(each), list(each.values()), times[1.0]) for each in (mixed, times))
    return alone, together


def _ours(device: str, model: str) -> list[tuple[Value, ...]]:
    cost = table_cost_of(device, model)
    parts = {r: step_parts(cost, composed(TOKENS, r, CONTEXT_TOKENS)) for r in SHARES}
    gpu, source = gpu_title(device), f"ours, context {CONTEXT_TOKENS}"
    return [
        (gpu, model, f"{source}: kernels of a step", *_indices({r: sum(part) for r, part in parts.items()})),
        (gpu, model, f"{source}: attention alone", *_indices({r: part.attention_s for r, part in parts.items()})),
    ]


def _step_times() -> tuple[Value, ...]:
    """The published step times of 4,096 tokens; their GPU is in doubt."""
    times = {}
    for row in rows("iteration_time_qwen3_4b", "eb_vllm"):
        decodes = int(row["num_decode"])
        if decodes + int(row["num_prefill"]) * int(row["prefill_tokens"]) == TOKENS:
            times[decodes / TOKENS] = float(row["mean_ms"])
    return "Blackwell by name, H200 by slope", "qwen3-4b", "published step times, eager, context 32", *_indices(times)


def _mixed_costs() -> list[tuple[Value, ...]]:
    found: list[tuple[Value, ...]] = []
    for row in rows("beta_mb", "eb_vllm"):
        gpu = gpu_title("h200" if "H200" in row["device_name"] else "rtx-pro-6000")
        a, b, c = (float(row[f"{name}_s_per_token"]) for name in "abc")
        found.append((gpu, "qwen3-8b", "published cost of mixed batches, v1 runs", c / (a + b + c), None))
    return found


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns = (
        *labels("GPU", "model", "from"),
        *(
            Column(name, group="index over", show=lambda index: f"{index:+.2f}")
            for name in ("mixed steps", "all steps")
        ),
    )
    model = options.model(FIGURE1_MODEL)
    ours = [row for device in options.devices or GPUS for row in _ours(device, model)]
    table = (_step_times(), *_mixed_costs(), *ours)
    return Document("kappa", "Convexity index of mixed batches (appendix A.3)", (Section("", columns, table),), _NOTES)


KAPPA = PaperTable(
    "kappa", "convexity index of mixed batches", no_cells, _document, ("device", "model"),
    published_on=Published(GPUS, (FIGURE1_MODEL,)),
)  # fmt: skip
