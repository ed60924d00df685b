"""Workload files: one TOML file per workload, which users add without code; and requests from a workload's source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ebbench.errors import UsageError
from ebbench.foreign.documents import load_toml
from ebbench.installation import bundled_dir, resolve
from ebbench.traffic.lengths import LengthSpec
from ebbench.workloads.fitted import Fitted
from ebbench.workloads.sessions import SessionSpec

# The `profile` source: draws requests from length distributions, without a data set.


Schema = Literal["sharegpt", "longbench", "numinamath", "wildchat"]


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of a data set.

    ``files``: read in this order (inside the zip file ``archive``, if given); empty: the repository's ``split``, found
    by ``datasets``. ``columns``: the columns read from Parquet files.
    """

    dataset: str
    files: tuple[str, ...] = ()
    archive: str | None = None
    revision: str = "main"
    split: str = "train"
    columns: tuple[str, ...] = ()


class Records(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How records become requests. Limits in tokens; a missing limit does not apply.

    ``input_min``/``input_max``: cut the context to a length drawn uniformly between them and skip shorter records.
    ``output_fixed`` replaces the response's length. ``rounds_min``/``rounds_max`` select and cut conversations.
    ``answer_min`` skips records with shorter responses. ``suffix`` is appended to each prompt.
    """

    schema: Schema
    output_max: int | None = None
    output_fixed: int | None = None
    answer_min: int | None = None
    input_min: int | None = None
    input_max: int | None = None
    rounds_min: int | None = None
    rounds_max: int | None = None
    suffix: str = ""


class Turns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rounds per conversation: ``min`` plus a geometric number, capped at ``max``, with ``mean`` after the cap."""

    min: int
    max: int
    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.mean <= self.max:
            raise ValueError("turns need 1 <= min <= mean <= max")


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Length distributions in tokens; in a multi-turn workload ``input`` is one user message without history."""

    input: LengthSpec
    output: LengthSpec
    turns: Turns | None = None


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One workload. Without ``hub`` and ``records`` it is synthetic: its profile defines its lengths, or ``fitted``.

    ``fitted`` also brings arrivals (see :mod:`ebbench.workloads.fitted`).
    """

    name: str
    description: str
    num_prompts: int
    profile: Profile
    hub: Hub | None = None
    records: Records | None = None
    sessions: SessionSpec | None = None
    fitted: Fitted | None = None

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError("num_prompts must be at least 1")
        if self.hub is not None and self.records is None:
            raise ValueError("[hub] needs [records], which says how to read it")
        if self.records is not None and self.fitted is not None:
            raise ValueError("a workload has [records] or [fitted], not both")

    @property
    def synthetic(self) -> bool:
        """Whether the lengths come from the file itself instead of a data set."""
        return self.records is None


def list_workloads() -> list[str]:
    """Names of the bundled workloads. Also valid: ``log:FILE`` and the path of a TOML file."""
    return sorted(path.stem for path in bundled_dir("workloads").glob("*.toml"))


def load_workload(name_or_path: str) -> WorkloadSpec:
    """Load a bundled workload by name, or a user's file by path. Raises UsageError."""
    known = list_workloads()
    if name_or_path not in known and not name_or_path.endswith(".toml") and Path(name_or_path).expanduser().is_file():
        raise UsageError(
            f"{name_or_path} is a file; write log:{name_or_path} to replay it, or give it to the workload whose "
            f"records it holds: --source file:{name_or_path}"
        )
    return load_toml(resolve(name_or_path, "workloads", known), WorkloadSpec)


@dataclass(frozen=True)
class Selection:
    """The requests to gather: ``sessions`` sessions for ``seed``. ``lengths_set``: the caller set the lengths.

    ``rate_scale``: factor of the arrival rate, for fitted workloads whose lengths change with time. ``redraw``: a data
    set that holds too few is drawn from again, unless its texts are sent.
    """

    sessions: int
    seed: int
    lengths_set: bool = False
    tokenizer: str | None = None
    with_text: bool = True
    rate_scale: float = 1.0
    redraw: bool = False
