"""Table 3 of the EB paper: three traffic levels and two shifts; throughput, TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels, relative
from ebbench.papers.protocols import MEAN_OUTPUT, protocol_cells, table3_protocol
from ebbench.papers.published import EB_PAPER, GPUS, MAIN_MODEL, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published, mean_figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from vllm_eb.policies.deferred import DeferredModel, exact_chain


class Traffic(NamedTuple):
    """One row group: its title, and the relative duration of its runs."""

    title: str
    weight: float


TRAFFIC: Mapping[str, Traffic] = {
    "c=32": Traffic("c = 32", 8.0),
    "c=512": Traffic("c = 512", 1.0),
    "c=2048": Traffic("c = 2048", 2.0),
    "distribution_shift": Traffic("distribution shift", 6.0),
    "concurrency_shift": Traffic("concurrency shift", 2.0),
}
PUBLISHED_POLICIES = ("v1", "eb", "ebplus")
_METRICS = (
    ("total_tokens_per_s", "tokens/s", "total_token_throughput", 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_NOTES = (
    f"Published: {EB_PAPER}, table 3. Tokens/s count prompts and answers over the whole run; TTFT and TPOT are means.",
    "Ours: engine sim, run as `ebbench fidelity` does, by what the authors' scripts say "
    "(ebbench/papers/protocols.py). Traffic levels: mean 512 in, 256 out, 100 warm-up requests that count nowhere, "
    "then 4,000; B = 14336, N = 1024; EB with a floor of 0.7 under its threshold at c = 512 and 2048. Distribution "
    "shift: 6,000 requests of three kinds in mixed order, the floor for EB and EB+. Concurrency shift: five runs of "
    "2,000, means over them. Shifts have no warm-up, B = 18432, N = 2048. No asynchronous scheduling, as in the "
    "authors' vLLM.",
    "deferred refills after K departures, K the best of the exact chain of Mohanty et al. for these costs; the paper "
    "has no such column, nor one for v0.",
)


@cache
def deferred_policy(device: str, model: str, max_num_seqs: int) -> str:
    """``deferred:k=K`` with the K that the exact chain finds best for the device's costs and mean output length."""
    from ebbench.devices import load_device

    costs = load_device(device, model).calibration
    chain = exact_chain(DeferredModel(max_num_seqs, 1 / MEAN_OUTPUT, costs.alpha_p, costs.alpha_d))
    return f"deferred:k={chain.best_k}"


def table3_cells(options: PaperOptions, device: str, model: str, name: str, policy: str) -> tuple[RunSpec, ...]:
    """The cells of one row and policy; the table shows the mean of their figures."""
    protocol = table3_protocol(name, policy, device)
    if policy == "deferred":
        protocol = replace(protocol, policy=deferred_policy(device, model, protocol.max_num_seqs))
    return protocol_cells(protocol, device, model, options.num_prompts, TRAFFIC[name].weight)


def _models(options: PaperOptions) -> tuple[str, ...]:
    return options.models or ("qwen3-8b",)


def _devices(options: PaperOptions) -> tuple[str, ...]:
    return options.devices or tuple(GPUS)


def _further(options: PaperOptions) -> tuple[str, ...]:
    """Policies without published figures."""
    return tuple(dict.fromkeys(("v0", "deferred", *(p for p in options.policies if p not in PUBLISHED_POLICIES))))


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        cell
        for device in _devices(options)
        for model in _models(options)
        for name in TRAFFIC
        for policy in (*PUBLISHED_POLICIES, *_further(options))
        for cell in table3_cells(options, device, model, name, policy)
    ]


def _mean(
    options: PaperOptions, store: RunStore, of: tuple[str, str, str, str], key: str, scale: float = 1.0
) -> float | None:
    value = mean_figure(store, table3_cells(options, *of), key)
    return None if value is None else value * scale


def _section(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    columns = labels("scenario", "metric")
    for policy in PUBLISHED_POLICIES:
        columns += compared(policy)
    columns += tuple(Column("ours", group=policy, ours=True) for policy in _further(options))
    rows: list[tuple[Value, ...]] = []
    for name, traffic in TRAFFIC.items():
        for metric, title, key, scale in _METRICS:
            row: list[Value] = [traffic.title, title]
            for policy in PUBLISHED_POLICIES:
                ours = _mean(options, store, (device, model, name, policy), key, scale)
                row += comparison(_published(device, model, name, metric, policy), ours)
            for policy in _further(options):
                row.append(_mean(options, store, (device, model, name, policy), key, scale))
            rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {model}", columns, tuple(rows))


def _published(device: str, model: str, name: str, metric: str, policy: str) -> float | None:
    if model != "qwen3-8b":
        return None
    where = {"scenario": name, "metric": metric, "gpu": gpu_title(device)}
    return pick("table3_traffic_and_nonstationary", policy, **where)


def _gains(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    """Gains of the policies over each other."""
    pairs = (("eb", "v1"), ("ebplus", "v1"), ("ebplus", "better of v1, eb"))
    columns = labels("scenario")
    for policy, base in pairs:
        group = f"{policy} vs {base}"
        columns += (Column("published", "change", group), Column("ours", "change", group, True))
    rows = []
    for name, traffic in TRAFFIC.items():
        published = {p: _published(device, model, name, "total_tokens_per_s", p) for p in PUBLISHED_POLICIES}
        ours = {
            p: _mean(options, store, (device, model, name, p), "total_token_throughput") for p in PUBLISHED_POLICIES
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


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections: list[Section] = []
    for device in _devices(options):
        for model in _models(options):
            sections += [_section(options, store, device, model), _gains(options, store, device, model)]
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("table3", "Table 3: traffic levels and moving traffic", tuple(sections), notes)


TABLE3 = PaperTable(
    "table3", "traffic levels and moving traffic", _cells, _document, ("device", "model", "policy", "num_prompts"),
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)  # fmt: skip
