"""128K tokens in, 64 out, on two GPUs at the concurrency that fits into memory; table 6 of the EB paper has one GPU."""

from __future__ import annotations

from functools import cache

from ebbench.analysis.documents import Column, Document, Section, Value, labels, relative
from ebbench.config.topology import DECODE_UTILIZATION, PoolSpec
from ebbench.devices.loader import unit_device
from ebbench.errors import UsageError
from ebbench.papers.eb.table19_20 import value_or_oom
from ebbench.papers.protocols import ASYNC_SCHEDULING, VLLM
from ebbench.papers.published import GPUS, gpu_title, model_title
from ebbench.papers.table import PaperOptions, PaperTable, Published, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

INPUT, OUTPUT = 131_072, 64
BUDGET, SEQS = 8192, 256
MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b", "llama-3.1-8b")
_KINDS = {
    "v1": ("dp=2", "v1"),
    "eb": ("dp=2", "eb"),
    "ebplus": ("dp=2", "ebplus"),
    "1P+1D": ("1p1d", "v1"),
}
_METRICS = {"out tok/s": ("output_throughput", 1.0), "TTFT s": ("mean_ttft_ms", 1e-3), "TPOT ms": ("mean_tpot_ms", 1.0)}


@cache
def concurrency(device: str, model: str) -> int | None:
    """Number of requests that one GPU's KV cache holds; None if it holds none."""
    from ebbench.devices import load_device

    try:
        loaded = load_device(device, model, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, vllm_version=VLLM)
    except UsageError:
        return None
    return loaded.kv_capacity_tokens // (INPUT + OUTPUT) or None


@cache
def _fits_decode(device: str, model: str) -> bool:
    """Whether a decode GPU, which reserves memory for received KV, holds one request."""
    from ebbench.devices import load_device

    loaded = load_device(device, model, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, vllm_version=VLLM)
    try:
        unit = unit_device(loaded, PoolSpec(), DECODE_UTILIZATION, SEQS, BUDGET)
    except UsageError:
        return False
    return unit.device.kv_capacity_tokens >= INPUT + OUTPUT


def _cell(options: PaperOptions, device: str, model: str, kind: str) -> RunSpec | None:
    held = concurrency(device, model)
    if held is None:
        return None
    topology, policy = _KINDS[kind]
    if topology == "1p1d" and not _fits_decode(device, model):
        return None
    return simulated(
        "balanced", policy, device, model, SEQS, BUDGET, topology=topology, num_prompts=options.num_prompts or 120,
        max_concurrency=2 * held, input_len=INPUT, output_len=OUTPUT, length_distribution="fixed",
        max_model_len=INPUT + OUTPUT, async_scheduling=ASYNC_SCHEDULING, vllm_version=VLLM,
    )  # fmt: skip


def _pairs(options: PaperOptions) -> list[tuple[str, str]]:
    return [(device, model) for device in options.devices or tuple(GPUS) for model in options.models or MODELS]


def _cells(options: PaperOptions) -> list[RunSpec]:
    found = [_cell(options, device, model, kind) for device, model in _pairs(options) for kind in _KINDS]
    return [cell for cell in found if cell is not None]


def _section(options: PaperOptions, store: RunStore, device: str) -> Section:
    columns = (*labels("model"), Column("requests per GPU"))
    for name in _METRICS:
        columns += tuple(Column(kind, group=name, ours=True) for kind in _KINDS)
    columns += (Column("eb vs v1", "change", ours=True), Column("ebplus vs v1", "change", ours=True))
    rows = []
    for model in (model for where, model in _pairs(options) if where == device):
        row: list[Value] = [model_title(model), concurrency(device, model)]
        rates: dict[str, Value] = {}
        for name, (key, scale) in _METRICS.items():
            for kind in _KINDS:
                cell = _cell(options, device, model, kind)
                value = "does not fit" if cell is None else value_or_oom(store.get(cell), key, scale)
                row.append(value)
                if name == "out tok/s":
                    rates[kind] = value
        row += [_change(rates["eb"], rates["v1"]), _change(rates["ebplus"], rates["v1"])]
        rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, two GPUs", columns, tuple(rows))


def _change(value: Value, base: Value) -> float | None:
    return relative(value, base) if isinstance(value, float) and isinstance(base, float) else None


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = tuple(_section(options, store, device) for device in dict.fromkeys(d for d, _ in _pairs(options)))
    notes = (
        "What the EB paper prints for one GPU stands in table6.",
        f"Ours: {INPUT:,} tokens in, {OUTPUT} out, chunks of {BUDGET:,}, a closed loop of as many requests as the KV "
        "cache of both GPUs holds (per GPU in the table), 120 requests. DP=2 under three policies, and 1P+1D under v1.",
        "Steps of such lengths lie outside the measured kernel tables; attention is extrapolated in the context.",
        *_findings(sections),
        *pending(store, _cells(options)),
    )
    return Document("long-context", "128K in, 64 out", sections, notes)


def _findings(sections: tuple[Section, ...]) -> tuple[str, ...]:
    """On how many models EB is ahead of v1, and by how much."""
    remarks = []
    for section in sections:
        changes = [value for row in section.rows if isinstance(value := row[-2], float)]
        if changes:
            ahead = sum(change > 0 for change in changes)
            remarks.append(
                f"{section.title}: EB has more throughput than v1 on {ahead} of {len(changes)} models, by "
                f"{100 * min(changes):+.1f} to {100 * max(changes):+.1f} %. Exclusive steps halve the time per token, "
                "which here is nearly all prompts of others, and double the wait for the first; prompts are almost all "
                "of the work, so throughput hardly depends on how steps are put together. Pools halve it: the decode "
                "GPU has next to nothing to do."
            )
    return tuple(remarks)


LONG_CONTEXT = PaperTable(
    "long-context", "128K in, 64 out", _cells, _document, ("device", "model", "num_prompts"), whole=False,
    published_on=Published(tuple(GPUS), MODELS),
)  # fmt: skip
