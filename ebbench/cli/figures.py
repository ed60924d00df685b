"""``ebbench figures``: the papers' figures with our results, and timelines of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.declare import OUTPUT
from ebbench.config.options import OptionsOf, grouped, refuse_unused, under
from ebbench.errors import UsageError
from ebbench.papers.options import DEFAULT_FOLDER, MakeMissing, PaperOptions, Quiet, Stored, Workers

_CHOICES = ("devices", "models", "workloads", "num_prompts", "seeds", "outputs", "source")
_HELPS = {
    "seeds": "Runs per point, for figure 12: 3 (default) or more.",
    "outputs": "forced or profile; see `ebbench tables`.",
    "source": "Lengths of figure 11: profile, hub, auto, or file:PATH.",
}
output = under(OUTPUT)


@grouped
def figures(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(help="list, figure1 to figure12; timeline or slo for your own runs.")] = "list",
    paths: Annotated[list[Path] | None, typer.Argument(help="Runs, for timeline and slo.")] = None,
    run: MakeMissing = False,
    runs: Stored = DEFAULT_FOLDER,
    workers: Workers = None,
    options: Annotated[PaperOptions, OptionsOf(helps=_HELPS, only=_CHOICES)],
    formats: Annotated[str, output("--format", "-f", help="Any of pdf,svg,png.")] = "pdf,svg,png",
    output_dir: Annotated[Path, output("--output-dir", "-o", help="Directory of the figures.")] = Path("figures"),
    quiet: Quiet = False,
) -> None:
    """Draw a published figure with our results, or the timeline of a run: mode, k*, N*, crossover, queue, KV."""
    from ebbench.papers.registry import FIGURES_OF_RUNS, charts_of_runs, find_figure, listed_figures
    from ebbench.papers.table import drawn
    from ebbench.render.figures import FORMATS, formats_of, save
    from ebbench.runs.store import RunStore

    if name == "list":
        refuse_unused(context, ("run", "paths", *_CHOICES), (), "without a figure's name `ebbench figures`")
        for known, title in listed_figures().items():
            typer.echo(f"{known:10} {title}")
        return
    chosen = formats_of(formats)
    if output_dir.suffix.removeprefix(".") in FORMATS:
        raise UsageError(f"--output-dir {output_dir} is a directory, for several files; --format says of which kind")
    if name in FIGURES_OF_RUNS:
        refuse_unused(context, ("run", *_CHOICES), (), f"`ebbench figures {name}`")
        for stem, chart in charts_of_runs(name, paths or []):
            for path in save(chart, output_dir / stem, chosen, legend="top"):
                typer.echo(str(path))
        return
    figure = find_figure(name)
    refuse_unused(context, ("paths", *_CHOICES), figure.reads, figure.name)
    options.check_names(figure.workloads)
    chart, caption = drawn(figure, options, RunStore(runs), run=run, workers=workers, quiet=quiet)
    for path in save(chart, output_dir / figure.name, chosen):
        typer.echo(str(path))
    typer.echo(caption, err=True)
