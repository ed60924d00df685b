"""Optional libraries: imported when needed, and named with the command that installs them when missing."""

from __future__ import annotations

import importlib
from typing import Any

from ebbench.errors import EbbenchError


def need(module: str, extra: str, purpose: str) -> Any:
    """Import ``module``, which ``pip install 'ebbench[extra]'`` brings. Raises EbbenchError naming that command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise EbbenchError(
            f"{purpose} needs {missing.partition('.')[0]}; install it with: pip install 'ebbench[{extra}]'"
        ) from None
