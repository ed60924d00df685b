"""Table 1 of the EB paper: the four GPUs' bandwidth and arithmetic, beside the device profiles. It needs no runs."""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels
from ebbench.devices.profiles import find_profile
from ebbench.papers.published import EB_PAPER, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

DEVICES = ("b300", "h200", "rtx-pro-6000", "l40s")
_TABLE = "table1_gpus"
_NOTES = (
    f"Published: {EB_PAPER}, table 1. Ours: the device profiles, whose arithmetic is the data sheet's for dense "
    "products in BF16 with sums in FP32.",
    "The printed rates are not of one kind: those of B300 and H200 are twice the dense ones (with 2:4 sparsity), the "
    "L40S's is the dense one, the RTX PRO 6000's half of it. Dense throughout, FLOP/B is 281, 206, 281 and 419: the "
    "RTX PRO 6000 is then not the GPU with the least arithmetic per byte.",
)


def _cells(options: PaperOptions) -> list[RunSpec]:
    return []


def _row(device: str) -> tuple[Value, ...]:
    profile, gpu = find_profile(device), gpu_title(device)
    bandwidth, rate = profile.bandwidth_bytes_per_s, profile.bf16_flops_per_s
    row: list[Value] = [gpu]
    for column, ours in (
        ("bandwidth_tb_per_s", bandwidth / 1e12), ("fp16_tflops", rate / 1e12), ("flop_per_byte", rate / bandwidth),
    ):  # fmt: skip
        row += comparison(pick(_TABLE, column, gpu=gpu), ours)
    return tuple(row)


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns: tuple[Column, ...] = labels("GPU")
    for title in ("TB/s", "16-bit TFLOPS", "FLOP/B"):
        columns += compared(title)
    rows = tuple(_row(device) for device in options.devices or DEVICES)
    return Document("eb-table1", "Table 1: GPUs of the EB paper", (Section("", columns, rows),), _NOTES)


TABLE1 = PaperTable(
    "eb-table1",
    "bandwidth and arithmetic of the EB paper's GPUs",
    _cells,
    _document,
    ("device",),
    aliases=("table1", "1"),
    published_on=Published(DEVICES, ()),
)
