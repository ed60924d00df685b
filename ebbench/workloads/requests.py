"""Requests without times: columns of equal length, one row per turn, sessions contiguous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.config.declare import setting
from ebbench.records.warnings import RunWarning

# Builds Arrow arrays directly from numpy buffers.
#
# `pyarrow.array` imports pandas, if installed, to check for a Series, which costs a quarter of a second at the start
# of every command.


def ints(values: npt.NDArray[Any], kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An integer array of type ``kind``; null where ``valid`` is False."""
    data = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    validity = None if valid is None or valid.all() else _packed(valid)
    return pa.Array.from_buffers(kind, len(data), [validity, pa.py_buffer(data)])


def strings(texts: Sequence[str]) -> pa.Array:
    """A UTF-8 array; unpaired surrogates, which JSON may contain, become question marks."""
    encoded = [text.encode(errors="replace") for text in texts]
    offsets = _offsets([len(text) for text in encoded])
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def int_lists(rows: Sequence[Sequence[int] | None]) -> pa.Array:
    """An array of int64 lists, null where a row is None."""
    flat = np.fromiter((value for row in rows if row is not None for value in row), np.int64)
    valid = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
    return int_lists_of(flat, [0 if row is None else len(row) for row in rows], valid)


def int_lists_of(flat: npt.NDArray[Any], sizes: npt.ArrayLike, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """An array of int64 lists of these sizes, null where ``valid`` is False; ``flat``: their values, one after another.

    Raises OverflowError for more values than one array holds.
    """
    return pa.Array.from_buffers(
        pa.list_(pa.int64()),
        len(valid),
        [None if valid.all() else _packed(valid), pa.py_buffer(_offsets(sizes))],
        children=[ints(flat, pa.int64())],
    )


def _packed(mask: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _offsets(sizes: npt.ArrayLike) -> npt.NDArray[np.int32]:
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError("a column of more than 2 GiB; ask for fewer prompts, or build the plan without text")
    return np.concatenate([[0], ends]).astype(np.int32)


Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ImageSettings:
    """Images in every request of a session: ``tokens`` each in the model's prompt, ``side`` pixels high and wide."""

    tokens: int = setting(help="prompt tokens of one image, as your model counts them", unit="tokens", at_least=1)
    count: int = setting(1, "images per session", at_least=1)
    side: int = setting(448, "height and width of an image", unit="pixels", at_least=8, at_most=8192)


COLUMNS = (
    "turn", "input_tokens", "output_tokens", "prompt", "hash_ids", "content", "pause_s", "tool_share", "after",
    "hang_up_s", "thinking_tokens", "lora", "images", "classes", "priority", "offset_s", "primed_tokens",
)  # fmt: skip
"""Columns of requests with an entry per row, beside their sessions: arrays, Arrow arrays or lists."""


@dataclass(frozen=True)
class Requests:
    """Requests without send times. ``session`` counts from 0 and never decreases; ``turn`` counts from 0 per session.

    ``arrival_s``: one entry per session, from the start of the trace; None unless the source has times.
    ``block_tokens``: prompt tokens per hash id (None: 512). ``content``: stream of each row's tokens from 0, None: one
    per session. ``pause_s``: seconds between the end of what a row waits for and its start (NaN: none);
    ``tool_share``: the share of it that tools take, the rest is the user's (NaN: not known); ``after``: the turns that
    it waits for, None for the turn before. ``hang_up_s``: seconds after which the client hangs up (NaN: never).
    ``thinking_tokens``: how many output tokens, from the first one on, are thinking. ``lora``: adapter of each row;
    ``images``: those of each prompt, whose tokens ``input_tokens`` includes. ``classes`` and ``priority``: class and
    vLLM's priority of each row. ``offset_s``: recorded start of each row from that of its session;
    ``primed_tokens``: how much of its prompt the server holds when the run begins.
    """

    session: Int64s
    turn: Int32s
    input_tokens: Int32s
    output_tokens: Int32s
    prompt: pa.Array | None = None
    hash_ids: pa.Array | None = None
    block_tokens: int | None = None
    content: Int64s | None = None
    arrival_s: Floats | None = None
    pause_s: Floats | None = None
    tool_share: Floats | None = None
    after: Sequence[Sequence[int] | None] | None = None
    hang_up_s: Floats | None = None
    thinking_tokens: Int32s | None = None
    lora: Sequence[str | None] | None = None
    images: Sequence[ImageSettings | None] | None = None
    classes: Sequence[str | None] | None = None
    priority: Int32s | None = None
    offset_s: Floats | None = None
    primed_tokens: Int32s | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[RunWarning, ...] = ()

    def __len__(self) -> int:
        return len(self.session)

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return int(self.session[-1]) + 1 if len(self.session) else 0

    @property
    def streams(self) -> Int64s:
        """The stream of each row's tokens."""
        return self.session if self.content is None else self.content

    def keep(self, mask: npt.NDArray[np.bool_]) -> Requests:
        """Rows where ``mask`` holds; sessions are renumbered."""
        kept_sessions, session = np.unique(self.session[mask], return_inverse=True)
        changed: dict[str, Any] = {}
        if self.arrival_s is not None:
            changed["arrival_s"] = self.arrival_s[kept_sessions]
        if self.after is not None:
            changed["after"] = self._after_kept(mask)
        return self.taken(np.flatnonzero(mask), session.astype(np.int64), **changed)

    def taken(self, rows: Int64s, session: Int64s, **changed: Any) -> Requests:
        """The requests of ``rows``, in this order, as those of ``session``; ``changed``: fields that are not taken."""
        names = [name for name in COLUMNS if name not in changed and getattr(self, name) is not None]
        return replace(self, session=session, **{name: _taken(getattr(self, name), rows) for name in names}, **changed)

    def _after_kept(self, mask: npt.NDArray[np.bool_]) -> list[Sequence[int] | None]:
        """The turns that each kept row waits for, where a turn that is not kept is replaced by those it waits for."""
        assert self.after is not None  # the caller checked
        kept_after: list[Sequence[int] | None] = []
        of_dropped: dict[tuple[int, int], list[int]] = {}  # by session and turn
        columns = (self.session.tolist(), self.turn.tolist(), self.after, mask.tolist())
        for session, turn, after, kept in zip(*columns, strict=True):
            waits = ([turn - 1] if turn else []) if after is None else list(after)
            resolved = sorted(
                {turn_before for wait in waits for turn_before in of_dropped.get((session, wait), [wait])}
            )
            if kept:
                kept_after.append(after if resolved == waits else resolved)
            else:
                of_dropped[session, turn] = resolved
        return kept_after

    def repeated(self, times: int) -> Requests:
        """The sessions ``times`` times over, each time with new contents and hash ids, without arrival times."""
        if times == 1:
            return replace(self, arrival_s=None)
        content = self.streams
        steps = np.repeat(np.arange(times), len(self))
        return self.taken(
            np.tile(np.arange(len(self)), times),
            np.tile(self.session, times) + steps * self.sessions,
            content=np.tile(content, times) + steps * (int(content.max(initial=-1)) + 1),
            hash_ids=None if self.hash_ids is None else _renewed(self.hash_ids, times),
            arrival_s=None,
        )


def _taken(column: Any, rows: Int64s) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    return (
        column.take(ints(rows, pa.int64())) if isinstance(column, pa.Array) else [column[row] for row in rows.tolist()]
    )


def _renewed(hash_ids: pa.Array, times: int) -> pa.Array:
    """The lists ``times`` times over, each time with ids of their own: equal ones are served from the prefix cache."""
    names, labels = np.unique(hash_ids.drop_null().flatten().to_numpy(), return_inverse=True)
    valid = ~hash_ids.is_null().to_numpy(zero_copy_only=False)
    sizes = hash_ids.value_lengths().fill_null(0).to_numpy()
    flat = np.tile(labels, times) + np.repeat(np.arange(times), len(labels)) * len(names)
    return int_lists_of(flat, np.tile(sizes, times), np.tile(valid, times))


def first_sessions(requests: Requests, sessions: int, first: int = 0) -> Requests:
    """The sessions from ``first`` on. Beyond the last one they repeat from the start, with new contents.

    Sessions with arrival times cannot repeat, so there must be enough of them; times then count from that of ``first``.
    """
    times = -(-(first + sessions) // requests.sessions)
    if times == 1 and sessions == requests.sessions:
        return requests
    whole = requests if times == 1 else requests.repeated(times)
    part = whole.keep((whole.session >= first) & (whole.session < first + sessions))
    return part if part.arrival_s is None else replace(part, arrival_s=part.arrival_s - part.arrival_s[0] * (first > 0))


def repeatable(requests: Requests) -> bool:
    """Whether sessions may be repeated: not with own texts, which a server would still hold in its prefix cache."""
    return requests.prompt is None


def single_turn(input_tokens: Int32s, output_tokens: Int32s, **more: Any) -> Requests:
    """One request per session."""
    n = len(input_tokens)
    return Requests(np.arange(n), np.zeros(n, np.int32), input_tokens, output_tokens, **more)


def with_history(rounds: Int64s, message_tokens: Int32s, output_tokens: Int32s) -> Requests:
    """Multi-turn requests: each prompt consists of all earlier messages and responses and the new message.

    ``rounds`` has one entry per session; the other arrays have one entry per turn, sessions one after the other.
    """
    session = np.repeat(np.arange(len(rounds)), rounds)
    starts = np.concatenate([[0], np.cumsum(rounds)[:-1]]).astype(np.int64)
    turn = np.arange(len(session)) - starts[session]
    both = np.cumsum(message_tokens.astype(np.int64) + output_tokens)
    before_session = np.concatenate([[0], both])[starts][session]
    prompt_tokens = both - output_tokens - before_session
    return Requests(session, turn.astype(np.int32), prompt_tokens.astype(np.int32), output_tokens)
