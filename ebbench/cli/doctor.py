"""``ebbench doctor``: what is installed, which engines and extras can be used, and how to install what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not try to import vLLM (takes seconds).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check this machine: what is installed, which engines can run, how to install what is missing."""
    from ebbench.doctor import examine, optional, page, runnable
    from ebbench.render.documents import Console

    findings = examine(quick=quick)
    extras, engines = optional(), runnable(findings)
    if as_json:
        document = {
            "findings": [asdict(finding) for finding in findings],
            "extras": [asdict(finding) for finding in extras],
            "engines": engines,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(highlight=False)
    for part in page(findings, extras, engines):
        console.print(part)
