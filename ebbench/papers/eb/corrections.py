"""How close the online threshold comes to the best fixed one, by the form of its correction and the shape of answers.

The EB paper has no such table; its theorem 3.2 is the first column.
"""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.papers.eb.table10_11 import REFILL_NOTE, SLOW, linear_costs, slow_refill, sweep_cell
from ebbench.papers.published import gpu_title, model_title
from ebbench.papers.table import PaperOptions, PaperTable, Published, mean_figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

SHAPES = ("gamma:0.5", "gamma:1", "gamma:2", "gamma:4", "gamma:8", "uniform")
THETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CORRECTIONS = {
    "theorem 3.2": "eb",
    "off": "eb:correction=off",
    "renewal": "eb:correction=renewal",
    "renewal, censored estimator": "eb:correction=renewal,estimator=censored",
}
BATCH, BUDGET, WARMUP = 256, 65536, 100  # a refill of the whole batch is one step, as in the paper's model
MEAN_INPUT, MEAN_OUTPUT, COUNT = 128, 512, 3000
_NOTES = (
    "Not a table of the paper. Output tokens/s of the online threshold in per cent of the best fixed one of "
    f"{', '.join(f'{theta:g}' for theta in THETAS)}. Engine sim, step times linear in tokens as the controller is "
    f"told, N = {BATCH}, B = {BUDGET}; mean {MEAN_INPUT} in and {MEAN_OUTPUT} out, {WARMUP} requests to warm up.",
    "theorem 3.2: as published; off: theta0 alone; renewal: ours, with the ages that requests have (docs/theory.md).",
    REFILL_NOTE.partition("; 'ours'")[0] + ".",
)


def _costs(options: PaperOptions) -> dict[str, str]:
    device, model = options.device(), options.model()
    return {"the device's linear costs": linear_costs(device, model), SLOW: slow_refill(device, model)}


def _repeats(options: PaperOptions, device: str, shape: str, policy: str) -> list[RunSpec]:
    return [
        sweep_cell(
            device, options.model(), policy, BATCH, seed, budget=BUDGET, warmup=WARMUP,
            num_prompts=options.num_prompts or COUNT, input_len=MEAN_INPUT, output_len=MEAN_OUTPUT,
            length_distribution=shape,
        )
        for seed in options.seed_range()
    ]  # fmt: skip


def _policies() -> tuple[str, ...]:
    return (*(f"eb:theta={theta}" for theta in THETAS), *CORRECTIONS.values())


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        cell
        for device in _costs(options).values()
        for shape in SHAPES
        for policy in _policies()
        for cell in _repeats(options, device, shape, policy)
    ]


def _section(options: PaperOptions, store: RunStore, title: str, device: str) -> Section:
    columns = (*labels("answers"), Column("best theta"), Column("tokens/s", group="best theta"))
    columns += tuple(Column(name, group="% of the best fixed threshold", ours=True) for name in CORRECTIONS)
    rows: list[tuple[Value, ...]] = []
    for shape in SHAPES:
        rates = {
            policy: mean_figure(store, _repeats(options, device, shape, policy), "output_throughput")
            for policy in _policies()
        }
        fixed = {theta: rate for theta in THETAS if (rate := rates[f"eb:theta={theta}"]) is not None}
        best = max(fixed, key=lambda theta: fixed[theta]) if len(fixed) == len(THETAS) else None
        peak = None if best is None else fixed[best]
        shares = [
            None if peak is None or (rate := rates[policy]) is None else 100 * rate / peak
            for policy in CORRECTIONS.values()
        ]
        rows.append((shape, best, peak, *shares))
    return Section(title, columns, tuple(rows))


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = tuple(_section(options, store, title, device) for title, device in _costs(options).items())
    count = (
        f"{options.num_prompts or COUNT:,} requests on {gpu_title(options.device())}, {model_title(options.model())}."
    )
    notes = (*_NOTES, count, *pending(store, _cells(options)))
    return Document("corrections", "The online threshold by its correction", sections, notes)


CORRECTION = PaperTable(
    "corrections", "the online threshold by its correction (ours)", _cells, _document,
    ("device", "model", "num_prompts", "seeds"), whole=False,
    published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)),
)  # fmt: skip
