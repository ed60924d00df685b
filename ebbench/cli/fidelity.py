"""``ebbench fidelity``: repeats published measurements on emulated devices and reports every figure."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

tell = partial(typer.echo, err=True)
GROUPS = (
    "replay", "calibration", "table 3", "table 2 and figure 5", "figure 3", "figure 4", "table 13",
    "table 6", "table 17", "table 19", "table 20", "authors' repetition", "silicon", "servers",
    "gpustack", "kv cache", "iog", "capacity", "steps",
)  # fmt: skip


def fidelity(
    out: Annotated[Path, typer.Option(help="Folder of the report; files in it are replaced.")] = Path(
        "reports/fidelity"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run only these groups: {', '.join(GROUPS)}. Repeatable.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --only: keep the figures of other groups from the report in --against.")
    ] = False,
    against: Annotated[
        Path, typer.Option(help="Folder of the last committed report: figures that got worse are printed.")
    ] = Path("reports/fidelity"),
    fit: Annotated[
        str | None,
        typer.Option(help="Fit this device's three constants and print them for its profile, instead of a report."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the request plans.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds of table 3, over which means are taken.")] = 3,
    runs: Annotated[
        Path, typer.Option("--runs", help="Directory of stored runs, shared with `ebbench tables`.")
    ] = Path("runs/papers"),
    workers: Annotated[int | None, typer.Option("--workers", help="Processes; default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Scores as one JSON document on stdout.")] = False,
) -> None:
    """Compare emulated devices with published measurements: every published figure and ours.

    Takes several minutes; --only "table 3" is quick.
    """
    if fit is not None:
        _fit(fit, seed)
        return
    from ebbench.errors import UsageError
    from ebbench.papers.fidelity import scoreboard
    from ebbench.papers.fidelity.report import BOARD, all_scores, collect, merged_cells, read_cells, write_report

    before = scoreboard.load(against / BOARD)
    if keep and not only:
        raise UsageError("--keep needs --only: without it all groups run")
    kept = read_cells(against) if keep else []
    cells = merged_cells(kept, collect(_groups_chosen(only), seed, repeats, runs, workers, tell))
    files = write_report(cells, out, repeats, before)
    scores_by_group = all_scores(cells)
    for text in scoreboard.losses(scoreboard.scoreboard(cells), before):
        typer.echo(f"worse than in {against}: {text}", err=True)
    if as_json:
        typer.echo(
            json.dumps(
                {name: [vars(score) for score in group] for name, group in scores_by_group.items()}
                | {"report": str(files[0])}
            )
        )
        return
    for name, group in scores_by_group.items():
        for score in group:
            mark = "met " if score.met else "MISS"
            typer.echo(f"{mark}  {name}: {score.name} {score.reached:.1%} ({score.target}, {score.count} cells)")
    typer.echo(f"report: {files[0]}")


def _groups_chosen(only: list[str] | None) -> tuple[str, ...]:
    from ebbench.errors import check_known

    for name in only or ():
        check_known("group", name, GROUPS)
    return tuple(only) if only else GROUPS


def _fit(device: str, seed: int) -> None:
    from ebbench.errors import check_known
    from ebbench.papers.fidelity.case import DEVICES
    from ebbench.papers.fidelity.runs import fit_host

    check_known("device with published rows to fit on", device, DEVICES.values())
    host = fit_host(device, tell, seed)
    typer.echo("[host.default]")
    typer.echo(
        f"step_s = {host.step_s:.3g}\nsequence_s = {host.sequence_s:.4g}\nmixed_excess = {host.mixed_excess:.3g}"
    )
    typer.echo(f'source = "{host.source}"')
