"""Tests whether the completion hazard rises, on the empirical hazard (Zhang et al. 2026, appendix E.4).

Both tests use ``h(t)`` up to the 95th percentile of the lengths, as in the paper: Mann-Kendall (no trend against a
monotone one) and linear regression (zero slope against non-zero), from ``pymannkendall`` and ``scipy``.

If more than 1 % of the responses have the maximum length, that length is a limit: these responses are right-censored,
so they count as survivors there and not as completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from rich.table import Table

from ebbench.devices.loader import load_device
from ebbench.errors import DataError, InputFileError, UsageError
from ebbench.foreign.documents import DOCUMENT_BYTES, read_text
from ebbench.installation import need
from ebbench.records.run import MANIFEST, Run
from ebbench.render.documents import Console
from ebbench.render.numbers import spark
from ebbench.workloads.log_report import describe_log
from ebbench.workloads.options import is_recorded, recorded_file
from ebbench.workloads.trace import read_trace
from vllm_eb.hazard import MIN_SURVIVORS, CensoredHazard, HazardEstimate, SlidingHazard, empirical_hazard
from vllm_eb.theory import Threshold, optimal_threshold

LEVEL = 0.05
QUANTILE = 0.95
LIMIT_SHARE = 0.01
_MIN_POINTS = 4  # neither test is meaningful with fewer points


@dataclass(frozen=True)
class TrendTests:
    """Two tests of the trend of h(t) for t in [t_min, t_max] tokens. ``tau`` is Kendall's; ``slope`` is per token^2."""

    t_min: int
    t_max: int
    points: int
    tau: float
    mann_kendall_p: float
    slope: float
    intercept: float
    regression_p: float
    r_squared: float

    @property
    def rising(self) -> bool:
        """Whether both tests find a rising trend at the 5 % level."""
        mann_kendall = self.tau > 0 and self.mann_kendall_p < LEVEL
        return mann_kendall and self.slope > 0 and self.regression_p < LEVEL

    @property
    def trend(self) -> str:
        """The trend that both tests find, one of TRENDS."""
        if self.rising:
            return "increasing failure rate"
        if self.tau < 0 and self.mann_kendall_p < LEVEL and self.slope < 0 and self.regression_p < LEVEL:
            return "decreasing failure rate"
        return "undecided" if min(self.mann_kendall_p, self.regression_p) < LEVEL else "no trend found"

    @property
    def verdict(self) -> str:
        """The result in words."""
        return self.trend + TRENDS[self.trend]


TRENDS = {
    "increasing failure rate": " (IFR): both tests find a rising hazard",
    "decreasing failure rate": " (DFR): both tests find a falling hazard",
    "undecided": ": the two tests disagree",
    "no trend found": ": a constant hazard (CFR) is not rejected",
}
"""Trends of a hazard, and what follows them in a sentence."""


@dataclass(frozen=True)
class Hazard:
    """Empirical hazard of output lengths (tokens), the tests, and both estimators' fits ``p0 + eta t``.

    ``survivors[i]`` requests have at least ``t[i]`` tokens. Points above ``t_reliable`` (the 95th percentile or the
    limit) rest on few requests. ``limit``: the length at which responses were cut, with ``censored_samples`` of them;
    None if there is none. The ``published`` estimator treats cut responses as complete, as it does in service. If all
    responses are equally long, there are neither tests nor fits.
    """

    t: npt.NDArray[np.int64]
    h: npt.NDArray[np.float64]
    survivors: npt.NDArray[np.int64]
    t_reliable: int
    limit: int | None
    censored_samples: int
    samples: int
    mean: float
    std: float
    tests: TrendTests | None
    published: HazardEstimate | None
    censored: HazardEstimate | None

    @property
    def untested(self) -> str | None:
        """Why there are no tests; None if there are."""
        if self.tests is not None:
            return None
        if self.std == 0:
            return f"every response has {self.t[-1]:,} tokens: there is no trend to test and no hazard to fit"
        return "too few different lengths to test for a trend"

    def binned(self, bins: int = 40) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Midpoints (tokens) and hazards per token of equal bins over the reliable range: completions over tokens at
        risk."""
        inside = self.t <= self.t_reliable
        edges = np.linspace(0, self.t_reliable, min(bins, self.t_reliable) + 1)
        bin_index = np.clip(np.searchsorted(edges, self.t[inside], "left") - 1, 0, len(edges) - 2)
        ended = np.bincount(bin_index, self.h[inside] * self.survivors[inside], len(edges) - 1)
        exposed = np.bincount(bin_index, self.survivors[inside].astype(float), len(edges) - 1)
        return (edges[:-1] + edges[1:]) / 2, ended / np.maximum(exposed, 1)


def analyse_lengths(lengths: npt.ArrayLike) -> Hazard:
    """Hazard, tests and fits of output lengths (tokens; at least one)."""
    outputs = np.asarray(lengths, np.int64)
    varied = np.ptp(outputs) > 0
    ended, cut, limit = split_at_limit(outputs)
    t, h, survivors = empirical_hazard(ended, cut)
    return Hazard(
        t=t,
        h=h,
        survivors=survivors,
        t_reliable=_reliable(outputs, limit),
        limit=limit,
        censored_samples=len(cut),
        samples=len(outputs),
        mean=float(outputs.mean()),
        std=float(outputs.std()),
        tests=trend_tests(outputs),
        published=_fit(SlidingHazard(window=len(outputs)), outputs, outputs[:0]) if varied else None,
        censored=_fit(CensoredHazard(window=len(outputs)), ended, cut) if varied else None,
    )


def split_at_limit(outputs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int | None]:
    """Responses that ended, responses cut at a limit, and the limit (None if there is none)."""
    greatest = int(outputs.max())
    cut = outputs == greatest
    if cut.all() or cut.mean() <= LIMIT_SHARE:
        return outputs, outputs[:0], None
    return outputs[~cut], outputs[cut], greatest


def trend_tests(lengths: npt.ArrayLike) -> TrendTests | None:
    """Both tests; None if all lengths are equal or there are too few points. Raises EbbenchError without scipy."""
    outputs = np.asarray(lengths, np.int64)
    if np.ptp(outputs) == 0:  # the hazard is zero before that length: no trend
        return None
    ended, cut, limit = split_at_limit(outputs)
    t, h, survivors = empirical_hazard(ended, cut)
    last = _reliable(outputs, limit)
    keep = (t <= last) & (survivors >= MIN_SURVIVORS)
    if int(keep.sum()) < _MIN_POINTS or np.ptp(h[keep]) == 0:
        return None
    mann_kendall, linregress = _tests()
    trend = mann_kendall(h[keep], alpha=LEVEL)
    line = linregress(t[keep], h[keep])
    return TrendTests(
        t_min=1,
        t_max=last,
        points=int(keep.sum()),
        tau=float(trend.Tau),
        mann_kendall_p=float(trend.p),
        slope=float(line.slope),
        intercept=float(line.intercept),
        regression_p=float(line.pvalue),
        r_squared=float(line.rvalue) ** 2,
    )


def _reliable(outputs: npt.NDArray[np.int64], limit: int | None) -> int:
    last = int(np.quantile(outputs, QUANTILE, method="lower"))
    return last if limit is None else min(last, limit - 1)


def _fit(
    estimator: SlidingHazard | CensoredHazard, ended: npt.NDArray[np.int64], running: npt.NDArray[np.int64]
) -> HazardEstimate | None:
    for length in ended.tolist():
        estimator.observe(length)
    return estimator.estimate(running)


def _tests() -> tuple[Any, Any]:
    purpose = "testing a hazard for a trend"
    kendall = need("pymannkendall", purpose)
    return kendall.original_test, need("scipy.stats", purpose).linregress


# Reads output lengths for a hazard analysis: from a workload, a trace, a list of numbers or a stored run.


@dataclass(frozen=True)
class OutputLengths:
    """Output tokens of complete responses, and their source."""

    output_tokens: npt.NDArray[np.int64]
    mean_input: float | None
    name: str
    source: str


def read_lengths(
    what: str, *, source: str = "auto", num_prompts: int | None = None, seed: int = 0, **plan: str | int | None
) -> OutputLengths:
    """Lengths of a workload name, ``log:FILE``, a TOML file, a run directory, or a file of numbers or of a trace.

    The other arguments are those of build_plan. Raises UsageError, InputFileError, DataError.
    """
    path = Path(what).expanduser()
    chosen = {"source": None if source == "auto" else source, "num_prompts": num_prompts, "seed": seed or None, **plan}
    if (path / MANIFEST).exists():
        _refuse(chosen, f"{path} is a run")
        return _of_run(path)
    if path.is_dir():
        raise DataError(f"{path}: holds no {MANIFEST}; give one run directory")
    if path.is_file() and path.suffix != ".toml":
        numbers = _numbers(path)
        if numbers is not None:
            _refuse(chosen, f"{path} is a list of lengths")
            return OutputLengths(numbers, None, path.name, f"file:{path}")
        what = f"trace:{path}"
    return _of_plan(what, source, num_prompts, seed, plan)


def _refuse(chosen: Mapping[str, str | int | None], owner: str) -> None:
    """Raise UsageError for options that do not apply to a stored run or a list."""
    given = ["--" + name.replace("_", "-") for name, value in chosen.items() if value is not None]
    if given:
        raise UsageError(f"{owner} and is used completely; leave out {', '.join(given)}")


def _of_run(path: Path) -> OutputLengths:
    run = Run.load(path)
    table = run.table("requests", ["status", "input_tokens", "output_tokens"])
    done = table.filter(pc.equal(table["status"], "ok"))
    if not done.num_rows:
        raise DataError(f"{path}: no request completed, so there are no output lengths")
    outputs = done["output_tokens"].to_numpy().astype(np.int64)
    return OutputLengths(outputs, float(pc.mean(done["input_tokens"]).as_py()), path.name, f"run:{path}")


def _of_plan(what: str, source: str, num_prompts: int | None, seed: int, plan: dict[str, Any]) -> OutputLengths:
    from ebbench.workloads import build_plan

    # A closed loop, since only lengths are needed, not the times of a trace.
    scenario = "saturated" if is_recorded(what) else None
    built = build_plan(what, scenario, num_prompts=num_prompts, seed=seed, source=source, with_text=False, **plan)
    outputs = built.table["output_tokens"].to_numpy().astype(np.int64)
    mean_input = float(built.table["input_tokens"].to_numpy().mean())
    return OutputLengths(outputs, mean_input, what, str(built.facts.get("source", "")))


def _numbers(path: Path) -> npt.NDArray[np.int64] | None:
    """One length per line after an optional heading; None if the file has another format. Raises InputFileError."""
    lines = [line.strip() for line in read_text(path, DOCUMENT_BYTES).splitlines()]
    filled = [line for line in lines if line]
    if filled and not filled[0].isdigit() and len(filled) > 1 and filled[1].isdigit():
        filled = filled[1:]
    if not filled:
        raise UsageError(f"{path} is empty; give one output length per line, or a trace")
    if not filled[0].isdigit():
        return None
    for number, line in enumerate(lines, start=1):
        if line in filled and not (line.isdigit() and int(line) >= 1):
            raise InputFileError(path, f"expected an output length of at least one token, found {line[:40]!r}", number)
    return np.array([int(line) for line in filled], np.int64)


def fitted_thresholds(analysed: Hazard, device: str, model: str, max_num_seqs: int) -> dict[str, Threshold | None]:
    """The optimal threshold of each fit with the costs of a device; None where there is no fit."""
    fits = {"published": analysed.published, "censored": analysed.censored}
    return {name: _threshold(fit, device, model, max_num_seqs) for name, fit in fits.items()}


def _threshold(fit: HazardEstimate | None, device: str, model: str, max_num_seqs: int) -> Threshold | None:
    if fit is None:
        return None
    costs = load_device(device, model).calibration
    return optimal_threshold(fit.p0, costs.alpha_p, costs.alpha_d, eta=fit.eta, beta_d=costs.beta_d, n=max_num_seqs)


def as_dict(lengths: OutputLengths, analysed: Hazard, thresholds: dict[str, Threshold | None]) -> dict[str, Any]:
    """One JSON object."""
    fits = {"published": analysed.published, "censored": analysed.censored}
    return {
        "name": lengths.name,
        "source": lengths.source,
        "samples": analysed.samples,
        "mean": analysed.mean,
        "std": analysed.std,
        "mean_input": lengths.mean_input,
        "limit": analysed.limit,
        "censored_samples": analysed.censored_samples,
        "t_reliable": analysed.t_reliable,
        "untested": analysed.untested,
        "tests": None if analysed.tests is None else asdict(analysed.tests) | {"verdict": analysed.tests.verdict},
        "fits": {
            name: None if fit is None else {"p0": fit.p0, "eta": fit.eta, "mean": fit.mean, "samples": fit.samples}
            for name, fit in fits.items()
        },
        "thresholds": {
            name: None if threshold is None else asdict(threshold) for name, threshold in thresholds.items()
        },
        "t": analysed.t.tolist(),
        "h": analysed.h.tolist(),
        "survivors": analysed.survivors.tolist(),
    }


def print_hazard(
    lengths: OutputLengths, analysed: Hazard, thresholds: dict[str, Threshold | None], where: str, console: Console
) -> None:
    """Print the hazard, the tests of its trend, and the thresholds; ``where``: the device that they are for."""
    console.print(f"{lengths.name}: {analysed.samples:,} responses ({lengths.source})", markup=False, style="bold")
    console.print(
        f"output tokens: mean {analysed.mean:,.1f}, standard deviation {analysed.std:,.1f}, longest {analysed.t[-1]:,}"
    )
    if analysed.limit is not None:
        share = analysed.censored_samples / analysed.samples
        console.print(
            f"{share:.1%} of the responses are cut at {analysed.limit:,} tokens and count as not yet ended there"
        )
    console.print(_profile(analysed), markup=False)
    tests = analysed.tests
    if tests is None:
        console.print(analysed.untested)
    else:
        console.print(f"trend of h(t) for t up to {tests.t_max:,} (95th percentile or limit), {tests.points:,} points:")
        console.print(f"  Mann-Kendall: tau {tests.tau:+.3f}, p {_p(tests.mann_kendall_p)}")
        console.print(f"  regression: slope {tests.slope:+.3g} per token², p {_p(tests.regression_p)}, "
                      f"R² {tests.r_squared:.3f}")  # fmt: skip
        console.print(f"  {tests.verdict}", style="bold")
    if lengths.source == "profile":
        console.print("drawn from a length profile: this tests the profile's shape, not the data set (--source hub, "
                      "file:PATH)")  # fmt: skip
    if not any(thresholds.values()):
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("fit h(t) = p0 + eta t", "p0", "eta", "theta0", "delta", "theta*"):
        table.add_column(column, justify="left" if column.startswith("fit") else "right")
    for name, fit in (("published", analysed.published), ("censored", analysed.censored)):
        threshold = thresholds[name]
        if fit is not None and threshold is not None:
            table.add_row(f"{name} estimator", f"{fit.p0:.3e}", f"{fit.eta:.3e}", f"{threshold.theta0:.3f}",
                          f"{threshold.delta_theta:+.3f}", f"{threshold.theta_star:.3f}")  # fmt: skip
    console.print(table)
    console.print(f"theta: share of slots idle at which to refill, {where}", style="dim", markup=False)


def _profile(analysed: Hazard) -> str:
    _, rate = analysed.binned(30)
    top = float(rate.max()) or 1.0
    bars = spark(tuple(float(value) / top for value in rate))
    return f"hazard per token, t from 1 to {analysed.t_reliable:,}: {bars} (highest {top:.2e})"


def _p(value: float) -> str:
    return "below 1e-16" if value < 1e-16 else f"{value:.2g}"


def log_facts(name: str, columns: str | None, tokenizer: str | None, time_unit: str | None) -> dict[str, Any] | None:
    """What is known of ``log:FILE``; None for another workload. Raises UsageError, InputFileError."""
    path = recorded_file(name)
    if path is None:
        return None
    trace = read_trace(path, columns, tokenizer)
    hazard = analyse_lengths(trace.requests.output_tokens)
    tests = hazard.tests
    trend = {"untested": hazard.untested} if tests is None else {"rising": tests.rising, "verdict": tests.verdict}
    return describe_log(trace, time_unit) | {"hazard": trend}
