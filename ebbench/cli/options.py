"""What the options of several commands share: how one is declared, and ``--goodput`` with several pairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

# A workload may follow the pairs: trace:FILE is none of them.
_PAIR = re.compile(r"^(?!trace:)[a-z0-9_]+:[^/]*$", re.IGNORECASE)


def opt(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    """An option under a heading of ``--help``."""
    option: typer.models.OptionInfo = typer.Option(*names, help=help, rich_help_panel=panel)
    return option


class GoodputCommand(TyperCommand):
    """Accepts ``--goodput ttft:500 tpot:50`` as well as one ``--goodput`` for each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them."""
        return super().parse_args(ctx, expand_goodput(args))


def expand_goodput(args: Sequence[str]) -> list[str]:
    """Put ``--goodput`` before every further ``metric:limit`` that follows one."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        expanded.append(rest.pop(0))
        if expanded[-1] == "--goodput" and rest:
            expanded.append(rest.pop(0))
            while rest and _PAIR.match(rest[0]):
                expanded += ["--goodput", rest.pop(0)]
    return expanded
