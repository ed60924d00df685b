"""A run as a TOML file: read for ``ebbench run FILE.toml``, written by ``--dry-run``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_VLLM, Declared
from ebbench.engines.checks import refuse_server_settings
from ebbench.errors import UnknownNameError, UsageError
from ebbench.foreign.documents import load_toml, read_toml
from ebbench.spec.run import RunSpec, known_settings, settings_of, spec_of
from ebbench.spec.server import VIRTUAL_TIME, is_server, version_defaults

# Settings of a run by name, as sweep files give them and tables of results store them.

_SIMULATED = ("api_server", "api_server_count", "front_end_ms", "vllm_version")
_ANYWHERE = ("warmup", "max_model_len", *_SIMULATED)
"""Settings of the server that the load generator uses too, or that are refused with a reason of their own."""
_STATED = ("max_num_seqs", "max_num_batched_tokens", *_SIMULATED)
"""Settings that the command line accepts for a running server, with a note that they change nothing; a file refuses
them."""


def starts_a_server(name: str) -> bool:
    """Whether a setting takes effect only where a server is started, or simulated."""
    if name in ("cost", "calibration"):
        return True
    return known_settings()[name].part == "server" and name not in (*_ANYWHERE, *_STATED)


def spec_of_file(settings: Mapping[str, Any]) -> RunSpec:
    """The run with a file's settings. Raises UsageError, also for settings that a running server would not take."""
    engine = settings.get("engine", RunSpec.engine)
    if settings.get("request_rate") == inf:
        raise UsageError("request_rate = inf: write scenario = 'saturated' with a max_concurrency of all sessions")
    if is_server(engine):
        given = [name for name in settings if starts_a_server(name) or name in _STATED]
        refuse_server_settings(engine, given, "leave it out, or set it in [[overrides]] for the engines that take it")
    return spec_of(with_batch_limits(settings))


def with_batch_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings with the limits that vLLM chooses on its device where they state none; for servers unchanged."""
    if settings.get("engine", RunSpec.engine) not in VIRTUAL_TIME:
        return dict(settings)
    from ebbench.devices.capacity import batch_limits
    from ebbench.devices.linear import GIVEN
    from ebbench.devices.profiles import find_profile

    name = str(settings.get("device") or DEFAULT_DEVICE)
    if name.startswith(GIVEN):
        return dict(settings)
    chosen = batch_limits(find_profile(name), settings.get("vllm_version") or DEFAULT_VLLM)
    tokens, seqs = settings.get("max_num_batched_tokens"), settings.get("max_num_seqs")
    tokens = chosen.max_num_batched_tokens if tokens is None else tokens
    seqs = min(chosen.max_num_seqs, max(tokens, 1)) if seqs is None else seqs  # vLLM's rule for the limit left out
    return {**settings, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}


def settings_table(name: str, **changed: Any) -> Any:
    """A struct of any of a run's settings, as a table of a TOML file has them; ``changed``: other types, more keys."""
    kinds = {one.name: one.kind for one in known_settings().values()} | changed
    fields = [(key, kind | msgspec.UnsetType, msgspec.UNSET) for key, kind in kinds.items()]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


def plain(value: Any) -> Any:
    """A setting's value as a single table value: a mapping becomes JSON, a list of words a command line."""
    if isinstance(value, tuple):
        return shlex.join(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def plain_type(kind: Any) -> type:
    """The type of :func:`plain`'s result for a setting of this type: str, bool, float or int."""
    names = [one for one in (get_args(kind) or (kind,)) if one is not type(None)]
    if get_origin(kind) is Literal or any(not isinstance(one, type) for one in names):
        return str
    return next((one for one in (str, bool, float, int) if one in names), str)


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


def asked_for(workload: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, and keys of FURTHER: what ``given`` says, else the file that stands for the workload."""
    asked: dict[str, Any] = (
        read_run_file(Path(workload).expanduser()) if is_run_file(workload) else {"workload": workload}
    )
    return {**asked, **given}


def of_keywords(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What keywords of Python say, checked and converted like a file's; None is a setting that is not given.

    ``known``: keywords of the function. Raises UnknownNameError, naming the nearest keyword, and UsageError for a key
    of a file that the function does not take, and for a value of another type.
    """
    for key in given:
        if key not in known and key in _RunFile.__struct_fields__:
            raise UsageError(f"{key} is not a setting of this function; leave it out")
        if key not in known:
            raise UnknownNameError("setting", key, known)
    asked = {key: _as_in_a_file(value) for key, value in given.items() if value is not None}
    try:
        checked = msgspec.convert(asked, _RunFile)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        raise UsageError(f"{where or 'settings'}: {what[:1].lower()}{what[1:]}") from None
    return {key: getattr(checked, key) for key in asked}


def _as_in_a_file(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else value  # a number of numpy or Arrow


def as_toml(spec: RunSpec, stated: Mapping[str, Any]) -> str:
    """A file that describes the run. Settings that have their defaults, or are not set, are comments with their help.

    ``stated``: keys that are written first, whatever their values: those of :data:`FURTHER`, ``policy`` and others.
    """
    lines = [f"workload = {_value(spec.plan.workload)}"]
    lines += [f"{key} = {_value(value)}" for key, value in stated.items()]
    known, values, others = known_settings(), settings_of(spec), version_defaults(spec.server.vllm_version)
    written = [one for name, one in known.items() if name not in ("workload", *stated)]
    for panel in dict.fromkeys(map(_panel, written)):
        lines += ["", f"# {panel}"]
        lines += [
            _line(one, values[one.name], others.get(one.name, one.default)) for one in written if _panel(one) == panel
        ]
    return "\n".join(lines) + "\n"


def _panel(one: Declared) -> str:
    return one.option.panel if one.option is not None else "Without an option"


def _line(one: Declared, value: Any, default: Any) -> str:
    if value is not None and value != default:
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
