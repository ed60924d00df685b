"""``ebbench hazard``: the probability per token that a response ends, and whether it rises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.config.options import completing, refuse_unused
from ebbench.spec.commands import setting

if TYPE_CHECKING:
    from ebbench.hazard import Hazard
    from ebbench.papers.table import PaperTable

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
        str,
        typer.Option("--device", help="Device whose costs give the threshold.", autocompletion=completing("devices")),
    ] = DEFAULT_DEVICE,
    model: Annotated[
        str, typer.Option("--model", help="Model whose costs give the threshold.", autocompletion=completing("models"))
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
    from ebbench.engines.base import check_counts
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
    from ebbench.hazard import analyse_lengths, as_dict, fitted_thresholds, print_hazard, read_lengths
    from ebbench.render.documents import Console

    lengths = read_lengths(
        what, source=source, num_prompts=num_prompts, seed=seed, output_len=output_len,
        length_distribution=length_distribution,
    )  # fmt: skip
    analysed = analyse_lengths(lengths.output_tokens)
    thresholds = fitted_thresholds(analysed, device, model, max_num_seqs)
    if plot is not None:
        _plot(analysed, lengths.name, plot)
    if as_json:
        sys.stdout.write(json.dumps(as_dict(lengths, analysed, thresholds), indent=2, allow_nan=False) + "\n")
        return
    where = f"{model} on {device}, N = {max_num_seqs}"
    print_hazard(lengths, analysed, thresholds, where, Console(highlight=False))
    if plot is not None:
        typer.echo(f"drawn to {plot}")


def _table(experiment: str) -> PaperTable:
    from ebbench.errors import check_known
    from ebbench.papers.registry import find_table

    check_known("experiment", experiment, EXPERIMENTS)
    return find_table(EXPERIMENTS[experiment])


def _experiment(table: PaperTable, runs: Path, num_prompts: int | None, *, run: bool) -> None:
    from ebbench.papers.options import PaperOptions
    from ebbench.papers.table import make_runs
    from ebbench.render.documents import rendered
    from ebbench.runs.store import RunStore

    store, options = RunStore(runs), PaperOptions(num_prompts=num_prompts)
    if run:
        make_runs(table, options, store, workers=None, quiet=False)
    sys.stdout.write(rendered(table.document(options, store), "rich"))


def _plot(analysed: Hazard, name: str, path: Path) -> None:
    from ebbench.papers.eb.lengths import hazard_panels
    from ebbench.render.figures import check_plot, save_plot

    check_plot(path)
    save_plot(hazard_panels(analysed, name), path)
