"""Workload files: one TOML file per workload, which users add without code; and requests drawn from its lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ebbench.errors import UsageError
from ebbench.foreign.documents import load_toml
from ebbench.installation import bundled_dir, resolve
from ebbench.traffic.arrivals import substream
from ebbench.traffic.lengths import LengthSpec
from ebbench.workloads.fitted import Fitted
from ebbench.workloads.requests import Int64s, Requests, single_turn, with_history
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


def draw_requests(profile: Profile, sessions: int, seed: int, part: str = "") -> Requests:
    """Draw ``sessions`` sessions. ``part``: name of a scenario phase, which gets its own random substream."""
    turns = substream(seed, f"content/turns{part}")
    rounds = np.ones(sessions, np.int64) if profile.turns is None else draw_rounds(profile.turns, turns, sessions)
    n = int(rounds.sum())
    inputs = profile.input.draw(substream(seed, f"content/input{part}"), n)
    outputs = profile.output.draw(substream(seed, f"content/output{part}"), n)
    if profile.turns is None:
        return single_turn(inputs, outputs)
    return with_history(rounds, inputs, outputs)


def draw_rounds(turns: Turns, rng: np.random.Generator, sessions: int) -> Int64s:
    """Rounds per session: ``min`` plus a geometric number, capped at ``max``; shape (sessions,)."""
    if turns.min == turns.max:
        return np.full(sessions, turns.min)
    go_on = continuation(turns)
    if go_on == 0.0:
        return np.full(sessions, turns.min)
    more = rng.geometric(1.0 - go_on, size=sessions) - 1 if go_on < 1.0 else turns.max
    return np.minimum(turns.min + more, turns.max).astype(np.int64) * np.ones(sessions, np.int64)


def continuation(turns: Turns) -> float:
    """Probability of one more round such that the mean after the cap is ``turns.mean``.

    The mean of ``min(min + G, max)`` is ``min + q + q^2 + ... + q^(max-min)``, which increases with q: solved by
    bisection.
    """
    powers = np.arange(1, turns.max - turns.min + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if turns.min + float((middle**powers).sum()) < turns.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
