"""A scheduling step, and the log of the steps of a run."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.schema import STEPS
from ebbench.simulation.state import Ints

NO_ROWS: Ints = np.zeros(0, np.int64)
NS_PER_S = 1e9


class Verified(NamedTuple):
    """What became of the drafts of a step, one entry per row that it samples: the drafts verified, those accepted, and
    the tokens that the request gets."""

    drafts: Ints
    accepted: Ints
    tokens: Ints


@dataclass(slots=True, eq=False)
class Step:
    """A scheduled step. ``rows`` and ``tokens`` are in scheduling order; ``sampled`` rows get a token at ``end_ns``.

    ``computed``: tokens of each row computed before it, where scheduling the decodes had to look them up, else None.
    ``pass_number``: of the pass that several units make together. ``verified``: None without speculative decoding.
    ``next_drafts``: tokens drafted in it per sequence, for the next step.
    """

    scheduled_ns: int
    start_ns: int = 0
    end_ns: int = 0
    rows: Ints = field(default_factory=lambda: NO_ROWS)
    tokens: Ints = field(default_factory=lambda: NO_ROWS)
    sampled: Ints = field(default_factory=lambda: NO_ROWS)
    computed: Ints | None = None
    prefill_tokens: int = 0
    decode_seqs: int = 0
    preempted: list[int] = field(default_factory=list)
    mode: str = "mb"
    k: int | None = None
    n_limit: int | None = None
    kv_blocks_used: int = 0
    waiting: int = 0
    running: int = 0
    pass_number: int = 0
    verified: Verified | None = None
    next_drafts: int = 0
    drafts_gone: int = 0  # requests whose clients hung up while their drafts were verified

    def leave_out(self, row: int) -> None:
        """Drop the tokens of a request that is gone."""
        kept = self.sampled != row
        if np.count_nonzero(kept) < len(kept):
            self.sampled = self.sampled[kept]
            if self.verified is not None:
                self.drafts_gone += int(np.count_nonzero(self.verified.drafts[~kept]))
                self.verified = Verified(*(counts[kept] for counts in self.verified))

    @property
    def empty(self) -> bool:
        """Whether nothing was scheduled."""
        return not len(self.rows)


# Keeps the steps of a run and makes the table STEPS of them.
#
# A step is an object of some hundred bytes and several arrays. Long runs make millions, so every FOLD steps are
# folded into Arrow columns while the run goes on. The columns are kept compressed: successive steps have nearly the
# same requests, so their lists shrink to a few per cent. At the end part after part becomes STEPS; or part after
# part is written to a run's directory (`StepParts`), and STEPS is never in memory as a whole.

Ints32 = npt.NDArray[np.int32]
FOLD = 8192
"""Steps that are kept as objects before they become columns. Runs up to this length are not compressed."""
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)

# Columns of STEPS that are attributes of a step.
PLAIN_COLUMNS = (
    "scheduled_ns", "start_ns", "end_ns", "mode", "prefill_tokens", "decode_seqs", "kv_blocks_used", "waiting",
    "running", "k", "n_limit",
)  # fmt: skip
_TIMES = ("scheduled_ns", "start_ns", "end_ns")
_FIGURE_COLUMNS = (
    "instance", *_TIMES, "prefill_tokens", "decode_seqs", "kv_blocks_used", "waiting", "running", "preemptions",
)  # fmt: skip


class _Folded(NamedTuple):
    """Columns of steps as an Arrow stream, compressed; and how many steps each instance has in it."""

    stream: pa.Buffer
    steps_of: Counter[int]


@dataclass(frozen=True, slots=True)  # read at every step: a field of a NamedTuple takes twice as long
class _Kept:
    """Folded steps, and those since, each with its instance."""

    folded: tuple[_Folded, ...]
    steps: list[tuple[int, Step]]


@dataclass(frozen=True)
class StepParts:
    """The table STEPS in parts, each made of compressed columns when it is asked for: one row per step in the order
    they ran, or by the time of their scheduling (``by_time``).

    ``request_ids``: by row. ``kv_blocks_total``: of every instance, or one value per instance. Steps before number
    ``first`` are left out; times count from ``begin_ns``.
    """

    kept: _Kept
    request_ids: pa.Array
    kv_blocks_total: int | Sequence[int]
    first: int = 0
    begin_ns: int = 0
    by_time: bool = False

    @property
    def num_rows(self) -> int:
        """Number of steps."""
        return max(0, sum(part.steps_of.total() for part in self.kept.folded) + len(self.kept.steps) - self.first)

    @property
    def last_mode(self) -> str:
        """The mode of the last step; "" if there is none."""
        if not self.num_rows:
            return ""
        last = self.kept.steps[-1][1].mode if self.kept.steps else _unfold(self.kept.folded[-1])["mode"][-1].as_py()
        return str(last)

    def __iter__(self) -> Iterator[pa.Table]:
        """The parts, some thousand rows each, at least one."""
        parts = _without_first_rows(self.first, chain(map(_unfold, self.kept.folded), [_columns_of(self.kept.steps)]))
        made = 0
        for part in _by_time(parts) if self.by_time else parts:
            yield _finished(part, self.request_ids, self.kv_blocks_total, self.begin_ns, made)
            made += len(part)

    def table(self) -> pa.Table:
        """All parts as one table."""
        return pa.concat_tables(self)


class StepLog:
    """Keeps all steps."""

    def __init__(self) -> None:
        self._kept = _Kept((), [])

    def step(self, instance: int, step: Step) -> None:
        """Keep a step; its fields do not change afterwards."""
        steps = self._kept.steps
        steps.append((instance, step))
        if len(steps) >= FOLD:
            # One assignment, so that an interruption neither loses steps nor keeps them twice.
            self._kept = _Kept((*self._kept.folded, _fold(steps)), [])

    def __len__(self) -> int:
        return sum(part.steps_of.total() for part in self._kept.folded) + len(self._kept.steps)

    def steps_per_instance(self) -> Counter[int]:
        """How many steps each instance has made."""
        steps = Counter(instance for instance, _ in self._kept.steps)
        for part in self._kept.folded:
            steps.update(part.steps_of)
        return steps

    def parts(
        self,
        request_ids: pa.Array,
        kv_blocks_total: int | Sequence[int],
        first: int = 0,
        begin_ns: int = 0,
        *,
        by_time: bool = False,
    ) -> StepParts:
        """The steps; see :class:`StepParts` for the arguments. The log is empty afterwards."""
        kept, self._kept = self._kept, _Kept((), [])
        return StepParts(kept, request_ids, kv_blocks_total, first, begin_ns, by_time)


class FigureLog:
    """Keeps of every step the numbers that figures need, and neither its requests nor its mode.

    Callers that need only figures run many simulations: this takes a tenth of the time of a StepLog, and 80 bytes.
    """

    def __init__(self) -> None:
        self._numbers = array("q")

    def step(self, instance: int, step: Step) -> None:
        """Keep the step's numbers, by _FIGURE_COLUMNS."""
        self._numbers.extend((
            instance, step.scheduled_ns, step.start_ns, step.end_ns, step.prefill_tokens, step.decode_seqs,
            step.kv_blocks_used, step.waiting, step.running, len(step.preempted),
        ))  # fmt: skip

    def __len__(self) -> int:
        return len(self._numbers) // len(_FIGURE_COLUMNS)

    def steps_per_instance(self) -> Counter[int]:
        """How many steps each instance has made."""
        return Counter(self._numbers[:: len(_FIGURE_COLUMNS)])

    def table(self, kv_blocks_total: Sequence[int], first: int, begin_ns: int) -> pa.Table:
        """The kept columns of STEPS, and those that follow from them, in the order of the steps' results.

        The arguments are those of :class:`StepParts`.
        """
        rows = np.frombuffer(self._numbers, np.int64).reshape(-1, len(_FIGURE_COLUMNS))[first:]
        columns: dict[str, Any] = dict(zip(_FIGURE_COLUMNS, rows.T, strict=True))
        columns |= {name: columns[name] - begin_ns for name in _TIMES}
        prompts, decodes = columns["prefill_tokens"] > 0, columns["decode_seqs"] > 0
        columns["phase"] = np.where(prompts, np.where(decodes, "mixed", "prefill"), "decode")
        columns["kv_blocks_total"] = np.asarray(kv_blocks_total)[columns["instance"]]
        schema = pa.schema([field for field in STEPS if field.name in columns])
        return pa.table({name: pa.array(columns[name]) for name in schema.names}).cast(schema)


def step_phase(step: Step) -> str:
    """What a step held: prefill, decode or mixed."""
    if not step.prefill_tokens:
        return "decode"
    return "mixed" if step.decode_seqs else "prefill"


def _fold(steps: Sequence[tuple[int, Step]]) -> _Folded:
    """Compress steps, each with its instance."""
    columns = _columns_of(steps)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema, options=_COMPRESSED) as stream:
        stream.write_table(columns)
    exact = pa.py_buffer(sink.getvalue().to_pybytes())  # the stream's own buffer has up to twice the size
    return _Folded(exact, Counter(instance for instance, _ in steps))


def _unfold(part: _Folded) -> pa.Table:
    return pa.ipc.open_stream(part.stream).read_all()


def _columns_of(steps: Sequence[tuple[int, Step]]) -> pa.Table:
    """Steps as columns of STEPS, with the rows of requests in place of their names."""
    made = [step for _, step in steps]
    rows, preempted = _column(made, "rows"), [sorted(group) if group else group for group in _column(made, "preempted")]
    offsets = np.concatenate([[0], np.cumsum(list(map(len, rows)))]).astype(np.int32)
    columns = {name: pa.array(_column(made, name), STEPS.field(name).type) for name in PLAIN_COLUMNS} | {
        "instance": pa.array([instance for instance, _ in steps], pa.int32()),
        "phase": pa.array(list(map(step_phase, made)), pa.string()),
        "request_ids": pa.ListArray.from_arrays(offsets, pa.array(_flat(rows))),
        "request_tokens": pa.ListArray.from_arrays(offsets, pa.array(_flat(_column(made, "tokens")))),
        "preemptions": pa.array(list(map(len, preempted)), pa.int32()),
        "preempted_ids": pa.ListArray.from_arrays(
            np.concatenate([[0], np.cumsum(list(map(len, preempted)))]).astype(np.int32), pa.array(_flat(preempted))
        ),
    }
    return pa.table(columns)


def _without_first_rows(first: int, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The parts without the ``first`` rows of them all."""
    for part in parts:
        yield part.slice(first)
        first = max(0, first - len(part))


def _by_time(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows of all parts by the time of their scheduling, equal times in the order they have."""
    left = deque(parts)
    times_ns = np.concatenate([part["scheduled_ns"].to_numpy() for part in left])
    earliest_later_ns = np.minimum.accumulate(times_ns[::-1])[::-1][1:]
    early = times_ns[:-1] > earliest_later_ns
    # Most runs are in order up to the end of their load: only what follows is copied.
    ordered = int(early.argmax()) if early.any() else len(times_ns)
    while left and len(left[0]) <= ordered:
        ordered -= len(left[0])
        yield left.popleft()
    if left:
        yield left[0].slice(0, ordered)
        rest = pa.concat_tables(left)
        order = np.argsort(times_ns[-len(rest) :][ordered:], kind="stable")
        yield rest.slice(ordered).combine_chunks().take(pa.array(order))


def _finished(
    columns: pa.Table, request_ids: pa.Array, totals: int | Sequence[int], begin_ns: int, first_id: int = 0
) -> pa.Table:
    """The table STEPS of columns as :func:`_columns_of` makes them, numbered from ``first_id``."""
    count = len(columns)
    instances = columns["instance"].to_numpy()
    blocks = np.full(count, totals) if isinstance(totals, int) else np.asarray(totals)[instances]
    finished: dict[str, Any] = {name: columns[name] for name in columns.column_names}
    finished |= {name: pc.subtract(columns[name], begin_ns) for name in _TIMES if begin_ns}
    finished |= {
        "step_id": np.arange(first_id, first_id + count, dtype=np.int64),
        "kv_blocks_total": pa.array(blocks.astype(np.int32)),
        "request_ids": _rows_to_ids(columns["request_ids"], request_ids),
        "preempted_ids": _rows_to_ids(columns["preempted_ids"], request_ids),
    }
    return pa.table({name: finished[name] for name in STEPS.names}, schema=STEPS)


def _rows_to_ids(rows: pa.ChunkedArray, request_ids: pa.Array) -> pa.ListArray:
    """Lists of rows as lists of names."""
    lists = rows.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # no chunk, or several
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], pa.list_(pa.int32()))
    offsets = np.asarray(lists.offsets)
    return pa.ListArray.from_arrays((offsets - offsets[0]).astype(np.int32), request_ids.take(lists.flatten()))


def _column(steps: Sequence[Step], name: str) -> list[Any]:
    """One attribute of every step. ``map`` with an attrgetter reads ten thousands of steps in half a loop's time."""
    return list(map(attrgetter(name), steps))


def _flat(lists: Iterable[Any]) -> Ints32:
    """All values of these lists or arrays, one after the other."""
    parts = list(filter(len, lists))
    return np.concatenate(parts, dtype=np.int32, casting="unsafe") if parts else np.zeros(0, np.int32)
