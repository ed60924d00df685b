"""Common options of ``ebbench tables`` and ``ebbench figures``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from ebbench.cli import completion
from ebbench.cli.options import opt

if TYPE_CHECKING:
    from ebbench.papers.table import Outputs

CHOICE, RUNS, OUTPUT = "What to run", "Runs", "Output"

Run = Annotated[bool, opt("--run", help="Execute the missing runs.", panel=RUNS)]
Runs = Annotated[Path, opt("--runs", help="Directory of stored runs.", panel=RUNS)]
Workers = Annotated[int | None, opt("--workers", help="Processes. Default: one per core.", panel=RUNS)]
Device = Annotated[
    list[str] | None, opt("--device", help="Repeat for several.", panel=CHOICE, complete=completion.devices)
]
Model = Annotated[
    list[str] | None, opt("--model", help="Repeat for several.", panel=CHOICE, complete=completion.models)
]
Workload = Annotated[
    list[str] | None, opt("--workload", help="Repeat for several.", panel=CHOICE, complete=completion.workloads)
]
NumPrompts = Annotated[
    int | None,
    opt("--num-prompts", "-n", help="Fewer requests per run than the paper's, for a quick look.", panel=CHOICE),
]
Quiet = Annotated[bool, opt("--quiet", "-q", help="No progress.", panel=OUTPUT)]


def outputs(kind: str) -> Outputs:
    """The value of ``--outputs``. Raises UnknownNameError."""
    from ebbench.errors import UnknownNameError
    from ebbench.papers.table import Outputs

    for known in get_args(Outputs):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("kind of output lengths", kind, get_args(Outputs))
