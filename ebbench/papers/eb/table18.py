"""Table 18 of the EB paper: joint TTFT and TPOT attainment at concurrency 512, for any targets."""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels
from ebbench.analysis.phases import Surface, run_surfaces
from ebbench.papers.eb.table03 import table3_cells
from ebbench.papers.published import EB_PAPER, MAIN_MODEL, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

TTFT_S = (2.0, 5.0, 10.0)
TPOT_MS = (50.0, 100.0)
_RANKS = ("strict", "relaxed")
_POLICIES = ("v1", "eb", "ebplus")
_NOTES = (
    f"Published: {EB_PAPER}, table 18; per cent of requests that meet both targets, Qwen3-8B, mean 512 in and 256 out "
    "at concurrency 512 (B = 14336, N = 1024).",
    "Of the targets only TTFT 10 s with TPOT 100 ms is legible in our copy of the paper; 2 s, 5 s and 50 ms are "
    "assumed. --ttft and --tpot take any others.",
)


def _devices(options: PaperOptions) -> tuple[str, ...]:
    return options.devices or ("rtx-pro-6000",)


def _policies(options: PaperOptions) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_POLICIES, *options.policies)))


def _cell(options: PaperOptions, device: str, model: str, policy: str) -> RunSpec:
    return table3_cells(options, device, model, "c=512", policy)[0]


def _models(options: PaperOptions) -> tuple[str, ...]:
    return options.models or ("qwen3-8b",)


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [_cell(options, d, m, p) for d in _devices(options) for m in _models(options) for p in _policies(options)]


def _surface(store: RunStore, cell: RunSpec, ttft_ms: list[float], tpot_ms: list[float]) -> Surface | None:
    found = store.get(cell)
    return None if found is None else run_surfaces(found.run, ttft_ms, tpot_ms)[0]


def _published(options: PaperOptions, row: int, column: int, policy: str, device: str, model: str) -> float | None:
    """The published share in per cent, if row and column belong to the published grid."""
    as_published = not options.ttft_s and not options.tpot_ms and device == "rtx-pro-6000" and model == "qwen3-8b"
    if not as_published or policy not in _POLICIES:
        return None
    where = {"ttft_target": str(row + 1), "tpot_target_rank": _RANKS[column]}
    return pick("table18_goodput_percent", policy, **where)


def _section(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    ttft_s, tpot_ms = sorted(options.ttft_s or TTFT_S), sorted(options.tpot_ms or TPOT_MS)
    columns = labels("TTFT ≤", "TPOT ≤")
    surfaces = {}
    for policy in _policies(options):
        columns += compared(policy, points=True) if policy in _POLICIES else (Column("ours", group=policy, ours=True),)
        surfaces[policy] = _surface(store, _cell(options, device, model, policy), [1e3 * t for t in ttft_s], tpot_ms)
    rows = []
    for i, ttft in enumerate(ttft_s):
        for j, tpot in enumerate(tpot_ms):
            row: list[Value] = [f"{ttft:g} s", f"{tpot:g} ms"]
            for policy, found in surfaces.items():
                ours = None if found is None else 100 * found.attainment[i][j]
                published = _published(options, i, j, policy, device, model)
                row += comparison(published, ours, points=True) if policy in _POLICIES else (ours,)
            rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {model}", columns, tuple(rows))


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = [_section(options, store, device, model) for device in _devices(options) for model in _models(options)]
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("table18", "Table 18: SLO attainment in per cent", tuple(sections), notes)


TABLE18 = PaperTable(
    "table18", "SLO attainment over TTFT and TPOT targets", _cells, _document,
    ("device", "model", "policy", "num_prompts", "ttft", "tpot"),
    published_on=Published(("rtx-pro-6000",), (MAIN_MODEL,)),
)  # fmt: skip
