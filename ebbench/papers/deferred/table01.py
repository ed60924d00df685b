"""Table 1 of the deferred-prefill paper (Mohanty et al., EuroMLSys 2025): the best departure threshold K.

The paper gives its cost constants only in figures. Three published numbers determine the three relevant constants: the
numeric K* gives c_p/c_d (Proposition 1); the rates at K = 1 and at the best K give c_d and the part that K does not
change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from ebbench.analysis.documents import Column, Document, Section, Value, comparison, labels
from ebbench.devices.linear import GIVEN
from ebbench.papers.published import DEFERRED_PAPER, rows
from ebbench.papers.table import PaperOptions, PaperTable, pending
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec, simulated
from vllm_eb.policies.deferred import DeferredModel, exact_chain

MEAN_INPUT, MEAN_OUTPUT = 285, 201
DISTRIBUTIONS: Mapping[str, str] = {
    "geometric": "prompts of 285 tokens, geometric answers (the paper's synthetic data set)",
    "gamma:1.9": "prompts and answers gamma of shape 1.9 (ShareGPT's spread in table 9 of the EB paper)",
}
SYNTHETIC = "reference:workloads/deferred-synthetic.toml"
_PARAMETERS: Mapping[str, float] = {"Granite": 8.17e9, "LLaMA3": 8.03e9}
_A100_FLOPS = 312e12 * 0.5  # dense bf16 peak at half efficiency; determines how S divides between prompts and decodes
_BUDGET = 32768
_KV_TOKENS = 4_000_000


@dataclass(frozen=True)
class Constants:
    """Costs in seconds: fixed per prefill and per decode step, per prompt, and per sequence and step."""

    c_p: float
    c_d: float
    prompt_s: float
    t_d: float


def implied_constants(row: Mapping[str, str]) -> Constants:
    """Compute the constants of a published row."""
    limit, alpha = int(row["batch_limit"]), 1 / MEAN_OUTPUT
    y = -math.log1p(-int(row["k_numeric"]) / limit)
    ratio = (math.expm1(y) - y) / -math.log1p(-alpha)
    chain = exact_chain(DeferredModel(limit, alpha, ratio, 1.0))
    first, best = (1 / chain.throughput[int(k) - 1] for k in (1, row["k_experiment"]))
    times = 1 / float(row["default_throughput_rps"]), 1 / float(row["throughput_experiment_rps"])
    c_d = float((times[0] - times[1]) / (first - best))
    rest = float(times[0] - first * c_d)
    prompt_s = min(2 * _PARAMETERS[row["model"]] * MEAN_INPUT / _A100_FLOPS, rest)
    return Constants(ratio * c_d, c_d, prompt_s, (rest - prompt_s) * alpha)


def k_values(limit: int) -> list[int]:
    """Thresholds to try: 1, then about every 4 % of the batch up to half of it."""
    return sorted({1, *(round(limit * share / 100) for share in range(2, 52, 3))})


def deferred_cell(
    options: PaperOptions, row: Mapping[str, str], distribution: str, k: int, costs: Constants | None = None
) -> RunSpec:
    """The backlogged run of a published row at threshold ``k``; ``costs``: other than those that the row implies."""
    cost, limit = costs or implied_constants(row), int(row["batch_limit"])
    values = (cost.c_p, cost.prompt_s / MEAN_INPUT, cost.c_d, cost.t_d)
    device = GIVEN + ",".join(f"{value:.6g}" for value in values) + f",{_KV_TOKENS}"
    policy = "v0" if k == 1 else f"deferred:k={k}"
    synthetic = distribution == "geometric"
    return simulated(
        SYNTHETIC if synthetic else "balanced", policy, device, f"{row['model']} on A100", limit, _BUDGET,
        num_prompts=options.num_prompts or 4000, max_concurrency=3 * limit, async_scheduling=False,
        input_len=None if synthetic else MEAN_INPUT, output_len=None if synthetic else MEAN_OUTPUT,
        length_distribution=None if synthetic else distribution,
    )  # fmt: skip


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        deferred_cell(options, row, distribution, k)
        for row in rows("deferred_table1")
        for distribution in DISTRIBUTIONS
        for k in k_values(int(row["batch_limit"]))
    ]


def steady_rate(found: Measured) -> float:
    """Requests/s while the queue is backlogged, as in the paper; of the whole run if there is no such window."""
    steady = found.figures.get("steady")
    return float(steady["request_throughput"] if steady else found.figures["request_throughput"])


def normalised_s(found: Measured) -> tuple[float, float]:
    """Mean and 95th percentile of completion time per output token in s/token, without queueing."""
    table = found.run.table("requests", ["status", "scheduled_ns", "last_token_ns", "output_tokens"])
    done = table.filter(pc.equal(table["status"], "ok"))
    spent = done["last_token_ns"].to_numpy() - done["scheduled_ns"].to_numpy()
    per_token = spent / 1e9 / done["output_tokens"].to_numpy()
    return float(per_token.mean()), float(np.percentile(per_token, 95))


def _row(options: PaperOptions, store: RunStore, row: Mapping[str, str], distribution: str) -> list[tuple[Value, ...]]:
    limit, cost = int(row["batch_limit"]), implied_constants(row)
    found = {k: store.get(deferred_cell(options, row, distribution, k)) for k in k_values(limit)}
    known = {k: one for k, one in found.items() if one is not None}
    rates = {k: steady_rate(one) for k, one in known.items()}
    whole = len(known) == len(found)
    best = max(rates, key=rates.__getitem__) if whole else None
    model = DeferredModel(limit, 1 / MEAN_OUTPUT, cost.c_p, cost.c_d, cost.t_d, cost.prompt_s)
    chain = exact_chain(model)
    at_best = normalised_s(known[best]) if best is not None else (None, None)
    at_one = normalised_s(known[1]) if whole else (None, None)
    numeric = float(row["throughput_numeric_rps"])
    lines: list[tuple[str, float | None, float | None]] = [
        ("best K, experiment", float(row["k_experiment"]), best),
        ("best K, numeric (exact chain)", float(row["k_numeric"]), chain.best_k),
        ("requests/s at the best K", float(row["throughput_experiment_rps"]), rates.get(best or 0)),
        ("requests/s at the numeric K", numeric, float(chain.throughput.max())),
        ("requests/s at K = 1", float(row["default_throughput_rps"]), rates.get(1)),
        ("gain over K = 1, %", _gain(row), _percent(rates.get(best or 0), rates.get(1))),
        ("s/token at the best K, mean", float(row["normalised_mean_s"]), at_best[0]),
        ("s/token at the best K, p95", float(row["normalised_p95_s"]), at_best[1]),
        ("s/token at K = 1, mean", float(row["default_mean_s"]), at_one[0]),
        ("s/token at K = 1, p95", float(row["default_p95_s"]), at_one[1]),
    ]
    return [(row["model"], title, *comparison(published, ours)) for title, published, ours in lines]


def _gain(row: Mapping[str, str]) -> float | None:
    return _percent(float(row["throughput_experiment_rps"]), float(row["default_throughput_rps"]))


def _percent(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else 100 * (value / base - 1)


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns = (*labels("model", "metric"), Column("published"), Column("ours", ours=True), Column("diff", "change"))
    sections = []
    for distribution, title in DISTRIBUTIONS.items():
        lines = [line for row in rows("deferred_table1") for line in _row(options, store, row, distribution)]
        sections.append(Section(title, columns, tuple(lines)))
    facts = ", ".join(_constants_text(row) for row in rows("deferred_table1"))
    notes = (
        f"Published: {DEFERRED_PAPER}, table 1: vLLM 0.6.3 on an A100, ShareGPT with mean 285 in and 201 out.",
        "The cost constants are not given as numbers. They are solved from the published numeric K* and the rates at "
        "K = 1 and at the best K, so these three agree by construction up to the distribution of lengths; the best K "
        f"of the simulation, the flatness around it and the times per token are predictions. Implied: {facts}.",
        "LLaMA3's printed numeric rate is 22 % above its experiment; the text puts that down to one c_d for two "
        "regimes. Our constants follow from the experiment, so our numeric rate is 18 % below the printed one.",
        *pending(store, _cells(options)),
    )
    return Document("deferred-1", "Deferred prefill, table 1: the best departure threshold", tuple(sections), notes)


def _constants_text(row: Mapping[str, str]) -> str:
    cost = implied_constants(row)
    milliseconds = (f"{1e3 * value:.3g}" for value in (cost.c_p, cost.c_d, cost.prompt_s, cost.t_d))
    c_p, c_d, prompt, t_d = milliseconds
    return f"{row['model']}: c_p {c_p} ms, c_d {c_d} ms, {prompt} ms per prompt, t_d {t_d} ms"


DEFERRED = PaperTable(
    "deferred-1", "the deferred-prefill paper's table 1", _cells, _document, ("num_prompts",),
    aliases=("deferred", "table1", "1"),
)  # fmt: skip
