"""Keeps pyarrow from importing pandas in the processes of ebbench, which never use it.

``pyarrow.array`` and others import pandas, if it is installed, to check whether they were given a Series: a quarter of
a second to half a second at the start of every command and worker. Where pandas is not installed they do without, and
this is what they find, once. Programs that import ebbench keep pandas and pyarrow as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

_of_ebbench = False


class _NoPandas:
    """A finder of modules that finds no pandas."""

    @staticmethod
    def find_spec(name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ImportError("pyarrow does without pandas in this process")


def process_of_ebbench() -> None:
    """Say that this process is one of ebbench's own, before or after pyarrow is imported."""
    global _of_ebbench
    _of_ebbench = True
    if "pyarrow" in sys.modules:
        skip_pandas()


def skip_pandas() -> None:
    """Make pyarrow's one-time pandas check fail now, before it costs time; in processes of ebbench only."""
    if not _of_ebbench or "pandas" in sys.modules:
        return
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)
