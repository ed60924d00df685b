"""A run as a TOML file: read for ``ebbench run FILE.toml``, written by ``--dry-run``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ebbench.config.declare import Declared
from ebbench.config.strict_toml import load_toml
from ebbench.foreign.documents import read_toml
from ebbench.runs.settings import settings_table
from ebbench.spec.run import RunSpec, known_settings, settings_of

FURTHER: Mapping[str, Any] = {
    "repeats": int | str, "max_repeats": int, "price_per_hour": float, "output_dir": str, "save_as_vllm": str,
}  # fmt: skip
"""Keys of a file besides the settings of a run: what ``ebbench run`` does with it."""
_RunFile = settings_table("Run", policy=str | list[str], vllm_options=list[str], **FURTHER)


def is_run_file(name: str) -> bool:
    """Whether the argument of ``ebbench run`` is a file that describes a run, not a workload: it names its workload."""
    path = Path(name).expanduser()
    return name.endswith(".toml") and path.is_file() and "workload" in read_toml(path)


def read_run_file(path: Path) -> dict[str, Any]:
    """What the file says, by key; paths in it are relative to the working directory, as on the command line.

    Raises InputFileError for an unknown key, naming the nearest one, and for a value of another type.
    """
    file = load_toml(path, _RunFile)
    given = {key: getattr(file, key) for key in _RunFile.__struct_fields__}
    given = {key: value for key, value in given.items() if value is not msgspec.UNSET}
    if isinstance(given.get("policy"), str):
        given["policy"] = [given["policy"]]
    return given


def as_toml(spec: RunSpec, stated: Mapping[str, Any]) -> str:
    """A file that describes the run. Settings that have their defaults, or are not set, are comments with their help.

    ``stated``: keys that are written first, whatever their values: those of :data:`FURTHER`, ``policy`` and others.
    """
    lines = [f"workload = {_value(spec.plan.workload)}"]
    lines += [f"{key} = {_value(value)}" for key, value in stated.items()]
    known, values = known_settings(), settings_of(spec)
    written = [one for name, one in known.items() if name not in ("workload", *stated)]
    for panel in dict.fromkeys(map(_panel, written)):
        lines += ["", f"# {panel}"]
        lines += [_line(one, values[one.name]) for one in written if _panel(one) == panel]
    return "\n".join(lines) + "\n"


def _panel(one: Declared) -> str:
    return one.option.panel if one.option is not None else "Without an option"


def _line(one: Declared, value: Any) -> str:
    if value is not None and value != one.default:
        return f"{one.name} = {_value(value)}"
    about = one.about.help.replace("\\[", "[")
    if one.option is not None and one.option.turns_off:
        about = f"false: {about[0].lower()}{about[1:]}"
    return f"# {one.name} ={'' if value is None else f' {_value(value)}'}  # {about}"


def _value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
