"""Table 4 of the EB paper: WildChat on L40S and B300, the headline of 41.9 %."""

from __future__ import annotations

from dataclasses import replace

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels, relative
from ebbench.devices import load_device
from ebbench.devices.loader import DEFAULT_HOST
from ebbench.devices.table import TableCost
from ebbench.papers.eb.table02 import table2_cell
from ebbench.papers.published import EB_PAPER, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published, figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

DEVICES = ("b300", "l40s")
POLICIES = ("v0", "v1", "eb")
_MODEL, _WORKLOAD = "qwen3-8b", "wildchat"
_METRICS = (
    ("rps", "requests/s", "request_throughput", 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_NOTES = (
    f"Published: {EB_PAPER}, table 4: WildChat at concurrency 2048, each scheduler at its best of a grid; v0 does not "
    "run on B300. The model is not named in the paper; the authors' README has Qwen3-8B.",
    "Ours: engine sim at the sizes published for RTX PRO 6000 and Qwen3-8B (tables 14 and 15), settings as in table 2.",
    "The printed L40S cells of v1 and EB equal the prefill-heavy bars of the RTX PRO 6000 in figure 4 (10.36 and 14.7 "
    "requests/s, TTFT 132.5 and 92.2 s), although the lengths and the GPU differ.",
    "The headline of 41.9 % on L40S is not reproduced. Our L40S has no mixed attention of its own: it takes the ratio "
    "of mixed to pure decode measured on the RTX 4090.",
    "The printed L40S row does not fit our lengths (1,665 prompt and 194 answer tokens on average): at 14.7 requests/s "
    "their matrix products take 380 TFLOPS of 362, and by Little's law 14.7 x 0.138 s x 194 = 394 requests decode at "
    "once, of which the KV cache of 173,200 tokens holds 93. So prompts were shorter, or the model was smaller.",
)
_WHAT_IF_NOTES = (
    "Factor: on what a mixed attention call costs beyond its pure parts; 1 is the RTX 4090's ratio as measured. Decode "
    "beside a prompt: attention time of 128 decodes of 1,024 tokens beside a prompt chunk of 1,024, over their time "
    "alone; measured on the other two GPUs (the RTX PRO 6000's with its fitted factor of 1.37).",
)
WHAT_IF_DEVICE = "l40s"
FACTORS = (1.0, 2.0, 4.0, 8.0)
_MEASURED_MIXED = ("rtx-pro-6000", "rtx-4090")
_CHUNK, _SEQS, _CONTEXT = 1024, 128, 1024


def _cell(options: PaperOptions, device: str, policy: str) -> RunSpec:
    return table2_cell(options, device, options.model(_MODEL), _WORKLOAD, policy)


def _with_factor(options: PaperOptions, policy: str, factor: float) -> RunSpec:
    """The cell on L40S with ``factor`` times the excess cost of mixed attention."""
    cell = _cell(options, WHAT_IF_DEVICE, policy)
    return cell if factor == 1.0 else replace(cell, host=replace(DEFAULT_HOST, mixed_excess=factor))


def _factors(options: PaperOptions) -> tuple[float, ...]:
    return FACTORS if WHAT_IF_DEVICE in (options.devices or DEVICES) else ()


def _cells(options: PaperOptions) -> list[RunSpec]:
    own = [_cell(options, device, policy) for device in options.devices or DEVICES for policy in POLICIES]
    return list(dict.fromkeys([*own, *(_with_factor(options, p, f) for f in _factors(options) for p in POLICIES[1:])]))


def _rows(options: PaperOptions, store: RunStore, device: str) -> list[tuple[Value, ...]]:
    gpu = gpu_title(device)
    as_published = options.model(_MODEL) == _MODEL
    rows = []
    for column, title, key, scale in _METRICS:
        published, ours = {}, {}
        for policy in POLICIES:
            ours[policy] = figure(store, _cell(options, device, policy), key, scale)
            printed = pick("table4_gpus_wildchat", column, gpu=gpu, scheduler=policy)
            published[policy] = printed if as_published else None
        row: list[Value] = [gpu, title]
        for policy in POLICIES:
            row += comparison(published[policy], ours[policy])
        rows.append((*row, relative(published["eb"], published["v1"]), relative(ours["eb"], ours["v1"])))
    return rows


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns = labels("GPU", "metric")
    for policy in POLICIES:
        columns += compared(policy)
    columns += (Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))
    rows = [row for device in options.devices or DEVICES for row in _rows(options, store, device)]
    sections = [Section("", columns, tuple(rows))]
    notes: tuple[str, ...] = _NOTES
    if _factors(options):
        sections.append(_what_if(options, store))
        notes += _WHAT_IF_NOTES
    notes += pending(store, _cells(options))
    return Document("table4", "Table 4: WildChat on further GPUs", tuple(sections), notes)


def _what_if(options: PaperOptions, store: RunStore) -> Section:
    """What the L40S's mixed attention would have to cost for the published gain."""
    columns = (
        *labels("GPU"), Column("factor"), Column("decode beside a prompt", show=lambda ratio: f"{ratio:.1f} x"),
        Column("v1 req/s", ours=True), Column("eb req/s", ours=True), Column("eb vs v1", "change", ours=True),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for factor in _factors(options):
        rates = {p: figure(store, _with_factor(options, p, factor), "request_throughput") for p in POLICIES[1:]}
        ratio = beside_a_prompt(WHAT_IF_DEVICE, options.model(_MODEL), factor)
        gain = relative(rates["eb"], rates["v1"])
        rows.append((gpu_title(WHAT_IF_DEVICE), factor, ratio, rates["v1"], rates["eb"], gain))
    for device in _MEASURED_MIXED:
        rows.append((gpu_title(device), None, beside_a_prompt(device, options.model(_MODEL)), None, None, None))
    return Section("What mixed attention would have to cost on L40S", columns, tuple(rows))


def beside_a_prompt(device: str, model: str, factor: float | None = None) -> float | None:
    """Attention time of decodes beside a prompt over their time alone, with ``factor`` instead of the device's own."""
    host = None if factor is None else replace(DEFAULT_HOST, mixed_excess=factor)
    cost = load_device(device, model, host=host, kv_tokens=_SEQS * _CONTEXT).cost
    if not isinstance(cost, TableCost):
        return None
    ((_, tables),) = cost.attention  # one kind of layer
    return float(tables.increment.at4(_CHUNK, 0, _SEQS, _CONTEXT) / tables.decode.at2(_SEQS, _CONTEXT))


TABLE4 = PaperTable(
    "table4", "WildChat on L40S and B300", _cells, _document, ("device", "model", "num_prompts", "outputs"),
    published_on=Published(DEVICES, (_MODEL,)),
)  # fmt: skip
