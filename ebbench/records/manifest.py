"""The manifest of a run: load, device, engine, software and validity."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

import ebbench
from ebbench.errors import DataError
from ebbench.foreign.documents import BadValueError, json_value, visible
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.records.warnings import RunWarning, stored_warning

SCHEMA_VERSION = 2
"""Raised when readers of the old format would misread the new one; added fields do not raise it."""

LIMITS = ("ttft", "tpot", "e2el", "ttfat")
"""The latencies that ``slo`` may limit, of all requests or as ``class:latency`` of a class."""

Clock = Literal["virtual", "real"]
_NAMES = ("workload", "scenario", "source", "policy", "engine", "device", "model", "device_provenance")


class _Options(msgspec.Struct, frozen=True):
    """Kinds of the options with which readers compute; None where a run has none."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_active_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    api_server_count: int | None = None
    front_end_ms: float | None = None
    warmup: int | None = None


class _Facts(msgspec.Struct, frozen=True):
    """Kinds of the facts with which readers compute; None where a run has none."""

    seed: int | None = None
    sessions: int | None = None
    requests: int | None = None
    gpus: int | None = None
    replicas: int | None = None
    request_rate: float | None = None
    saturation_rate: float | None = None
    burstiness: float | None = None
    speed: float | None = None
    duration_s: float | None = None
    ramp_up_s: float | None = None
    lag_limit_ms: float | None = None
    prefix_hit_rate: float | None = None
    trace_requests_per_s: float | None = None
    server_reports: dict[str, Any] | None = None
    priorities: dict[str, int] | None = None
    phase_rates: dict[str, float | None] | None = None
    client_connections: dict[str, int] | None = None


class _Computed(msgspec.Struct, frozen=True):
    options: _Options = _Options()
    facts: _Facts = _Facts()


class RunLabels(msgspec.Struct, frozen=True):
    """What the user calls a run, and the commit and branch (or pull request) that it measures; empty if not given."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    commit: str = ""
    label: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run except measurements, stored as ``manifest.json``.

    ``anchor_unix_ns``: wall-clock time of the run's time 0, from which all other times count. ``phases`` empty: open
    loop; ``max_concurrency`` is then the cap on open sessions, if any. ``plan_hash``: equal if and only if table,
    phases and cap are. ``rows``: number of rows per table. ``slo``: limits in ms.
    """

    schema_version: int = SCHEMA_VERSION
    versions: dict[str, str]
    git_commit: str | None = None
    labels: RunLabels = RunLabels()
    anchor_unix_ns: int
    workload: str
    scenario: str
    seed: int
    source: str
    facts: dict[str, Any] = {}
    plan_hash: str
    phases: tuple[ClosedPhase, ...] = ()
    max_concurrency: int | None = None
    policy: str
    engine: str
    clock: Clock = "virtual"
    device: str
    model: str
    device_provenance: str = ""
    kv_capacity_tokens: int | None = None
    calibration: dict[str, Any] | None = None
    options: dict[str, Any] = {}
    slo: dict[str, float] = {}
    rows: dict[str, int] = {}
    warnings: tuple[RunWarning, ...] = ()
    valid: bool = True
    reasons: tuple[RunWarning, ...] = ()
    interrupted: bool = False

    def __post_init__(self) -> None:
        """Show what servers and files named on one line, without control characters."""
        for name in _NAMES:
            msgspec.structs.force_setattr(self, name, visible(getattr(self, name)))
        for name in ("facts", "versions"):
            msgspec.structs.force_setattr(self, name, _visible(getattr(self, name)))
        reasons = (
            msgspec.structs.replace(reason, message=_visible(reason.message), values=_visible(reason.values))
            for reason in self.reasons
        )
        msgspec.structs.force_setattr(self, "reasons", tuple(reasons))

    @property
    def created(self) -> str:
        """The wall-clock anchor as ISO 8601, UTC, to the second."""
        return datetime.fromtimestamp(self.anchor_unix_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value, lines=True)
    if isinstance(value, dict):
        return {_visible(name): _visible(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_visible, value))
    return value


def encode_manifest(manifest: Manifest) -> bytes:
    """Indented JSON with keys in field order."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(content: bytes, path: Path) -> Manifest:
    """Decode a manifest. Raises DataError naming ``path`` if it is damaged or from a newer ebbench."""
    try:
        value = json_value(content)
        version = msgspec.convert(value, _Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise DataError(f"{path}: written by a newer ebbench (schema {version}); update ebbench to read it")
        msgspec.convert(value, _Computed)
        value["reasons"] = [stored_warning(reason) for reason in value.get("reasons", ())]
        manifest = msgspec.convert(value, Manifest)
    except (BadValueError, msgspec.ValidationError) as error:
        raise DataError(f"{path}: not a manifest ({error})") from None
    unknown = [name for name in manifest.slo if name.rpartition(":")[2] not in LIMITS]
    if unknown:
        raise DataError(f"{path}: unknown limit {unknown[0]!r} in slo; it can limit {', '.join(LIMITS)}")
    return manifest


class _Versioned(msgspec.Struct):
    schema_version: int


def plan_hash(plan: Plan) -> str:
    """SHA-256 over the plan table's Arrow bytes and its release rules, as hex.

    The release rules are included since the same table at another concurrency is another experiment. A plan cut to the
    released sessions has the hash of the whole plan.
    """
    plan = plan.cut_from or plan
    columns = [field.name for field in (*PLAN, *PLAN_EXTRAS) if field.name in plan.table.column_names]
    table = plan.table.select(columns).replace_schema_metadata(None).combine_chunks()
    sink = _HashingSink()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as stream:
        stream.write_table(table)
    rules = [(phase.name, phase.sessions, phase.max_concurrency) for phase in plan.phases]
    sink.write(repr((rules, plan.max_concurrency)).encode())
    if plan.release_for_s is not None:
        sink.write(repr(plan.release_for_s).encode())
    return sink.digest.hexdigest()


class _HashingSink:
    """A file object that computes the digest of what is written to it."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing; the sink has no buffer."""


def software_versions(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions that can change a result: ebbench, Python, numpy, pyarrow and the engine's (``extra``)."""
    versions = {"ebbench": ebbench.__version__, "python": platform.python_version()}
    versions |= {"numpy": np.__version__, "pyarrow": pa.__version__}
    return versions | dict(extra or {})


_COMMIT, _NO_COMMIT = "# branch.oid ", "(initial)"


@cache
def git_commit() -> str | None:
    """Commit of the checkout, with ``-dirty`` for uncommitted changes; None if ebbench is installed as a package.

    Asked for once per process: later changes are not of the code that runs.
    """
    top = Path(ebbench.__file__).resolve().parent.parent
    if not (top / ".git").exists():
        return None
    # Not `git describe --dirty`, which also looks for tags in the whole history.
    command = ["git", "-C", str(top), "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # a missing git must not fail the run
    lines = done.stdout.splitlines()
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), _NO_COMMIT)
    changed = any(not line.startswith("#") for line in lines)
    return None if commit == _NO_COMMIT else f"{commit}-dirty" if changed else commit


def wall_clock_ns() -> int:
    """Wall-clock time in ns, used only for the anchor: durations come from monotonic clocks."""
    return time.time_ns()
