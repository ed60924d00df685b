"""Starting a module of this program in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module``. The working directory is no place to import from: a file of the user's
    called like a module of the standard library must not be taken for it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with this process's own import path, so that the child finds the same modules."""
    return {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
