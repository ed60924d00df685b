"""``ebbench figures``: the papers' figures with our results, and timelines of any run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli import paper_flags as paper
from ebbench.cli.options import opt, refuse_unused, runs_meant

if TYPE_CHECKING:
    from ebbench.papers.table import PaperFigure, PaperOptions
    from ebbench.runs.store import RunStore

_CHOICES = ("device", "model", "workload", "num_prompts", "seeds", "outputs", "source")


def figures(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="list, figure1 to figure12; timeline or slo for your own runs.")] = "list",
    paths: Annotated[list[Path] | None, typer.Argument(help="Runs, for timeline and slo.")] = None,
    run: paper.Run = False,
    runs: paper.Runs = Path("runs/papers"),
    workers: paper.Workers = None,
    device: paper.Device = None,
    model: paper.Model = None,
    workload: paper.Workload = None,
    num_prompts: paper.NumPrompts = None,
    seeds: Annotated[
        int | None, opt("--seeds", help="Runs per point, for figure 12: 3 (default) or more.", panel=paper.CHOICE)
    ] = None,
    outputs: Annotated[
        str, opt("--outputs", help="forced or profile; see `ebbench tables`.", panel=paper.CHOICE)
    ] = "forced",
    source: Annotated[
        str, opt("--source", help="Lengths of figure 11: profile, hub, auto, or file:PATH.", panel=paper.CHOICE)
    ] = "profile",
    formats: Annotated[str, opt("--format", "-f", help="Any of pdf,svg,png.", panel=paper.OUTPUT)] = "pdf,svg,png",
    output_dir: Annotated[Path, opt("--output-dir", "-o", help="Directory of the figures.", panel=paper.OUTPUT)] = Path(
        "figures"
    ),
    quiet: paper.Quiet = False,
) -> None:
    """Draw a published figure with our results, or the timeline of a run: mode, k*, N*, crossover, queue, KV."""
    from ebbench.engines.checks import check_counts
    from ebbench.papers.registry import FIGURES_OF_RUNS, find_figure
    from ebbench.papers.table import PaperOptions
    from ebbench.runs.store import RunStore

    if name == "list":
        refuse_unused(context, ("run", "paths", *_CHOICES), (), "without a figure's name `ebbench figures`")
        _list()
        return
    chosen = _formats(formats)
    if name in FIGURES_OF_RUNS:
        refuse_unused(context, ("run", *_CHOICES), (), f"`ebbench figures {name}`")
        _of_runs(name, paths or [], output_dir, chosen)
        return
    figure = find_figure(name)
    check_counts(seeds=seeds, num_prompts=num_prompts)
    refuse_unused(context, ("paths", *_CHOICES), figure.reads, figure.name)
    options = PaperOptions(
        tuple(device or ()), tuple(model or ()), tuple(workload or ()), num_prompts=num_prompts, seeds=seeds,
        outputs=paper.outputs(outputs), source=source,
    )  # fmt: skip
    options.check_names(figure.workloads)
    _draw(figure, options, RunStore(runs), output_dir, chosen, run=run, workers=workers, quiet=quiet)


def _formats(text: str) -> list[str]:
    """The formats to write, checked. Raises UsageError, UnknownNameError."""
    from ebbench.errors import UnknownNameError, UsageError
    from ebbench.render.figures import FORMATS

    chosen = [part.strip() for part in text.split(",") if part.strip()]
    if not chosen:
        raise UsageError(f"--format is empty; write any of {','.join(FORMATS)}")
    for wanted in chosen:
        if wanted not in FORMATS:
            raise UnknownNameError("figure format", wanted, FORMATS)
    return chosen


def _list() -> None:
    from ebbench.papers.registry import FIGURES

    for figure in FIGURES:
        typer.echo(f"{figure.name:10} {figure.title}")
    typer.echo(f"{'timeline':10} any run with recorded steps: ebbench figures timeline RUN")
    typer.echo(f"{'slo':10} attainment of any run over TTFT and TPOT targets: ebbench figures slo RUN")


def _draw(
    figure: PaperFigure,
    options: PaperOptions,
    store: RunStore,
    folder: Path,
    formats: list[str],
    *,
    run: bool,
    workers: int | None,
    quiet: bool,
) -> None:
    from ebbench.errors import DataError
    from ebbench.render.figures import save

    cells = figure.cells(options)
    if run:
        from ebbench.papers.table import make_runs

        make_runs(figure, options, store, workers=workers, quiet=quiet)
    missing = len(store.missing(cells))
    if missing:
        raise DataError(
            f"{missing} of {len(set(cells))} runs of {figure.name} are not stored in {store.root}; add --run"
        )
    chart, caption = figure.drawn(options, store)
    for path in save(chart, folder / figure.name, formats):
        typer.echo(str(path))
    typer.echo(caption, err=True)


def _of_runs(name: str, paths: list[Path], folder: Path, formats: list[str]) -> None:
    from ebbench.analysis.phases import load_runs
    from ebbench.errors import UsageError
    from ebbench.records.run import slug
    from ebbench.render.figures import save, surface_chart
    from ebbench.render.timeline import make_timeline, timeline_chart

    if not paths:
        raise UsageError(f"`ebbench figures {name}` needs a run: ebbench figures {name} RUN")
    for loaded in load_runs(runs_meant(paths)):
        chart = timeline_chart(make_timeline(loaded)) if name == "timeline" else surface_chart(loaded)
        for path in save(chart, folder / f"{name}-{slug(loaded.path.name)}", formats, legend="top"):
            typer.echo(str(path))
