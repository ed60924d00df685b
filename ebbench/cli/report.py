"""``ebbench report``: stored runs as one HTML file, or in other tools' formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.config.options import AllPercentiles
from ebbench.errors import DataError, UsageError
from ebbench.process.command_line import GoodputCommand
from ebbench.runs.stored import RunPaths

if TYPE_CHECKING:
    from ebbench.analysis.metrics import Slo
    from ebbench.records.run import Run
    from ebbench.report.page_data import SearchSection


def report(
    runs: RunPaths,
    html: Annotated[bool, typer.Option("--html", help="Write one self-contained HTML file (the default).")] = False,
    export: Annotated[
        list[str] | None, typer.Option("--export", help="Write llm-d, vllm or otava files instead. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file (default report.html) or directory of exports.")
    ] = None,
    all_percentiles: AllPercentiles = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page of a running measurement on this machine until it ends.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of --watch; 0: a free one.")] = 0,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "",
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Other limits in ms: ttft:500 tpot:50 e2el:5000.")
    ] = None,
) -> None:
    """Write runs as a page that opens anywhere, without network: comparison, latencies, timelines, steps, limits.

    With --export, as files other tools read: llm-d benchmark reports, vLLM's result JSON, CSV for Apache Otava.
    """
    from ebbench.analysis.metrics import parse_slo
    from ebbench.export import export as written
    from ebbench.records.run import Run, each_once, find_runs
    from ebbench.report.page_data import search_sections, shown_runs

    slo = parse_slo(goodput) if goodput else None
    if watch:
        if html or export or output:
            raise UsageError("--watch writes nothing: give it without --html, --export and --output")
        _watch(runs, port, title, slo, all_percentiles=all_percentiles)
        return
    searches = search_sections(runs)
    loaded = [
        Run.load(path) for path in each_once(p for given in runs for p in shown_runs(given) or find_runs([given]))
    ]
    if not loaded:
        raise DataError("no run to report on")
    if export:
        if html:
            raise UsageError("give either --html or --export")
        for path in written(export, loaded, output or Path("exports")):
            typer.echo(f"wrote {path}", err=True)
        return
    target = output or Path("report.html")
    if target.is_dir():
        raise UsageError(f"{target} is a directory; give a file, e.g. --output {target / 'report.html'}")
    probes = {path for given in runs for path in shown_runs(given)}  # at loads of their own: nothing to pair
    paired = [run for run in loaded if run.path not in probes]
    _page(loaded, paired, target, title, slo, all_percentiles=all_percentiles, searches=searches)


def _watch(runs: Sequence[Path], port: int, title: str, slo: Slo | None, *, all_percentiles: bool) -> None:
    from ebbench.report import page
    from ebbench.report.page_data import report_page
    from ebbench.report.watch import Watched, Watcher

    def rendered(now: Watched) -> str:
        notes = [now.note] if now.going_on else []
        shown_page = report_page(now.runs, title=title, slo=slo, notes=notes, all_percentiles=all_percentiles)
        return page.render(shown_page)

    shown = " ".join(map(str, runs))
    try:
        with Watcher(runs, rendered, port) as watcher:
            typer.echo(f"watching {shown} at {watcher.url} (Ctrl-C stops it, not the measurement)", err=True)
            watcher.until_the_end()
    except KeyboardInterrupt:
        typer.echo(f"stopped watching; `ebbench report {shown}` writes the page after the measurement", err=True)
        return
    typer.echo(f"the measurement has ended; `ebbench report {shown}` writes its page", err=True)


def _page(runs: Sequence[Run], paired: Sequence[Run], target: Path, title: str, slo: Slo | None, *,
          all_percentiles: bool, searches: Sequence[SearchSection]) -> None:  # fmt: skip
    from ebbench.records.warnings import counted
    from ebbench.report import page
    from ebbench.report.comparison import paired_tables
    from ebbench.report.page_data import report_page

    extra, notes = paired_tables(paired)
    shown_page = report_page(runs, title=title, slo=slo, extra=extra, notes=notes, all_percentiles=all_percentiles,
                    searches=searches)  # fmt: skip
    page.write(shown_page, target)
    typer.echo(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB, {counted(len(runs), 'run')})", err=True)


report.command_class = GoodputCommand  # type: ignore[attr-defined]
