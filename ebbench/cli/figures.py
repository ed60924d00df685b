"""``ebbench figures``: the papers' figures with ours in them, and the timeline of any run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ebbench.papers.store import CellStore
    from ebbench.papers.table import Wish

_CHOICE, _RUNS, _OUTPUT = "What to run", "Runs", "Output"


def _opt(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=help, rich_help_panel=panel)
    return option


def figures(
    name: Annotated[
        str, typer.Argument(help="list, figure1, 3, 4, 5, 6, 11, 12; timeline or slo for runs of your own.")
    ] = "list",
    paths: Annotated[list[Path] | None, typer.Argument(help="Runs, for timeline and slo.")] = None,
    run: Annotated[bool, _opt("--run", help="Make the runs that are missing.", panel=_RUNS)] = False,
    runs: Annotated[Path, _opt("--runs", help="Where runs are kept.", panel=_RUNS)] = Path("runs/papers"),
    workers: Annotated[int | None, _opt("--workers", help="Processes; default: one a core.", panel=_RUNS)] = None,
    device: Annotated[list[str] | None, _opt("--device", help="Repeat for several.", panel=_CHOICE)] = None,
    model: Annotated[list[str] | None, _opt("--model", help="Repeat for several.", panel=_CHOICE)] = None,
    workload: Annotated[list[str] | None, _opt("--workload", help="Repeat for several.", panel=_CHOICE)] = None,
    num_prompts: Annotated[
        int | None,
        _opt("--num-prompts", "-n", help="Fewer requests a run than the paper's, for a quick look.", panel=_CHOICE),
    ] = None,
    seeds: Annotated[int, _opt("--seeds", help="Runs a point, for figure 12 (at least 3).", panel=_CHOICE)] = 3,
    outputs: Annotated[
        str, _opt("--outputs", help="forced or profile, see `ebbench tables`.", panel=_CHOICE)
    ] = "forced",
    source: Annotated[
        str, _opt("--source", help="Lengths of figure 11: profile, hub or auto.", panel=_CHOICE)
    ] = "profile",
    formats: Annotated[str, _opt("--format", "-f", help="Any of pdf,svg,png.", panel=_OUTPUT)] = "pdf,svg,png",
    output_dir: Annotated[Path, _opt("--output-dir", "-o", help="Where figures go.", panel=_OUTPUT)] = Path("figures"),
    quiet: Annotated[bool, _opt("--quiet", "-q", help="No progress.", panel=_OUTPUT)] = False,
) -> None:
    """Draw a published figure with ours in it, or the timeline of a run: mode, k*, N*, crossover, queue, KV."""
    from ebbench.errors import UnknownNameError
    from ebbench.papers.store import CellStore
    from ebbench.papers.table import Wish

    chosen = [part.strip() for part in formats.split(",") if part.strip()]
    if name == "list":
        _list()
        return
    if name in ("timeline", "slo"):
        _of_runs(name, paths or [], output_dir, chosen)
        return
    if outputs not in ("forced", "profile"):
        raise UnknownNameError("kind of output lengths", outputs, ("forced", "profile"))
    wish = Wish(
        tuple(device or ()), tuple(model or ()), tuple(workload or ()), num_prompts=num_prompts, seeds=seeds,
        outputs=outputs, source=source,  # type: ignore[arg-type]
    )  # fmt: skip
    _draw(name, wish, CellStore(runs), output_dir, chosen, run=run, workers=workers, quiet=quiet)


def _list() -> None:
    from ebbench.papers.figures import FIGURES

    for figure in FIGURES:
        typer.echo(f"{figure.name:10} {figure.title}")
    typer.echo(f"{'timeline':10} any run with recorded steps: ebbench figures timeline RUN")
    typer.echo(f"{'slo':10} attainment of any run over TTFT and TPOT targets: ebbench figures slo RUN")


def _draw(
    name: str,
    wish: Wish,
    store: CellStore,
    folder: Path,
    formats: list[str],
    *,
    run: bool,
    workers: int | None,
    quiet: bool,
) -> None:
    from ebbench.errors import DataError
    from ebbench.papers.figures import find_figure
    from ebbench.render.figures import save

    figure = find_figure(name)
    cells = figure.cells(wish)
    if run:
        from ebbench.cli.tables import make_runs

        make_runs(figure, wish, store, workers=workers, quiet=quiet)
    missing = len(store.missing(cells))
    if missing:
        raise DataError(
            f"{missing} of {len(set(cells))} runs of {figure.name} are not stored in {store.root}; add --run"
        )
    for path in save(figure.chart(wish, store), folder / figure.name, formats):
        typer.echo(str(path))
    typer.echo(figure.caption, err=True)


def _of_runs(name: str, paths: list[Path], folder: Path, formats: list[str]) -> None:
    from ebbench.analysis.phases import load_runs
    from ebbench.errors import UsageError
    from ebbench.records.run import slug
    from ebbench.render.figures import save
    from ebbench.render.figures_slo import surface_chart
    from ebbench.render.timeline import timeline_chart, timeline_of

    if not paths:
        raise UsageError(f"`ebbench figures {name}` needs a run: ebbench figures {name} RUN")
    for loaded in load_runs(paths):
        chart = timeline_chart(timeline_of(loaded)) if name == "timeline" else surface_chart(loaded)
        for path in save(chart, folder / f"{name}-{slug(loaded.path.name)}", formats, legend="top"):
            typer.echo(str(path))
