"""Appendix E.3 and E.5 of the EB paper as experiments: rising hazards, and the error of the online estimate."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.papers.eb.figure12 import COSTS, FIGURE12, SHAPES, THETAS, best_and_near, figure12_cells, sweep12
from ebbench.papers.eb.table10_11 import PUBLISHED_E2, sweep_cell
from ebbench.papers.published import EB_PAPER
from ebbench.papers.table import PaperOptions, PaperTable, Published, pending
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec
from vllm_eb.hazard import CensoredHazard, HazardEstimate, SlidingHazard
from vllm_eb.theory import base_threshold

WINDOWS = (100, 250, 500, 1000, 2000)
DRAWS = 200  # number of windows evaluated
ESTIMATORS = ("published", "censored")
MEAN_OUTPUTS = (256, 1024)
_BATCH, _MEAN_INPUT = 512, 128


# E.3: constant and rising hazard.


def _document_ifr(options: PaperOptions, store: RunStore) -> Document:
    sections = (
        _best_thetas(options, store),
        *(_section_ifr(options, store, name, slow=bool(index)) for index, name in enumerate(COSTS)),
    )
    notes = (
        f"The experiment of {EB_PAPER}, E.3: same mean length, hazard falling, constant or rising, settings of the "
        "authors' script (figure12 draws it and names them). Mean over the seeds. The paper reports that the best "
        "threshold moves up under a rising hazard; the falling case stands only in the script, which expects the best "
        "threshold to rise from the first case to the third.",
        *pending(store, figure12_cells(options)),
    )
    return Document("e3", "E.3: thresholds under a constant and a rising hazard", sections, notes)


def _best_thetas(options: PaperOptions, store: RunStore) -> Section:
    """The best threshold of every case, and those whose throughput is within 1 % of the best."""
    columns, rows = labels("costs"), []
    for name in SHAPES.values():
        columns += (Column("best theta", group=name, ours=True), Column("within 1 %", "label", name))
    for index, name in enumerate(COSTS):
        row: list[Value] = [name]
        for shape in SHAPES:
            found = best_and_near(sweep12(options, store, shape, slow=bool(index)))
            row += [None, ""] if found is None else [found[0], f"{found[1]:.2f}-{found[2]:.2f}"]
        rows.append(tuple(row))
    return Section("best thresholds", columns, tuple(rows))


def _section_ifr(options: PaperOptions, store: RunStore, title: str, *, slow: bool) -> Section:
    columns = labels("theta")
    for name in SHAPES.values():
        columns += (Column("tokens/s", group=name, ours=True), Column("% of best", group=name))
    curves = {
        shape: {row["theta"]: row["value"] for row in sweep12(options, store, shape, slow=slow)} for shape in SHAPES
    }
    best = {shape: max(curve.values(), default=None) for shape, curve in curves.items()}
    rows = []
    for theta in THETAS:
        row: list[Value] = [f"{theta:.2f}"]
        for shape in SHAPES:
            value, top = curves[shape].get(theta), best[shape]
            row += [value, None if value is None or not top else 100 * value / top]
        rows.append(tuple(row))
    return Section(title, columns, tuple(rows))


# E.5: the estimators compared with a known hazard.


def _service_cell(options: PaperOptions, estimator: str, mean: int) -> RunSpec:
    device = options.device()
    model = options.model()
    policy = "eb" if estimator == "published" else f"eb:estimator={estimator}"
    return sweep_cell(
        device, model, policy, _BATCH, 0, num_prompts=options.num_prompts or 4000,
        input_len=_MEAN_INPUT, output_len=mean, length_distribution="geometric",
    )  # fmt: skip


def _cells_sensitivity(options: PaperOptions) -> list[RunSpec]:
    return [_service_cell(options, estimator, mean) for estimator in ESTIMATORS for mean in MEAN_OUTPUTS]


def _document_sensitivity(options: PaperOptions, store: RunStore) -> Document:
    from ebbench.runs.prepare import device_of

    costs = device_of(_service_cell(options, "published", 256)).calibration
    ratio = (costs.alpha_p, costs.alpha_d)
    notes = (
        f"After {EB_PAPER}, E.5, which sweeps theta (table13) and gives the estimator's error on two workloads.",
        f"Windows: {DRAWS} windows of W complete answers, geometric lengths, p0 known exactly. In service: each update "
        f"of one run (N = {_BATCH}, 4,000 requests), where completions are no fair sample: short answers come first. "
        "theta0: Prop. 3.1 at RTX PRO 6000 costs; its error is about half that of p0, as theta0 goes like its root.",
        *pending(store, _cells_sensitivity(options)),
    )
    sections = (_windows_section(ratio), _service_section(options, store, ratio))
    return Document("e5", "E.5: how far the hazard estimate is off", sections, notes)


def _columns(*first: str) -> tuple[Column, ...]:
    return (
        *labels(*first), Column("true p0 x 1000"), Column("median", group="p0 x 1000", ours=True),
        Column("5 %", group="p0 x 1000"), Column("95 %", group="p0 x 1000"), Column("bias", "change", "p0"),
        Column("true", group="theta0"), Column("at median p0", group="theta0", ours=True),
    )  # fmt: skip


def _line(names: tuple[str, ...], true_p0: float, found: list[float], costs: tuple[float, float]) -> tuple[Value, ...]:
    truth = base_threshold(true_p0, *costs)
    if not found:
        return (*names, 1e3 * true_p0, None, None, None, None, truth, None)
    low, median, high = (float(value) for value in np.percentile(found, (5, 50, 95)))
    return (
        *names, 1e3 * true_p0, 1e3 * median, 1e3 * low, 1e3 * high, median / true_p0 - 1, truth,
        base_threshold(median, *costs),
    )  # fmt: skip


def _windows_section(costs: tuple[float, float]) -> Section:
    rows = []
    for mean in MEAN_OUTPUTS:
        for estimator in ESTIMATORS:
            for window in WINDOWS:
                rng = np.random.default_rng([mean, window])
                found = [_estimate(estimator, rng.geometric(1 / mean, window)) for _ in range(DRAWS)]
                names = (f"geometric, mean {mean}", estimator, f"W = {window}")
                rows.append(_line(names, 1 / mean, [one.p0 for one in found if one is not None], costs))
    return Section("complete windows", _columns("lengths", "estimator", "window"), tuple(rows))


def _estimate(estimator: str, lengths: np.ndarray) -> HazardEstimate | None:
    maker = SlidingHazard if estimator == "published" else CensoredHazard
    one = maker(window=len(lengths))
    for length in lengths.tolist():
        one.observe(length)
    return one.estimate()


def _service_section(options: PaperOptions, store: RunStore, costs: tuple[float, float]) -> Section:
    rows = []
    for mean in MEAN_OUTPUTS:
        for estimator in ESTIMATORS:
            found = store.get(_service_cell(options, estimator, mean))
            rows.append(_line((f"geometric, mean {mean}", estimator), 1 / mean, _updates(found), costs))
    return Section("in service", _columns("lengths", "estimator"), tuple(rows))


def _updates(found: Measured | None) -> list[float]:
    """p0 at every update of a run."""
    if found is None:
        return []
    table = found.run.table("decisions", ["kind", "p0"])
    updates = table.filter(pc.equal(table["kind"], "update"))["p0"].drop_null()
    return [float(value) for value in updates.to_pylist()]


E3 = PaperTable(
    "e3", "rising against constant hazard (E.3)", figure12_cells, _document_ifr, FIGURE12.reads, whole=False,
    published_on=PUBLISHED_E2,
)  # fmt: skip
E5 = PaperTable(
    "e5", "how far the hazard estimate is off (E.5)", _cells_sensitivity, _document_sensitivity,
    ("device", "model", "num_prompts"), published_on=Published((DEFAULT_DEVICE,), (DEFAULT_MODEL,)),
)  # fmt: skip
