"""Several workloads in one plan: classes of requests with shares, limits, priorities and settings of their own.

Written ``chat=sharegpt:0.6 rag=longbench:0.3 code=log:code.csv:0.1``, or as a TOML file with a table per class, which
may also set limits, a priority, and what the options of workloads and sessions set, for its class alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from ebbench.config.declare import LOAD, SESSIONS, WORKLOAD, declared_in, split_pairs
from ebbench.errors import UsageError
from ebbench.foreign.documents import load_toml
from ebbench.records.manifest import LIMITS
from ebbench.traffic.arrivals import substream
from ebbench.traffic.spec import apportion
from ebbench.workloads.options import PlanOptions, is_mixture, is_recorded, mixture_parts, recorded_file
from ebbench.workloads.requests import COLUMNS, Int64s, Requests, int_lists_of
from ebbench.workloads.spec import load_workload

OF_THE_WHOLE = ("num_prompts", "seed", "drop_too_long", "redraw", "priorities", "session_start")
"""Settings of workloads that a class cannot have for itself."""
_OF_A_CLASS = {
    name: declared.kind
    for name, declared in declared_in(PlanOptions).items()
    if declared.option is not None and declared.option.panel in (WORKLOAD, SESSIONS) and name not in OF_THE_WHOLE
}
_OF_LOAD = [
    name
    for name, declared in declared_in(PlanOptions).items()
    if declared.option is not None and declared.option.panel == LOAD
]


@dataclass(frozen=True)
class RequestClass:
    """One class. ``share``: of the sessions, relative to the other classes'; ``goodput``: its limits, as
    ``ttft:500 tpot:50``; ``settings``: fields of PlanOptions."""

    name: str
    workload: str
    share: float
    goodput: str = ""
    priority: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """``num_prompts``: sessions of all classes by default; None: as many as their sources hold at these shares."""

    classes: tuple[RequestClass, ...]
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        names = [request_class.name for request_class in self.classes]
        if len(names) < 2:
            raise UsageError("a mixture needs two classes or more; give a single workload by its name")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"two classes are named {twice}; name them, as in chat=sharegpt:0.6 long=sharegpt:0.4")
        if wrong := next((name for name in names if name in LIMITS or not _NAME.fullmatch(name)), None):
            raise UsageError(f"{wrong!r} cannot name a class: take letters, digits, _ and -, and no latency's name")
        if not all(0 < request_class.share < float("inf") for request_class in self.classes):
            raise UsageError("shares of classes must be above 0, such as 0.6 and 0.4, or 3 and 1")

    def counts(self, sessions: int) -> list[int]:
        """Sessions of each class: the shares to the nearest whole numbers. Raises UsageError if a class gets none."""
        counts = apportion(self.shares, sessions)
        if 0 in counts:
            none = self.classes[counts.index(0)].name
            raise UsageError(
                f"{sessions} sessions are too few for these shares: class {none} gets none; raise --num-prompts"
            )
        return counts

    def most(self, counts: Sequence[int]) -> int:
        """The most sessions for which no class needs more than it holds."""
        return int(min(count / share for count, share in zip(counts, self.shares, strict=True)))

    @property
    def shares(self) -> list[float]:
        """The shares, which add up to 1."""
        whole = sum(request_class.share for request_class in self.classes)
        return [request_class.share / whole for request_class in self.classes]


_NAME = re.compile(r"[\w.-]{1,60}")
_MOST_PRIORITY = 999_999_999
_PRIORITY = Annotated[int, msgspec.Meta(ge=-_MOST_PRIORITY, le=_MOST_PRIORITY)]
_CLASS = msgspec.defstruct(
    "Class",
    [
        ("workload", str), ("share", float), ("goodput", str, ""), ("priority", _PRIORITY | None, None),
        *((name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in _OF_A_CLASS.items()),
    ],
    forbid_unknown_fields=True, frozen=True, kw_only=True,
)  # fmt: skip
_FILE = msgspec.defstruct(
    "Mixture",
    [("classes", dict[str, _CLASS]), ("name", str, ""), ("description", str, ""), ("num_prompts", int | None, None)],  # type: ignore[valid-type]
    forbid_unknown_fields=True, frozen=True, kw_only=True,
)  # fmt: skip


def read_mixture(workload: str) -> Mixture | None:
    """The mixture that a workload names, or whose file it is; None for a single workload.

    Raises UsageError, InputFileError.
    """
    if not is_mixture(workload):
        return None
    if parts := mixture_parts(workload):
        return Mixture(tuple(RequestClass(*part) for part in parts))
    file: Any = load_toml(Path(workload).expanduser(), _FILE)
    classes = []
    for name, table in file.classes.items():
        given = {key: getattr(table, key) for key in _OF_A_CLASS if getattr(table, key) is not msgspec.UNSET}
        classes.append(RequestClass(name, table.workload, table.share, table.goodput, table.priority, given))
    return Mixture(tuple(classes), file.num_prompts)


def check_workload(workload: str) -> None:
    """Raise UsageError or InputFileError for a workload, or one of a mixture, that does not exist."""
    mixture = read_mixture(workload)
    for name in [workload] if mixture is None else [request_class.workload for request_class in mixture.classes]:
        if not is_recorded(name):
            load_workload(name)
        elif (path := recorded_file(name)) is None or not path.exists():
            raise UsageError(f"{name}: no such file")


def class_names(options: PlanOptions) -> set[str]:
    """Names of the classes that the requests of a workload have. Raises UsageError, InputFileError."""
    if (mixture := read_mixture(options.workload)) is not None:
        return {request_class.name for request_class in mixture.classes}
    path = recorded_file(options.workload)
    if path is None:
        return set()
    from ebbench.workloads.trace import read_trace

    trace = read_trace(path, options.columns, options.tokenizer, keep_text=options.keep_text)
    return {name for name in trace.requests.classes or () if name is not None}


def brought_limits(workload: str, goodput: Sequence[str]) -> list[str]:
    """Limits of the classes of a mixture as ``--goodput`` has them, of those classes that ``goodput`` does not name."""
    mixture = read_mixture(workload)
    given = {word.partition(":")[0] for text in goodput for word in text.split()}
    classes = () if mixture is None else mixture.classes
    return [
        f"{request_class.name}:{','.join(split_pairs(request_class.goodput))}"
        for request_class in classes
        if request_class.goodput and request_class.name not in given
    ]


def files_of_mixture(workload: str) -> dict[str, str]:
    """What the classes of a mixture take their requests from, by a name for each; empty for a single workload."""
    mixture = read_mixture(workload)
    named = ("source", "tokenizer")
    return {
        f"class {request_class.name} {key}": value
        for request_class in (mixture.classes if mixture is not None else ())
        for key, value in (
            ("workload", request_class.workload),
            *((key, request_class.settings.get(key)) for key in named),
        )
        if value is not None
    }


def class_options(request_class: RequestClass, options: PlanOptions) -> PlanOptions:
    """The options of a class alone: those of the whole with its own settings and a seed of its own.

    Settings of logs go to classes that are logs only, and the source of data sets to the others.
    """
    seed = int(substream(options.seed, f"class/{request_class.name}").integers(2**62))
    without = dict.fromkeys(("scenario", "num_prompts", "priorities", "session_start", *_OF_LOAD))
    of_logs = {"columns": None, "keep_text": False, "recorded_pauses": False}
    others = {"source": "auto"} if is_recorded(request_class.workload) else of_logs
    return replace(
        options, **{**without, **others, "workload": request_class.workload, "seed": seed, **request_class.settings}
    )


def mixed(mixture: Mixture, parts: Sequence[Requests], seed: int, priorities: str | None) -> Requests:
    """The requests of all classes, their sessions in an order that the seed draws; ``parts``: those of each class.

    ``priorities`` (as ``--priorities``) replace those of the classes. Classes share no prefix with each other. Raises
    UsageError if their hash ids are of blocks of different sizes.
    """
    given = {
        request_class.name: request_class.priority
        for request_class in mixture.classes
        if request_class.priority is not None
    }
    return with_priorities(_join_classes(mixture, parts, seed), given | parse_priorities(priorities or ""))


def _join_classes(mixture: Mixture, parts: Sequence[Requests], seed: int) -> Requests:
    counts = [part.sessions for part in parts]
    class_of = substream(seed, "class/order").permutation(np.repeat(np.arange(len(parts)), counts))
    session = np.concatenate([np.flatnonzero(class_of == at)[part.session] for at, part in enumerate(parts)])
    order = np.argsort(session, kind="stable")
    names = np.repeat([request_class.name for request_class in mixture.classes], [len(part) for part in parts])
    described = {
        request_class.name: {
            "workload": request_class.workload, "share": share, "sessions": part.sessions, "requests": len(part),
            **({"goodput": request_class.goodput} if request_class.goodput else {}), **part.facts,
        }
        for request_class, share, part in zip(mixture.classes, mixture.shares, parts, strict=True)
    }  # fmt: skip
    sizes = {part.block_tokens for part in parts if part.hash_ids is not None}
    if len(sizes) > 1:
        shown = " and ".join(str(size or 512) for size in sorted(sizes, key=lambda size: size or 512))
        raise UsageError(
            f"the hash ids of these classes are of blocks of {shown} tokens, a plan has one size; measure them apart"
        )
    whole = Requests(
        session,
        **_columns(parts),
        block_tokens=(sizes.pop() if sizes else None),
        facts={"source": "classes", "source_reason": "each class has its own", "classes": described},
        warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
    )
    return whole.taken(order, session[order], classes=names[order].tolist())


def _columns(parts: Sequence[Requests]) -> dict[str, Any]:
    """The columns of several requests, one after the other; where a part lacks one that others have, it is empty."""
    columns: dict[str, Any] = {"content": _contents(parts), "hash_ids": _hash_ids(parts)}
    for name in COLUMNS:
        values = [getattr(part, name) for part in parts]
        given = next((value for value in values if value is not None), None)
        if name in columns or given is None:
            continue
        if isinstance(given, np.ndarray):
            empty = np.nan if given.dtype.kind == "f" else 0
            filled = [
                np.full(len(p), empty, given.dtype) if v is None else v for p, v in zip(parts, values, strict=True)
            ]
            columns[name] = np.concatenate(filled)
        elif isinstance(given, pa.Array):
            filled = [pa.nulls(len(p), given.type) if v is None else v for p, v in zip(parts, values, strict=True)]
            columns[name] = pa.concat_arrays(filled)
        else:
            filled = [[None] * len(p) if v is None else v for p, v in zip(parts, values, strict=True)]
            columns[name] = [entry for own in filled for entry in own]
    return columns


def _contents(parts: Sequence[Requests]) -> Int64s:
    """Content streams, numbered anew so that no two classes have one in common."""
    streams_of_parts, first = [], 0
    for part in parts:
        streams, numbered = np.unique(part.streams, return_inverse=True)
        streams_of_parts.append(numbered + first)
        first += len(streams)
    return np.concatenate(streams_of_parts).astype(np.int64)


def _hash_ids(parts: Sequence[Requests]) -> pa.Array | None:
    """Hash ids, numbered anew so that no two classes have one in common."""
    if all(part.hash_ids is None for part in parts):
        return None
    flat, sizes, valid, first = [], [], [], 0
    for part in parts:
        ids = pa.nulls(len(part), pa.list_(pa.int64())) if part.hash_ids is None else part.hash_ids
        names, numbered = np.unique(ids.drop_null().flatten().to_numpy(), return_inverse=True)
        flat.append(numbered + first)
        sizes.append(ids.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        valid.append(~ids.is_null().to_numpy(zero_copy_only=False))
        first += len(names)
    return int_lists_of(np.concatenate(flat), np.concatenate(sizes), np.concatenate(valid))


def parse_priorities(text: str) -> dict[str, int]:
    """``chat=0,batch=10`` as priorities by class. Raises UsageError."""
    by_class: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = pair.partition("=")
        if not name or not re.fullmatch(r"-?\d{1,9}", number):
            raise UsageError(f"--priorities {pair!r}: write class=number, the lowest first, as in chat=0,batch=10")
        by_class[name] = int(number)
    return by_class


def with_priorities(requests: Requests, priorities: Mapping[str, int]) -> Requests:
    """The requests with the priority of their class; 0 for other classes. Raises UsageError for an unknown class."""
    if not priorities:
        return requests
    classes = requests.classes or [None] * len(requests)
    known = sorted({name for name in classes if name is not None})
    if unknown := [name for name in priorities if name not in known]:
        of = f"; its classes are {', '.join(known)}" if known else "; --columns class=COLUMN names them"
        raise UsageError(f"--priorities: no request has the class {unknown[0]!r}{of}")
    by_request = np.array([priorities.get(name or "", 0) for name in classes], np.int32)
    return replace(requests, priority=by_request, facts={**requests.facts, "priorities": dict(priorities)})
