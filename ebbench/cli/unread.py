"""Options that would do nothing are refused, not passed over."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import typer

from ebbench.errors import UsageError


def refuse_unread(context: typer.Context, options: Iterable[str], reads: Collection[str], what: str) -> None:
    """Raise UsageError for the first of ``options`` (names of parameters) that was given and ``what`` does not read."""
    names = {param.name: _shown(param) for param in context.command.params}
    for option in options:
        source = context.get_parameter_source(option)
        if option in reads or source is None or source.name != "COMMANDLINE":
            continue
        it = f"it takes {', '.join(names[one] for one in reads)}" if reads else "leave it out"
        raise UsageError(f"{what} does nothing with {names[option]}; {it}")


def _shown(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())
