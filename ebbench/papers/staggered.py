"""Staggered dispatch of Tian et al. (2025): prefill pools (waiting, figure 6, table 1), decode units (figures 7 and 8).

Ours are the parts of the dispatch one at a time, and pools of all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ebbench.analysis.documents import Column, Section, Value, compared, comparison, labels, relative
from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.papers.options import PaperOptions
from ebbench.papers.table import PaperTable, Sections, changes, each, figure, of_all, ours
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

# Deployments of the staggered paper: a DP unit of DeepSeek-V3 on H800, and topologies of its instances.

MODEL = "deepseek-v3"
PREFILL_S, PREFILL_TOKEN_S, DECODE_S, DECODE_SEQ_S, KV_TOKEN_S = 0.0935, 70.8e-6, 0.030, 0.15e-3, 50e-9
UNIT = f"linear:{PREFILL_S},{PREFILL_TOKEN_S},{DECODE_S},{DECODE_SEQ_S},{1 << 20},{KV_TOKEN_S}"
"""One DP unit of the staggered paper's instances, as derived from its figures.

Prefill: table 1 gives two pairs of throughput and chunk utilisation with staggering on. Tokens per pass (8 units x
chunk x utilisation) over tokens/s (QPS x 1K) give 0.311 s per pass at a chunk of 3K and 0.456 s at 5K, if the figures
are those of one instance: those of three would give passes longer than the published TTFT. The line through both is 94
ms + 71 us per token. Decode: estimates from the hardware. 38 GB of weights (FP8, 1/32 of the experts) and two exchanges
per layer take 30 ms; 0.15 ms per sequence at 500 TFLOP/s; 50 ns per KV token for 70 KB read and 17 MFLOP.
"""

_PREFILL = PoolSpec(instances=3, tp=4, dp=8, ep=32)
TOPOLOGIES = {
    "3p": TopologySpec(name="3p", replicas=_PREFILL),
    "3p1d-deepseek": TopologySpec(
        name="3p1d-deepseek", prefill=_PREFILL, decode=PoolSpec(dp=32, ep=32),
        transfer=TransferSpec(
            bandwidth_gb_per_s=45, store_gb=20, held_until="admission", backpressure=True, kv_bytes_per_token=70_272
        ),
    ),
}  # fmt: skip
"""``3p`` is the staggered paper's prefill pool alone: with outputs of one token, no request reaches a decode unit."""


def deployed(topology: str, network_ms: float = 0.0) -> TopologySpec:
    """A topology by its name here or in short form, with this network delay to the instances. Raises UsageError."""
    spec = TOPOLOGIES.get(topology) or parse_topology(topology)
    return msgspec.structs.replace(spec, network_ms=network_ms)


def pass_s(chunk_tokens: int) -> float:
    """Duration (s) of a prefill pass of a unit with a full chunk."""
    return PREFILL_S + PREFILL_TOKEN_S * chunk_tokens


REQUESTS = 12_000
NETWORK_MS = 0.5
AS_PUBLISHED = "sbs:bypass=off,sizing=off,overdraw=on,aged_cycles=off,lookahead=0"
"""Algorithms 1 and 2 to the letter: no bypass under light load, chunks may be exceeded, longest first in all cases, and
nothing is sent to an instance before the end of its pass is known."""
WITH_LOOKAHEAD = AS_PUBLISHED.replace(",lookahead=0", "")
"""The same with our extension ``lookahead``: until November 2026 this stood here as the published algorithms."""
IMMEDIATE = ("round-robin", "least-outstanding")
DISPATCH = (*IMMEDIATE, AS_PUBLISHED, WITH_LOOKAHEAD, "sbs")
TITLES = {AS_PUBLISHED: "sbs, to the letter", WITH_LOOKAHEAD: "with lookahead (ours)", "sbs": "sbs (ours)"}
"""Short names of the staggered policies in tables."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Offered load, as a share of the pool's throughput with full chunks."""


class Setup(NamedTuple):
    """Prompts, chunk size, and the TTFT limit that defines the peak load."""

    title: str
    workload: str
    mean_tokens: float
    chunk: int
    ttft_limit_s: float


SHORT_3K = Setup("0-3K prompts, chunk 3K", "reference:workloads/short-prompts.toml", 1000, 3072, 0.8)
SHORT_5K = Setup("0-3K prompts, chunk 5K", "reference:workloads/short-prompts.toml", 1000, 5120, 1.0)


# No limit is published for long prompts: as many full passes as table 1 allows at a chunk of 3K.
LONG_16K = Setup(
    "3K-64K prompts, chunk 16K", "reference:workloads/long-prompts.toml", 6700, 16384,
    0.8 * pass_s(16384) / pass_s(3072),
)  # fmt: skip


def capacity_rps(setup: Setup, topology: str = "3p") -> float:
    """Requests/s of the pool with full chunks and without waiting."""
    return deployed(topology).pools[0].units * setup.chunk / pass_s(setup.chunk) / setup.mean_tokens


def prefill_cell(options: PaperOptions, setup: Setup, dispatch: str, share: float, topology: str = "3p") -> RunSpec:
    """One load under one dispatch policy."""
    rate = round(share * capacity_rps(setup, topology), 3)
    return simulated(
        setup.workload, "v1", UNIT, MODEL, 1024, setup.chunk, scenario="poisson",
        topology=deployed(topology, NETWORK_MS), dispatch=dispatch,
        async_scheduling=False, num_prompts=options.num_prompts or REQUESTS, request_rate=rate, max_model_len=70_000,
    )  # fmt: skip


class FiguresOverLoad:
    """Figures of one policy over the load, interpolated linearly between the runs."""

    def __init__(self, options: PaperOptions, store: RunStore, setup: Setup, dispatch: str) -> None:
        self._cells = [prefill_cell(options, setup, dispatch, share) for share in SHARES]
        self._store = store

    def _known(self, key: str, scale: float) -> list[float]:
        """One figure at every load; empty if runs are missing."""
        return of_all(list, (figure(self._store, cell, key, scale) for cell in self._cells)) or []

    def at(self, key: str, share: float, scale: float = 1.0) -> float | None:
        """One figure at a load; None if runs are missing or the load is outside their range."""
        values = self._known(key, scale)
        return float(np.interp(share, SHARES, values)) if values and SHARES[0] <= share <= SHARES[-1] else None

    def peak(self, ttft_limit_s: float) -> float | None:
        """The highest load whose mean TTFT is within the limit."""
        ttft_s = self._known("mean_ttft_ms", 1e-3)
        over = next((i for i, value in enumerate(ttft_s) if value > ttft_limit_s), 0)
        ends = slice(over - 1, over + 1)
        return float(np.interp(ttft_limit_s, ttft_s[ends], SHARES[ends])) if over else None


# Waiting time (T/2 against T/(2N)), figure 6 and table 1 of the staggered paper: TTFT and capacity of a prefill pool.

INSTANCES = (1, 2, 4, 8, 16, 32)
PASS_S = 0.1
ARRIVALS_A_TURN = 10  # in T/N: passes without work are then rare enough (e^-10)
_WAITING_DISPATCH = {"immediate": "round-robin", "staggered": "sbs:bypass=off,sizing=off"}


def _waiting_cell(options: PaperOptions, instances: int, dispatch: str) -> RunSpec:
    rate = ARRIVALS_A_TURN * instances / PASS_S
    count = options.num_prompts or max(4000, 1000 * instances)
    return simulated(
        "balanced", "v1", f"linear:{PASS_S},0,{PASS_S},0,4000000", "fixed-time", 1024, 65536, scenario="poisson",
        topology=f"dp={instances}", dispatch=dispatch, async_scheduling=False, weight=float(instances),
        num_prompts=count, request_rate=rate, input_len=10, output_len=1, length_distribution="fixed",
    )  # fmt: skip


def _waiting_document(options: PaperOptions, store: RunStore) -> Sections:
    columns = labels("instances N")
    for name in _WAITING_DISPATCH:
        columns += compared(f"{name}, ms")
    rows = []
    for n in INSTANCES:
        row: list[Value] = [str(n)]
        for dispatch, formula_s in zip(_WAITING_DISPATCH.values(), (PASS_S / 2, PASS_S / 2 / n), strict=True):
            ttft_ms = figure(store, _waiting_cell(options, n, dispatch), "mean_ttft_ms")
            row += comparison(1e3 * formula_s, None if ttft_ms is None else ttft_ms - 1e3 * PASS_S)
        rows.append(tuple(row))
    return [Section("", columns, tuple(rows))]


# Figure 6: TTFT over the load.

LOADS = (0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_FIGURE6 = (SHORT_3K, LONG_16K)


def _base_peak(curves: dict[str, FiguresOverLoad], setup: Setup) -> float | None:
    return of_all(max, (curves[name].peak(setup.ttft_limit_s) for name in IMMEDIATE))


def _figure6_section(options: PaperOptions, store: RunStore, setup: Setup) -> Section:
    curves = {dispatch: FiguresOverLoad(options, store, setup, dispatch) for dispatch in DISPATCH}
    peak = _base_peak(curves, setup)
    columns = (
        *labels("load"), Column("req/s"),
        *ours(*(TITLES.get(name, name) for name in DISPATCH), group="TTFT s"),
        *(Column(title, "change", "vs better immediate", True) for title in TITLES.values()),
        *ours("immediate", "sbs", group="wait on the device, ms"),
    )  # fmt: skip
    rows = []
    for load in LOADS:
        share = None if peak is None else load * peak
        row: list[Value] = [f"{100 * load:.0f} %", None if share is None else share * capacity_rps(setup)]
        ttft = {d: None if share is None else c.at("mean_ttft_ms", share, 1e-3) for d, c in curves.items()}
        base = of_all(min, (ttft[name] for name in IMMEDIATE))
        row += [ttft[name] for name in DISPATCH]
        row += [relative(ttft[name], base) for name in TITLES]
        waits = {d: None if share is None else c.at("device_wait_ms", share) for d, c in curves.items()}
        row += [of_all(min, (waits[name] for name in IMMEDIATE)), waits["sbs"]]
        rows.append(tuple(row))
    return Section(f"{setup.title}; peak: mean TTFT of {setup.ttft_limit_s:.2f} s", columns, tuple(rows))


def _figure6_findings(_options: PaperOptions, _store: RunStore, sections: Sections) -> Iterator[str]:
    """One sentence for each staggered policy: where it is above and below the better immediate one."""
    for setup, section in zip(_FIGURE6, sections, strict=True):
        first = next(i for i, column in enumerate(section.columns) if column.group == "vs better immediate")
        for index, title in enumerate(TITLES.values()):
            changes = [(str(row[0]), value) for row in section.rows if isinstance(value := row[first + index], float)]
            if len(changes) == len(section.rows):
                yield f"{setup.title}, {title}: {_against_immediate(changes)}"


def _against_immediate(changes: list[tuple[str, float]]) -> str:
    worst, best = max(changes, key=lambda item: item[1]), min(changes, key=lambda item: item[1])
    above = [load for load, change in changes if change > 0]
    where = f"above immediate dispatch at {', '.join(above)} ({100 * worst[1]:+.1f} %)" if above else "never above it"
    at80 = dict(changes)["80 %"]
    return f"{100 * at80:+.1f} % at 80 %, best {100 * best[1]:+.1f} % at {best[0]}, {where}."


# Table 1: capacity at a fixed mean TTFT.

_TABLE1 = (
    (SHORT_3K, {"off": (57.0, 51.83), "on": (70.0, 88.7)}),
    (SHORT_5K, {"off": (70.0, 53.0), "on": (79.0, 88.0)}),
)
_ROWS1 = (
    ("off", IMMEDIATE[0]), ("off", IMMEDIATE[1]), ("on", AS_PUBLISHED), ("on", WITH_LOOKAHEAD), ("on", "sbs"),
)  # fmt: skip


def _table1_section(
    options: PaperOptions, store: RunStore, setup: Setup, published: dict[str, tuple[float, float]]
) -> Section:
    columns = (*labels("batching", "dispatch"), *compared("QPS an instance"),
               *compared("chunk utilisation, %", points=True), *changes("QPS vs off"))  # fmt: skip
    curves = {dispatch: FiguresOverLoad(options, store, setup, dispatch) for _, dispatch in _ROWS1}
    base = _base_peak(curves, setup)
    rows = []
    for batching, dispatch in _ROWS1:
        peak = curves[dispatch].peak(setup.ttft_limit_s)
        qps = None if peak is None else peak * capacity_rps(setup) / 3
        use = None if peak is None else curves[dispatch].at("front_chunk_utilisation", peak, 100)
        row: list[Value] = [batching, TITLES.get(dispatch, dispatch), *comparison(published[batching][0], qps)]
        row += comparison(published[batching][1], use, points=True)
        gain = relative(published["on"][0], published["off"][0]) if batching == "on" else None
        row += [gain, relative(peak, base) if batching == "on" else None]
        rows.append(tuple(row))
    return Section(f"{setup.title}, mean TTFT {setup.ttft_limit_s:g} s", columns, tuple(rows))


_READS = ("num_prompts",)
WAITING = PaperTable("sbs-waiting", _READS, _waiting_document, whole=False, facts=globals())
SBS_FIGURE6 = PaperTable(
    "sbs-figure6", _READS, each(_figure6_section, lambda _options: product(_FIGURE6)),
    findings=_figure6_findings, whole=False, facts=globals(),
)  # fmt: skip
SBS_TABLE1 = PaperTable(
    "sbs-table1", _READS,
    each(_table1_section, lambda _options: _TABLE1), whole=False, aliases=("table1", "1"), facts=globals(),
)  # fmt: skip


# Effect of each part of staggered dispatch, near 80 % of the peak of figure 6. No figures are published.

SHARE = 0.76
"""Share of the pool's throughput with full chunks; the peak of figure 6 is at 0.95."""
_SETUPS = (SHORT_3K, LONG_16K)
_PARTS = (
    "sbs", "sbs:sizing=off", "sbs:bypass=off", "sbs:interval=off", "sbs:adaptive=off", "sbs:lookahead=0.75",
    "sbs:lookahead=0", "sbs:patience=off", "sbs:overdraw=off", "sbs:packing=off", WITH_LOOKAHEAD, AS_PUBLISHED,
)  # fmt: skip
_ABLATION_FIGURES = (("mean_ttft_ms", "mean"), ("median_ttft_ms", "median"), ("p99_ttft_ms", "p99"))


def _ablation_section(options: PaperOptions, store: RunStore, setup: Setup) -> Section:
    columns = (
        *labels("dispatch"),
        *ours(*(title for _, title in _ABLATION_FIGURES), group="TTFT s"),
        Column("mean TTFT", "change", "vs better immediate", True),
        Column("chunk utilisation, %", ours=True),
    )
    base = of_all(min, (figure(store, prefill_cell(options, setup, name, SHARE), "mean_ttft_ms") for name in IMMEDIATE))
    rows = []
    for dispatch in (*IMMEDIATE, *_PARTS):
        cell = prefill_cell(options, setup, dispatch, SHARE)
        row: list[Value] = [dispatch, *(figure(store, cell, key, 1e-3) for key, _ in _ABLATION_FIGURES)]
        row += [relative(figure(store, cell, "mean_ttft_ms"), base)]
        row += [figure(store, cell, "front_chunk_utilisation", 100)]
        rows.append(tuple(row))
    return Section(setup.title, columns, tuple(rows))


ABLATION = PaperTable(
    "sbs-ablation", ("num_prompts",), each(_ablation_section, lambda _options: product(_SETUPS)),
    whole=False, facts=globals(),
)  # fmt: skip


# Staggered against immediate dispatch for prefill pools of other sizes, down to one unit. No figures are published.

POOL_LOADS = (0.05, 0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares of the pool's throughput with full chunks; its peak in the sense of figure 6 is near 0.95."""
POOL_REQUESTS = 6000
_POOLS = {
    f"{instances} x {units} unit{'s' if units > 1 else ''}": f"instances={instances},tp=4,dp={units},ep={4 * units}"
    for instances in (1, 2, 6)
    for units in (1, 8)
}
"""Topologies by title."""


def _pool_section(options: PaperOptions, store: RunStore, setup: Setup) -> Section:
    columns = (
        *labels("instances of units", "load"), Column("req/s"),
        *ours("better immediate", "sbs", group="TTFT mean, s"), Column("diff", "change", "TTFT mean, s", True),
        *ours("better immediate", "sbs", group="TTFT p99, s"), Column("diff", "change", "TTFT p99, s", True),
    )  # fmt: skip
    rows, smaller = [], options if options.num_prompts else replace(options, num_prompts=POOL_REQUESTS)
    for (pool, topology), load in product(_POOLS.items(), POOL_LOADS):
        title = pool if load == POOL_LOADS[0] else ""
        row: list[Value] = [title, f"{100 * load:.0f} %", load * capacity_rps(setup, topology)]
        *immediate, staggered = (prefill_cell(smaller, setup, name, load, topology) for name in (*IMMEDIATE, "sbs"))
        for key in ("mean_ttft_ms", "p99_ttft_ms"):
            base = of_all(min, (figure(store, cell, key, 1e-3) for cell in immediate))
            sbs = figure(store, staggered, key, 1e-3)
            row += [base, sbs, relative(sbs, base)]
        rows.append(tuple(row))
    return Section(setup.title, columns, tuple(rows))


def _pool_findings(_options: PaperOptions, _store: RunStore, sections: Sections) -> Iterator[str]:
    for section in sections:
        pools = zip(product(_POOLS, POOL_LOADS), section.rows, strict=True)
        changes = [(row[5], f"{pool}, {row[1]}") for (pool, _), row in pools]
        known = [(float(change), where) for change, where in changes if isinstance(change, (int, float))]
        if len(known) == len(changes):
            span = " to ".join(f"{100 * change:+.1f} % ({where})" for change, where in (min(known), max(known)))
            yield f"{section.title}: mean TTFT {span}."


POOLS = PaperTable(
    "sbs-pools", ("num_prompts",), each(_pool_section, lambda _options: product(_SETUPS)),
    findings=_pool_findings, whole=False,
)  # fmt: skip


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


SBS_FIGURE7 = PaperTable(
    "sbs-figure7", ("num_prompts",), each(_section, lambda _options: product(_WORKLOADS)), whole=False,
    aliases=("sbs-figure8",),
)  # fmt: skip
