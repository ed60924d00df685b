"""Table 6 of the EB paper (appendix A.1): 128K tokens in, 64 out, seven models on one RTX PRO 6000."""

from __future__ import annotations

from collections.abc import Mapping

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels, relative
from ebbench.papers.protocols import Protocol, long_context_protocol, protocol_cells
from ebbench.papers.published import EB_PAPER, GPUS, gpu_title
from ebbench.papers.published import rows as published_rows
from ebbench.papers.table import PaperOptions, PaperTable, Published, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

TABLE = "table6_128k_tokens_per_s"
DEVICE = "rtx-pro-6000"
MODELS: Mapping[str, str] = {
    "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b", "Qwen3-14B": "qwen3-14b", "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Llama-3.1-8B": "llama-3.1-8b", "Mistral-Nemo-12B": "mistral-nemo",
}  # fmt: skip
"""The table's models that have a device here, by their printed names; Llama-3.2-1B has none."""
POLICIES = ("v1", "eb")


def table6_protocol(policy: str, concurrency: int) -> Protocol:
    """A cell: 16 requests, as many open as fit on the GPU without running out of memory (printed)."""
    return long_context_protocol(policy, 131_071, concurrency, max_model_len=163_840)


def _rows(options: PaperOptions) -> list[Mapping[str, str]]:
    wanted = options.models or tuple(MODELS.values())
    return [row for row in published_rows(TABLE) if MODELS.get(row["model"]) in wanted]


def _policies(options: PaperOptions) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*POLICIES, *options.policies)))


def _cell(options: PaperOptions, device: str, row: Mapping[str, str], policy: str) -> RunSpec:
    protocol = table6_protocol(policy, int(row["concurrency"]))
    return protocol_cells(protocol, device, MODELS[row["model"]], options.num_prompts)[0]


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        _cell(options, device, row, policy)
        for device in options.devices or (DEVICE,)
        for row in _rows(options)
        for policy in _policies(options)
    ]


def _section(options: PaperOptions, store: RunStore, device: str) -> Section:
    columns: tuple[Column, ...] = (*labels("model"), Column("open requests"))
    columns += tuple(column for policy in POLICIES for column in compared(policy))
    columns += tuple(Column("ours", group=policy, ours=True) for policy in _policies(options) if policy not in POLICIES)
    columns += (Column("published", "change", "eb over v1"), Column("ours", "change", "eb over v1", ours=True))
    rows = []
    for row in _rows(options):
        found = {policy: store.get(_cell(options, device, row, policy)) for policy in _policies(options)}
        rates = {policy: each.get("total_token_throughput") if each else None for policy, each in found.items()}
        printed = {policy: float(row[policy]) if device == DEVICE else None for policy in POLICIES}
        values: list[Value] = [row["model"], int(row["concurrency"])]
        for policy in POLICIES:
            values += comparison(printed[policy], rates[policy])
        values += [rates[policy] for policy in _policies(options) if policy not in POLICIES]
        rows.append((*values, relative(printed["eb"], printed["v1"]), relative(rates["eb"], rates["v1"])))
    return Section(gpu_title(device), columns, tuple(rows))


def _document(options: PaperOptions, store: RunStore) -> Document:
    devices = options.devices or (DEVICE,)
    notes = (
        f"Published: {EB_PAPER}, table 6 (A.1), {GPUS[DEVICE]}; tokens/s count prompts and answers.",
        "Run as the authors' scripts say: 16 requests of 131,071 tokens, answers of 48 to 80, vLLM's defaults B = 8192 "
        "and N = 1024, EB with a threshold of 0.8. Llama-3.2-1B is not among our models.",
        "Steps of such lengths lie outside the measured kernel tables; attention is extrapolated in the context.",
        *pending(store, _cells(options)),
    )
    sections = tuple(_section(options, store, device) for device in devices)
    return Document("table6", "Table 6: 128K tokens in, 64 out", sections, notes)


TABLE6 = PaperTable(
    "table6", "128K tokens in, 64 out, on one GPU", _cells, _document, ("device", "model", "policy", "num_prompts"),
    whole=False, published_on=Published((DEVICE,), tuple(MODELS.values())),
)  # fmt: skip
