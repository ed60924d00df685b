"""A run as a TOML file: read for ``ebbench run FILE.toml``, written by ``--dry-run`` and ``ebbench init``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_VLLM, Declared, declared_in
from ebbench.engines.base import refuse_server_settings
from ebbench.errors import InputFileError, UnknownNameError, UsageError, check_known
from ebbench.foreign.documents import load_toml, read_toml, toml_value
from ebbench.spec.commands import DEFAULTS, SET_BY_SEARCH, PlanCommand, RunCommand, SearchCommand
from ebbench.spec.run import RunSpec, known_settings, make_spec, named_as_keys, settings_of
from ebbench.spec.server import ONLY_SIMULATED, VIRTUAL_TIME, is_server, version_defaults
from ebbench.workloads.spec import WorkloadSpec

# Settings of a run by name, as sweep files give them and tables of results store them.

_ANYWHERE = ("warmup", "max_model_len", *ONLY_SIMULATED)
"""Settings of the server that the load generator uses too, or that are refused with a reason of their own."""
_STATED = ("max_num_seqs", "max_num_batched_tokens", *ONLY_SIMULATED)
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
    return make_spec(with_batch_limits(settings))


def with_batch_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings with the limits that vLLM chooses on its device where they state none; for servers unchanged."""
    if settings.get("engine", RunSpec.engine) not in VIRTUAL_TIME:
        return dict(settings)
    from ebbench.devices.capacity import batch_limits
    from ebbench.devices.costs import GIVEN
    from ebbench.devices.profiles import find_profile

    name = str(settings.get("device") or DEFAULT_DEVICE)
    if name.startswith(GIVEN):
        return dict(settings)
    chosen = batch_limits(find_profile(name), settings.get("vllm_version") or DEFAULT_VLLM)
    tokens, seqs = settings.get("max_num_batched_tokens"), settings.get("max_num_seqs")
    tokens = chosen.max_num_batched_tokens if tokens is None else tokens
    seqs = min(chosen.max_num_seqs, max(tokens, 1)) if seqs is None else seqs  # vLLM's rule for the limit left out
    return {**settings, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}


def settings_table(name: str, *, but: Collection[str] = (), **changed: Any) -> Any:
    """A struct of any of a run's settings ``but`` some, as a table of a TOML file has them; ``changed``: other types,
    more keys."""
    kinds = {
        declared.name: declared.kind for declared in known_settings().values() if declared.name not in but
    } | changed
    fields = [(key, kind | msgspec.UnsetType, msgspec.UNSET) for key, kind in kinds.items()]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


def plain(value: Any) -> Any:
    """A setting's value as a single table value: a mapping becomes JSON, a list of words a command line."""
    if isinstance(value, tuple):
        return shlex.join(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def plain_type(kind: Any) -> type:
    """The type of :func:`plain`'s result for a setting of this type: str, bool, float or int."""
    names = [part for part in (get_args(kind) or (kind,)) if part is not type(None)]
    if get_origin(kind) is Literal or any(not isinstance(part, type) for part in names):
        return str
    return next((part for part in (str, bool, float, int) if part in names), str)


FURTHER = declared_in(RunCommand)
"""Keys of a file besides the settings of a run: what ``ebbench run`` does with it."""


def _file_of(command: type, *, but: Collection[str] = ()) -> Any:
    """The file of a command: settings of a run ``but`` some, and what the command itself declares."""
    own = {name: declared.kind for name, declared in declared_in(command).items()}
    kinds = {"policy": str | list[str], "vllm_options": list[str], **own}
    return settings_table(command.__name__, but=but, **kinds)


RUN_FILE, SEARCH_FILE = _file_of(RunCommand), _file_of(SearchCommand, but=SET_BY_SEARCH)
"""What the files of ``ebbench run`` and ``ebbench capacity`` may say."""
PLAN_FILE = _file_of(PlanCommand)
"""What keywords of ``eb.plan`` may say."""


def is_run_file(name: str) -> bool:
    """Whether the argument of a command is a file of its settings, not one that describes a workload."""
    path = Path(name).expanduser()
    if not (name.endswith(".toml") and path.is_file()):
        return False
    keys = read_toml(path).keys()
    described = {"classes", *WorkloadSpec.__struct_fields__} - set(RUN_FILE.__struct_fields__)
    return "workload" in keys or not keys & described


def read_run_file(path: Path, table: Any = RUN_FILE) -> dict[str, Any]:
    """What the file says, by key; paths in it are relative to the working directory, as on the command line.

    Raises InputFileError for an unknown key, naming the nearest one, a value of another type, and without a workload.
    """
    if "grid" in read_toml(path):
        raise InputFileError(path, "has a [grid] of settings; run it with `ebbench sweep`")
    file = load_toml(path, table)
    if file.workload is msgspec.UNSET:
        raise InputFileError(path, "names no workload; add a line such as: workload = 'sharegpt'")
    given = {key: getattr(file, key) for key in table.__struct_fields__}
    given = {key: value for key, value in given.items() if value is not msgspec.UNSET}
    if isinstance(given.get("policy"), str):
        given["policy"] = [given["policy"]]
    return given


def asked_for(workload: str, given: Mapping[str, Any], table: Any = RUN_FILE) -> dict[str, Any]:
    """Settings of a run and of the command: what ``given`` says, else the file that stands for the workload."""
    asked: dict[str, Any] = (
        read_run_file(Path(workload).expanduser(), table) if is_run_file(workload) else {"workload": workload}
    )
    return {**asked, **given}


def of_keywords(given: Mapping[str, Any], known: Collection[str], table: Any = RUN_FILE) -> dict[str, Any]:
    """What keywords of Python say, checked and converted like a file's; None is a setting that is not given.

    ``known``: keywords of the function. Raises UnknownNameError, naming the nearest keyword, and UsageError for a key
    of a file that the function does not take, and for a value of another type.
    """
    for key in given:
        if key not in known and key in RUN_FILE.__struct_fields__:
            raise UsageError(f"{key} is not a setting of this function; leave it out")
        check_known("setting", key, known)
    asked = {key: _as_in_a_file(value) for key, value in given.items() if value is not None}
    try:
        checked = msgspec.convert(asked, table)
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
    lines = [f"workload = {toml_value(spec.plan.workload)}"]
    lines += [f"{key} = {toml_value(value)}" for key, value in stated.items()]
    known, values, others = known_settings(), settings_of(spec), version_defaults(spec.server.vllm_version)
    written = [declared for name, declared in known.items() if name not in ("workload", *stated)]

    def line(declared: Declared) -> str:
        return _line(declared, values[declared.name], others.get(declared.name, declared.default))

    return "\n".join([*lines, *_by_panel(written, line)]) + "\n"


def _by_panel(written: Sequence[Declared], line: Callable[[Declared], str]) -> list[str]:
    """A line per setting, under the headings of ``--help``."""
    lines: list[str] = []
    for panel in dict.fromkeys(map(_panel, written)):
        lines += ["", f"# {panel}", *(line(declared) for declared in written if _panel(declared) == panel)]
    return lines


def _panel(declared: Declared) -> str:
    return declared.option.panel if declared.option is not None else "Without an option"


def _line(declared: Declared, value: Any, default: Any) -> str:
    if value is None or value == default:
        return _comment(declared, value)
    return f"{declared.name} = {toml_value(value)}"


def _comment(declared: Declared, value: Any) -> str:
    return f"# {declared.name} ={'' if value is None else f' {toml_value(value)}'}  # {_help_text(declared)}"


def _help_text(declared: Declared) -> str:
    """The help of a setting, with names of options as keys have them."""
    about = named_as_keys(declared.about.help.replace("\\[", "["))
    if declared.option is not None and declared.option.turns_off:
        about = f"false: {about[0].lower()}{about[1:]}"
    return about


# Files to begin with, by what is to be done: the settings that one chooses, and all others that matter as comments.


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that ``ebbench init`` writes. ``command`` runs it; ``chosen``: what it says, by key; ``left_out``: parts
    of a run whose settings mean nothing to it."""

    about: str
    command: str
    chosen: dict[str, Any]
    left_out: tuple[str, ...] = ()


class _Jobs(msgspec.Struct, forbid_unknown_fields=True):
    jobs: dict[str, Job]


def jobs() -> dict[str, Job]:
    """The files by what is to be done."""
    return load_toml(Path(__file__).with_name("jobs.toml"), _Jobs).jobs


_GRID = {"policy": ["v1", "ebplus"], "max_num_batched_tokens": [2048, 8192], "max_num_seqs": [64, 256]}


def job_file(name: str, path: str) -> str:
    """The file for a job, with the command that runs it. Raises UnknownNameError."""
    if (job := jobs().get(name)) is None:
        raise UnknownNameError("job", name, jobs())
    own = {"run": FURTHER, "capacity": declared_in(SearchCommand), "sweep": {}}[job.command]
    hidden = {"run": (), "capacity": {*SET_BY_SEARCH} - {*own}, "sweep": _GRID}[job.command]
    known = {key: declared for key, declared in {**known_settings(), **own}.items() if key not in hidden}
    chosen_lines = [f"{key} = {toml_value(value)}  # {_help_text(known[key])}" for key, value in job.chosen.items()]
    others = [declared for key, declared in known.items() if key not in job.chosen and _matters_to_job(declared, job)]
    lines = [f"# {job.about}", f"# Run it: ebbench {job.command} {path}", ""]
    if job.command == "sweep":
        lines += ['name = "sweep"', "repeats = 1  # seeds seed, seed + 1, ...", "", "[grid]  # lists"]
        lines += [f"{key} = {toml_value(values)}" for key, values in _GRID.items()]
        lines += ["", "[common]  # the same for all cells"]
    comments = _by_panel(others, lambda declared: _comment(declared, DEFAULTS.get(declared.name, declared.default)))
    chosen_lines += ["", "# What follows are defaults: remove the first # to change one."]
    return "\n".join([*lines, *chosen_lines, *comments]) + "\n"


def _matters_to_job(declared: Declared, job: Job) -> bool:
    if declared.part in job.left_out and declared.name != "warmup":
        return False
    if declared.name in ("calibration", "vllm_options"):
        return job.chosen.get("engine") == "vllm"
    return declared.option is not None
