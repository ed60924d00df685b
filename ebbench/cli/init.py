"""``ebbench init``: writes a commented file of settings for a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JOBS = ("simulation", "server", "vllm", "log", "capacity", "sweep")


def init(
    job: Annotated[
        str,
        typer.Argument(help=f"What is to be done: {', '.join(JOBS)}.", autocompletion=lambda: list(JOBS)),
    ] = JOBS[0],
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")] = Path("bench.toml"),
) -> None:
    """Write a TOML file with the settings of a job, each with its help, to edit and run.

    Its second line says how to run it. `ebbench run ... --dry-run` prints such a file for settings that you have.
    """
    from ebbench.errors import UsageError
    from ebbench.records.files import write_text
    from ebbench.runs.file import job_file

    text = job_file(job, str(file))
    if file.suffix != ".toml":
        raise UsageError(f"{file}: commands take a file for settings if its name ends in .toml; give it such a name")
    if file.exists():
        raise UsageError(f"{file} exists; give another file, or remove it")
    write_text(text, file)
    typer.echo(f"wrote {file}; {text.splitlines()[1].removeprefix('# ').replace('Run it:', 'run it:')}")
