"""Decode units of Tian et al. (2025): the spread of KV over them, and the gain from balancing it (figures 7 and 8)."""

from __future__ import annotations

from typing import Any

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.papers.options import PaperOptions
from ebbench.papers.staggered.prefill import MODEL, TOPOLOGIES, UNIT, deployed
from ebbench.papers.table import PaperTable, Sections, changes, figure, ours
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

# Figures 7 and 8 of the staggered paper: spread of KV over decode units, and the gain from balancing it.

BATCH = 35  # sequences per decode unit, published
CHUNK = 16384
_WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "geometric": ("balanced", {"input_len": 1000, "output_len": 1500, "length_distribution": "geometric"}),
    "heavy-tailed": ("reference:workloads/heavy-tailed-chat.toml", {}),
}
_DISPATCH = {
    "round-robin": "immediate",
    "power-of-two": "immediate",
    "least-outstanding": "immediate",
    "iqr": "Algorithm 3",
    "iqr:window=off": "Algorithm 3, each request as it arrives (ours)",
}
_BASE = "round-robin"
_PUBLISHED = {"round-robin": (40_000.0, 130_000.0, 150_000.0), "iqr": (60_000.0, 100_000.0, None)}
_GAIN = {"iqr": 0.15}
"""Published gain in decode throughput, the whole of figure 8."""


def _cell(options: PaperOptions, lengths: str, dispatch: str) -> RunSpec:
    workload, plan = _WORKLOADS[lengths]
    decode = TOPOLOGIES["3p1d-deepseek"].decode
    assert decode is not None
    return simulated(
        workload, "v1", UNIT, MODEL, 256, CHUNK, topology=deployed("3p1d-deepseek", network_ms=0.5), dispatch="sbs",
        decode_dispatch=dispatch, async_scheduling=False, num_prompts=options.num_prompts or 6000,
        max_concurrency=BATCH * decode.units, max_model_len=50_000, **plan,
    )  # fmt: skip


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [_cell(options, lengths, dispatch) for lengths in _WORKLOADS for dispatch in _DISPATCH]


def _section(options: PaperOptions, store: RunStore, lengths: str) -> Section:
    columns = (
        *labels("decode dispatch", "kind"),
        *(Column(name, group="published, KV tokens") for name in ("-1 sigma", "+1 sigma", "peak")),
        *ours("-1 sigma", "+1 sigma", "peak", "sigma", group="ours, KV tokens"),
        Column("ours", "change", "sigma vs round-robin", True),
        Column("ours", group="decode tokens/s", ours=True),
        *changes("tokens/s vs round-robin"),
        Column("ours", group="TPOT ms", ours=True),
        Column("ours", group="sequences a unit", ours=True),
    )
    base = _cell(options, lengths, _BASE)
    base_sigma, base_rate = (figure(store, base, key) for key in ("decode_kv_std_tokens", "decode_decode_rate"))
    rows = []
    for dispatch, kind in _DISPATCH.items():
        cell = _cell(options, lengths, dispatch)
        keys = ("kv_mean_tokens", "kv_std_tokens", "kv_peak_tokens", "decode_rate")
        mean, sigma, peak, rate = (figure(store, cell, f"decode_{key}") for key in keys)
        band = (None, None) if mean is None or sigma is None else (mean - sigma, mean + sigma)
        row: list[Value] = [dispatch, kind, *_PUBLISHED.get(dispatch, (None, None, None)), *band, peak, sigma]
        row += [relative(sigma, base_sigma), rate, _GAIN.get(dispatch), relative(rate, base_rate)]
        row += [figure(store, cell, "mean_tpot_ms"), figure(store, cell, "decode_decode_batch")]
        rows.append(tuple(row))
    return Section(f"{lengths} lengths", columns, tuple(rows))


def _document(options: PaperOptions, store: RunStore) -> Sections:
    return tuple(_section(options, store, lengths) for lengths in _WORKLOADS)


SBS_FIGURE7 = PaperTable("sbs-figure7", _cells, ("num_prompts",), _document, whole=False, aliases=("sbs-figure8",))
