"""Locates bundled files: in a checkout at its top level, in a wheel under ``ebbench/_bundled``."""

from __future__ import annotations

from pathlib import Path

from ebbench.errors import UnknownNameError

_PACKAGE = Path(__file__).resolve().parent


def bundled_dir(name: str) -> Path:
    """Directory of the bundled ``workloads``, ``scenarios`` or ``reference`` files."""
    packed = _PACKAGE / "_bundled" / name
    if packed.is_dir():
        return packed
    checkout = {"reference": "reports/reference"}.get(name, name)
    return _PACKAGE.parent / checkout


REFERENCE = "reference:"
"""Prefix of paths to bundled reference files: workloads and scenarios as used in published runs."""


def located(name: str) -> Path:
    """The file that ``reference:PATH`` or a user's path names."""
    if name.startswith(REFERENCE):
        return bundled_dir("reference") / name.removeprefix(REFERENCE)
    return Path(name).expanduser()


def resolve(name_or_path: str, directory: str, known: list[str]) -> Path:
    """Path of a bundled file, of ``reference:PATH``, or of a user's ``.toml`` file. Raises UnknownNameError."""
    if name_or_path.endswith(".toml"):
        return located(name_or_path)
    if name_or_path not in known:
        more = ["log:FILE"] if directory == "workloads" else []
        raise UnknownNameError(directory.removesuffix("s"), name_or_path, [*known, *more])
    return bundled_dir(directory) / f"{name_or_path}.toml"
