"""Refuses options that would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import typer

from ebbench.errors import UsageError


def refuse_unused(context: typer.Context, options: Iterable[str], reads: Collection[str], what: str) -> None:
    """Raise UsageError for the first of ``options`` (parameter names) that was given but is not read by ``what``."""
    names = {param.name: _shown(param) for param in context.command.params}
    for option in given_options(context, [option for option in options if option not in reads]):
        it = f"it uses {', '.join(names[one] for one in reads)}" if reads else "leave it out"
        raise UsageError(f"{what} does not use {option}; {it}")


def given_options(context: typer.Context, options: Iterable[str]) -> list[str]:
    """Those of ``options`` (parameter names) that are on the command line, as the user writes them."""
    names = {param.name: _shown(param) for param in context.command.params}
    sources = {option: context.get_parameter_source(option) for option in options}
    return [names[option] for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def _shown(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())
