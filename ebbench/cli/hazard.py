"""``ebbench hazard``: the probability per token that a response ends, and whether it rises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import refuse_unused
from ebbench.cli.run_settings import setting
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL

if TYPE_CHECKING:
    from ebbench.hazard import Hazard, OutputLengths
    from ebbench.papers.table import PaperTable
    from vllm_eb.hazard import HazardEstimate
    from vllm_eb.theory import Threshold

EXPERIMENTS = {"ifr": "e3", "sensitivity": "e5"}
_OF_LENGTHS = (
    "what", "source", "seed", "output_len", "length_distribution", "device", "model", "max_num_seqs", "plot", "as_json",
)  # fmt: skip
_OF_EXPERIMENTS = ("run", "runs")


def hazard(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(help="A workload, log:FILE, a run directory, or a file with one output length per line.")
    ] = "",
    source: Annotated[str, setting("source")] = "auto",
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", "-n", help="Sessions to sample.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample.")] = 0,
    output_len: Annotated[int | None, setting("output_len")] = None,
    length_distribution: Annotated[str | None, setting("length_distribution")] = None,
    device: Annotated[
        str, typer.Option("--device", help="Device whose costs give the threshold.", autocompletion=completion.devices)
    ] = DEFAULT_DEVICE,
    model: Annotated[
        str, typer.Option("--model", help="Model whose costs give the threshold.", autocompletion=completion.models)
    ] = DEFAULT_MODEL,
    max_num_seqs: Annotated[int, setting("max_num_seqs")] = 1024,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw to FILE.pdf, .svg or .png.")] = None,
    experiment: Annotated[
        str, typer.Option("--experiment", help="ifr (appendix E.3) or sensitivity (E.5), instead of a workload.")
    ] = "",
    run: Annotated[bool, typer.Option("--run", help="Run the experiment's missing cells.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Directory of the experiment's runs.")] = Path("runs/papers"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show the empirical completion hazard, tests of its trend (Mann-Kendall, regression), and the fit p0 + eta t."""
    from ebbench.engines.checks import check_counts
    from ebbench.errors import UsageError

    check_counts(num_prompts=num_prompts, output_len=output_len, max_num_seqs=max_num_seqs)
    if experiment:
        table = _table(experiment)
        refuse_unused(context, _OF_LENGTHS, (), f"--experiment {experiment} (`ebbench tables {table.name}`)")
        _experiment(table, runs, num_prompts, run=run)
        return
    refuse_unused(context, _OF_EXPERIMENTS, (), "without --experiment this command")
    if not what:
        raise UsageError("give a workload, log:FILE, a run directory, or --experiment ifr")
    from ebbench.hazard import analyse_lengths, read_lengths

    lengths = read_lengths(
        what, source=source, num_prompts=num_prompts, seed=seed, output_len=output_len,
        length_distribution=length_distribution,
    )  # fmt: skip
    found = analyse_lengths(lengths.output_tokens)
    thresholds = {
        name: _threshold(fit, device, model, max_num_seqs)
        for name, fit in (("published", found.published), ("censored", found.censored))
    }
    if plot is not None:
        _plot(found, lengths.name, plot)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(lengths, found, thresholds), indent=2, allow_nan=False) + "\n")
        return
    _print(lengths, found, thresholds, f"{model} on {device}, N = {max_num_seqs}")
    if plot is not None:
        typer.echo(f"drawn to {plot}")


def _table(experiment: str) -> PaperTable:
    from ebbench.errors import UnknownNameError
    from ebbench.papers.registry import find_table

    if experiment not in EXPERIMENTS:
        raise UnknownNameError("experiment", experiment, EXPERIMENTS)
    return find_table(EXPERIMENTS[experiment])


def _experiment(table: PaperTable, runs: Path, num_prompts: int | None, *, run: bool) -> None:
    from ebbench.papers.table import PaperOptions, make_runs
    from ebbench.render.documents import rendered
    from ebbench.runs.store import RunStore

    store, options = RunStore(runs), PaperOptions(num_prompts=num_prompts)
    if run:
        make_runs(table, options, store, workers=None, quiet=False)
    sys.stdout.write(rendered(table.document(options, store), "rich"))


def _threshold(fit: HazardEstimate | None, device: str, model: str, max_num_seqs: int) -> Threshold | None:
    from ebbench.devices.loader import load_device
    from vllm_eb.theory import optimal_threshold

    if fit is None:
        return None
    costs = load_device(device, model).calibration
    return optimal_threshold(fit.p0, costs.alpha_p, costs.alpha_d, eta=fit.eta, beta_d=costs.beta_d, n=max_num_seqs)


def _as_dict(lengths: OutputLengths, found: Hazard, thresholds: dict[str, Threshold | None]) -> dict[str, Any]:
    from dataclasses import asdict

    fits = {"published": found.published, "censored": found.censored}
    return {
        "name": lengths.name,
        "source": lengths.source,
        "samples": found.samples,
        "mean": found.mean,
        "std": found.std,
        "mean_input": lengths.mean_input,
        "limit": found.limit,
        "censored_samples": found.censored_samples,
        "t_reliable": found.t_reliable,
        "untested": found.untested,
        "tests": None if found.tests is None else asdict(found.tests) | {"verdict": found.tests.verdict},
        "fits": {
            name: None if fit is None else {"p0": fit.p0, "eta": fit.eta, "mean": fit.mean, "samples": fit.samples}
            for name, fit in fits.items()
        },
        "thresholds": {name: None if one is None else asdict(one) for name, one in thresholds.items()},
        "t": found.t.tolist(),
        "h": found.h.tolist(),
        "survivors": found.survivors.tolist(),
    }


def _print(lengths: OutputLengths, found: Hazard, thresholds: dict[str, Threshold | None], where: str) -> None:
    from rich.table import Table

    from ebbench.render.documents import Console

    console = Console(highlight=False)
    console.print(f"{lengths.name}: {found.samples:,} responses ({lengths.source})", markup=False, style="bold")
    console.print(
        f"output tokens: mean {found.mean:,.1f}, standard deviation {found.std:,.1f}, longest {found.t[-1]:,}"
    )
    if found.limit is not None:
        share = found.censored_samples / found.samples
        console.print(
            f"{share:.1%} of the responses are cut at {found.limit:,} tokens and count as not yet ended there"
        )
    console.print(_profile(found), markup=False)
    tests = found.tests
    if tests is None:
        console.print(found.untested)
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
    for name, fit in (("published", found.published), ("censored", found.censored)):
        one = thresholds[name]
        if fit is not None and one is not None:
            table.add_row(f"{name} estimator", f"{fit.p0:.3e}", f"{fit.eta:.3e}", f"{one.theta0:.3f}",
                          f"{one.delta_theta:+.3f}", f"{one.theta_star:.3f}")  # fmt: skip
    console.print(table)
    console.print(f"theta: share of slots idle at which to refill, {where}", style="dim", markup=False)


def _profile(found: Hazard) -> str:
    from ebbench.render.numbers import spark

    _, rate = found.binned(30)
    top = float(rate.max()) or 1.0
    bars = spark(tuple(float(value) / top for value in rate))
    return f"hazard per token, t from 1 to {found.t_reliable:,}: {bars} (highest {top:.2e})"


def _p(value: float) -> str:
    return "below 1e-16" if value < 1e-16 else f"{value:.2g}"


def _plot(found: Hazard, name: str, path: Path) -> None:
    from ebbench.errors import UsageError
    from ebbench.papers.eb.lengths import hazard_panels
    from ebbench.render.figures import FORMATS, save

    suffix = path.suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise UsageError(f"--plot {path} must end in one of {', '.join('.' + one for one in FORMATS)}")
    save(hazard_panels(found, name), path.with_suffix(""), [suffix])
