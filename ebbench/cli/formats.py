"""``--format`` of the commands that show tables of runs: table, Markdown or CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from ebbench.analysis.documents import Document

FORMATS = ("table", "markdown", "csv")
Format = Annotated[
    str, typer.Option("--format", "-f", help="table, markdown, or csv (only the tables, figures as plain numbers).")
]


def check_format(style: str, *, as_json: bool) -> None:
    """Raise UnknownNameError for an unknown format, UsageError for a format together with --json."""
    if style not in FORMATS:
        raise UnknownNameError("format", style, FORMATS)
    if as_json and style != FORMATS[0]:
        raise UsageError(f"--json and --format {style} are two formats; leave one of them out")


def written(document: Document, style: str) -> str:
    """The document in a format other than ``table``."""
    from ebbench.cli.tables import rendered

    return rendered(document, style)
