"""``ebbench client-check``: measures how much load this machine's client can generate accurately."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ebbench.client.check import LoadLevel


def client_check(
    rate: Annotated[float, typer.Option("--rate", help="Tokens/s per stream.")] = 50.0,
    seconds: Annotated[float, typer.Option("--seconds", help="Duration of each step, s.")] = 4.0,
    max_streams: Annotated[int, typer.Option("--max-streams", help="Largest number of streams to try.")] = 2048,
    workers: Annotated[int | None, typer.Option("--workers", help="Client processes; default: by the load.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure up to which load this machine's client is accurate, on a fake server with more and more streams.

    Prints lag, CPU time per streamed token, and the TTFT error against the server's own times. The fake server uses the
    same machine, so with a remote server the client can generate at least this load.
    """
    from ebbench.client.check import LEVELS, measure_levels
    from ebbench.errors import UsageError
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown

    if not (0 < rate < inf and 0 < seconds < inf and max_streams >= 1):
        raise UsageError("--rate, --seconds and --max-streams must be positive")
    streams = sorted({n for n in LEVELS if n < max_streams} | {max_streams})
    levels: list[LoadLevel] = []
    refused = ""
    messages = Console(stderr=True)
    try:
        with shown(messages, Work("client-check", len(streams), "loads", at_most=True)) as work:
            for level in measure_levels(rate, seconds, workers, streams):
                levels.append(level)
                work.done += 1
                if not as_json:
                    messages.say(f"{level.streams} streams: {'kept' if level.trustworthy else 'not kept'}")
    except UsageError as error:  # more streams than this process may have open files
        if not levels:
            raise
        refused = str(error)
    if as_json:
        document = {"rungs": [asdict(r) for r in levels], "trustworthy_up_to": _limit(levels), "refused": refused}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _print(levels)
        if refused:
            typer.echo(f"More was not tried: {refused}")


def _limit(levels: list[LoadLevel]) -> dict[str, float] | None:
    """The largest load at which the client was accurate."""
    borne = [r for r in levels if r.trustworthy]
    return {"streams": borne[-1].streams, "tokens_per_s": borne[-1].tokens_per_s} if borne else None


def _print(levels: list[LoadLevel]) -> None:
    from ebbench.render.documents import Console
    from ebbench.render.tables import plain_table

    headings = ("streams", "tokens/s", "CPU/token", "send lag", "loop lag", "TTFT error p50", "p99", "server late")
    table = plain_table(*headings, "verdict", whole=len(headings), right=headings)
    for r in levels:
        table.add_row(
            f"{r.streams:,}",
            f"{r.tokens_per_s:,.0f}",
            f"{r.cpu_us_per_token:.1f} µs",
            *(f"{v:.2f} ms" for v in (r.send_lag_ms, r.loop_lag_ms, r.ttft_error_p50_ms, r.ttft_error_ms)),
            f"{r.server_late_ms:.2f} ms",
            "trustworthy" if r.trustworthy else r.reason,
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a file has no width: do not cut
    console.print(table, markup=False)
    console.print("Lags, errors and lateness are 99th percentiles unless marked.", markup=False)
    limit = _limit(levels)
    if limit is None:
        console.print("The client is not accurate at any load tried; is the machine busy?", markup=False)
        return
    load = f"{limit['streams']:,} streams ({limit['tokens_per_s']:,.0f} tokens/s)"
    if levels[-1].trustworthy:
        console.print(f"Accurate up to at least {load}, the largest load tried.", markup=False)
    else:
        reason = "the fake server was late too" if levels[-1].server_late_ms > 10 else "the client was the limit"
        console.print(f"Accurate up to {load}; at {levels[-1].streams:,} streams {reason}.", markup=False)
