"""Table 3 of the EB paper: three traffic levels and two shifts, throughput, TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from ebbench.analysis.paper_tables import Column, Document, Section, Value, compared, comparison, labels, relative
from ebbench.papers.cells import Cell, settings
from ebbench.papers.published import EB_PAPER, GPUS, gpu_title, pick
from ebbench.papers.store import CellStore
from ebbench.papers.table import PaperTable, Wish, figure, pending
from vllm_eb.deferred import DeferredModel, exact_chain

MEAN_INPUT, MEAN_OUTPUT = 512, 256


class Traffic(NamedTuple):
    """One row group: the scenario file, the scheduler settings and whether the scenario brings its own lengths."""

    scenario: str
    title: str
    max_num_batched_tokens: int
    max_num_seqs: int
    own_lengths: bool
    weight: float


TRAFFIC: Mapping[str, Traffic] = {
    "c=32": Traffic("traffic-32", "c = 32", 14336, 1024, False, 8.0),
    "c=512": Traffic("traffic-512", "c = 512", 14336, 1024, False, 1.0),
    "c=2048": Traffic("traffic-2048", "c = 2048", 14336, 1024, False, 2.0),
    "distribution_shift": Traffic("distribution-shift", "distribution shift", 18432, 2048, True, 6.0),
    "concurrency_shift": Traffic("concurrency-shift", "concurrency shift", 18432, 2048, True, 7.0),
}
PUBLISHED_POLICIES = ("v1", "eb", "ebplus")
_METRICS = (
    ("total_tokens_per_s", "tokens/s", "total_token_throughput", 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_NOTES = (
    f"Published: {EB_PAPER}, table 3. Tokens/s count prompts and answers over the whole run; TTFT and TPOT are means.",
    "Ours: engine sim. Traffic levels: mean 512 in, 256 out, 4,000 requests, B = 14336, N = 1024. Shifts: 2,000 "
    "requests a phase, B = 18432, N = 2048 (published for the distribution shift, assumed for the concurrency shift).",
    "The paper's runs begin with 100 warm-up requests, ours do not: EB's mean TTFT at c = 32 is that of the few dozen "
    "requests that wait for its first estimate.",
    "deferred refills after K departures, K the best of the exact chain of Mohanty et al. for these costs; the paper "
    "has no such column, nor one for v0.",
)


@cache
def deferred_policy(device: str, model: str, max_num_seqs: int) -> str:
    """``deferred:k=K`` with the K that the exact chain finds best at the device's costs and mean answer length."""
    from ebbench.devices import load_device

    costs = load_device(device, model).calibration
    chain = exact_chain(DeferredModel(max_num_seqs, 1 / MEAN_OUTPUT, costs.alpha_p, costs.alpha_d))
    return f"deferred:k={chain.best_k}"


def table3_cell(wish: Wish, device: str, model: str, name: str, policy: str) -> Cell:
    """The run behind one row and policy."""
    traffic = TRAFFIC[name]
    if policy == "deferred":
        policy = deferred_policy(device, model, traffic.max_num_seqs)
    lengths = {} if traffic.own_lengths else {"input_len": MEAN_INPUT, "output_len": MEAN_OUTPUT}
    return Cell(
        "balanced", policy, device, model, traffic.max_num_seqs, traffic.max_num_batched_tokens,
        scenario=traffic.scenario, settings=settings(num_prompts=wish.num_prompts, **lengths), weight=traffic.weight,
    )  # fmt: skip


def _models(wish: Wish) -> tuple[str, ...]:
    return wish.models or ("qwen3-8b",)


def _devices(wish: Wish) -> tuple[str, ...]:
    return wish.devices or tuple(GPUS)


def _further(wish: Wish) -> tuple[str, ...]:
    """Policies of which nothing was published."""
    return tuple(dict.fromkeys(("v0", "deferred", *(p for p in wish.policies if p not in PUBLISHED_POLICIES))))


def _cells(wish: Wish) -> list[Cell]:
    return [
        table3_cell(wish, device, model, name, policy)
        for device in _devices(wish)
        for model in _models(wish)
        for name in TRAFFIC
        for policy in (*PUBLISHED_POLICIES, *_further(wish))
    ]


def _section(wish: Wish, store: CellStore, device: str, model: str) -> Section:
    columns = labels("scenario", "metric")
    for policy in PUBLISHED_POLICIES:
        columns += compared(policy)
    columns += tuple(Column("ours", group=policy, ours=True) for policy in _further(wish))
    rows: list[tuple[Value, ...]] = []
    for name, traffic in TRAFFIC.items():
        for metric, title, key, scale in _METRICS:
            row: list[Value] = [traffic.title, title]
            for policy in PUBLISHED_POLICIES:
                ours = figure(store, table3_cell(wish, device, model, name, policy), key, scale)
                row += comparison(_published(device, model, name, metric, policy), ours)
            for policy in _further(wish):
                row.append(figure(store, table3_cell(wish, device, model, name, policy), key, scale))
            rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {model}", columns, tuple(rows))


def _published(device: str, model: str, name: str, metric: str, policy: str) -> float | None:
    if model != "qwen3-8b":
        return None
    where = {"scenario": name, "metric": metric, "gpu": gpu_title(device)}
    return pick("table3_traffic_and_nonstationary", policy, **where)


def _gains(wish: Wish, store: CellStore, device: str, model: str) -> Section:
    """How the policies stand to each other: what a reader of the table wants to know."""
    pairs = (("eb", "v1"), ("ebplus", "v1"), ("ebplus", "better of v1, eb"))
    columns = labels("scenario")
    for policy, base in pairs:
        group = f"{policy} vs {base}"
        columns += (Column("published", "change", group), Column("ours", "change", group, True))
    rows = []
    for name, traffic in TRAFFIC.items():
        published = {p: _published(device, model, name, "total_tokens_per_s", p) for p in PUBLISHED_POLICIES}
        ours = {
            p: figure(store, table3_cell(wish, device, model, name, p), "total_token_throughput")
            for p in PUBLISHED_POLICIES
        }
        row: list[Value] = [traffic.title]
        for policy, base in pairs:
            row += [_gain(published, policy, base), _gain(ours, policy, base)]
        rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {model}: throughput of one policy over another", columns, tuple(rows))


def _gain(rates: Mapping[str, float | None], policy: str, base: str) -> float | None:
    if base in rates:
        return relative(rates[policy], rates[base])
    both = [rate for rate in (rates["v1"], rates["eb"]) if rate is not None]
    return relative(rates[policy], max(both)) if len(both) == 2 else None


def _document(wish: Wish, store: CellStore) -> Document:
    sections: list[Section] = []
    for device in _devices(wish):
        for model in _models(wish):
            sections += [_section(wish, store, device, model), _gains(wish, store, device, model)]
    notes = (*_NOTES, *pending(store, _cells(wish)))
    return Document("table3", "Table 3: traffic levels and moving traffic", tuple(sections), notes)


TABLE3 = PaperTable("table3", "traffic levels and moving traffic", _cells, _document)
