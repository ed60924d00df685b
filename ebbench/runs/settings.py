"""Settings of a run by name, as sweep files give them and tables of results store them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from math import inf
from typing import Any, Literal, get_args, get_origin

import msgspec

from ebbench.engines.checks import refuse_server_settings
from ebbench.errors import UsageError
from ebbench.spec.run import RunSpec, known_settings, spec_of
from ebbench.spec.server import is_server

_ANYWHERE = ("warmup", "max_model_len", "api_server", "api_server_count", "vllm_version")
"""Settings of the server that the load generator uses too, or that are refused with a reason of their own."""
_STATED = ("max_num_seqs", "max_num_batched_tokens", "api_server", "api_server_count", "vllm_version")
"""Those that the command line takes for a running server, and says that they change nothing; a file does not."""


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
    return spec_of(settings)


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
