"""The requests table as numpy arrays, converted once and shared by all metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.schema import tokens_after_first

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

STATUSES = ("ok", "failed", "timed_out", "cancelled", "abandoned", "never_sent")
MISSING = np.iinfo(np.int64).min
"""Marks null in the integer arrays below."""

NO_CLASS = ""
"""Stands for the class of requests that have none."""

NEEDED = (
    "request_id", "session", "turn", "phase", "input_tokens", "output_tokens", "cached_tokens", "status", "intended_ns",
    "sent_ns", "first_token_ns", "last_token_ns", "end_ns", "itl_ns", "bundled_tokens", "preemptions",
)  # fmt: skip
"""Columns of the requests table that the metrics read; where it has them also those of REQUESTS_EXTRAS."""


@dataclass(frozen=True)
class RequestColumns:
    """One entry per planned request; times in ns from the start of the run, ``MISSING`` for null.

    ``gaps_ns`` concatenates the inter-token gaps of all requests; ``gap_counts`` has the number of gaps per request.
    ``bundled``: requests in which not every token has a time of its own. ``request_class``: empty without a class.
    ``tool``: how long (ns) tools took before the request.
    """

    status: npt.NDArray[Any]
    phase: npt.NDArray[Any]
    session: Ints
    turn: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    preemptions: Ints
    intended: Ints
    sent: Ints
    first_token: Ints
    last_token: Ints
    end: Ints
    bundled: Mask
    gap_counts: Ints
    gaps_ns: Ints
    thinking_tokens: Ints
    first_answer: Ints
    prefilled: Ints
    request_class: npt.NDArray[Any]
    tool: Ints

    @property
    def ok(self) -> Mask:
        """Mask of requests that completed and have all times that metrics need; ``validity.py`` reports the others."""
        timed = (self.intended != MISSING) & (self.first_token != MISSING) & (self.last_token != MISSING)
        mask: Mask = (self.status == "ok") & timed
        return mask

    @property
    def generated(self) -> Mask:
        """Mask of completed requests that have a first token: answers of embeddings and rerank have no tokens."""
        mask: Mask = self.ok & (self.output_tokens > 0)
        return mask

    @cached_property
    def tokens_after_first(self) -> Ints:
        """Output tokens that came later than the first one; 0 where all came at one time."""
        return tokens_after_first(self.output_tokens, self.bundled, self.gap_counts, self.gaps_ns)

    @property
    def sent_tokens(self) -> Ints:
        """Output tokens that reached the client: without thinking that the server counted and did not send."""
        return np.where(self.bundled, self.gap_counts + 1, self.output_tokens)

    @property
    def prompt_computed(self) -> Mask:
        """Mask of requests whose first token was made, or whose prompt a prefill instance had computed."""
        mask: Mask = (self.first_token != MISSING) | (self.prefilled != MISSING)
        return mask

    def gaps_of(self, rows: Mask) -> Ints:
        """The gaps (ns) of the requests in ``rows``, in table order."""
        return self.gaps_ns if rows.all() else self.gaps_ns[np.repeat(rows, self.gap_counts)]

    @property
    def answer_began(self) -> Ints:
        """First token of the answer (ns): after the thinking, or the first of all where a request did not think.

        MISSING everywhere if no request of the table thought, and where an output ended in its thinking.
        """
        if not (self.thinking_tokens > 0).any():
            return np.full(len(self.status), MISSING, np.int64)
        return np.where(self.thinking_tokens > 0, self.first_answer, self.first_token)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The classes of the requests, in alphabetical order; ``NO_CLASS`` last, for those of no class.

        Empty if no request has one.
        """
        names = set(self.request_class.tolist())
        return () if names <= {NO_CLASS} else tuple(sorted(names, key=lambda name: (name == NO_CLASS, name)))

    @classmethod
    def of(cls, requests: pa.Table) -> RequestColumns:
        """Convert a table in the REQUESTS schema."""
        gaps = requests.column("itl_ns").combine_chunks()
        counts = pc.fill_null(pc.list_value_length(gaps), 0).to_numpy(zero_copy_only=False)
        session = _ints(requests, "session")
        alone = session == MISSING  # a request without a session is a session of its own
        session[alone] = -1 - np.flatnonzero(alone)
        return cls(
            status=_texts(requests, "status"),
            phase=_texts(requests, "phase"),
            session=session,
            turn=_ints(requests, "turn", 0),
            input_tokens=_ints(requests, "input_tokens", 0),
            output_tokens=_ints(requests, "output_tokens", 0),
            cached_tokens=_ints(requests, "cached_tokens"),
            preemptions=_ints(requests, "preemptions", 0),
            intended=_ints(requests, "intended_ns"),
            sent=_ints(requests, "sent_ns"),
            first_token=_ints(requests, "first_token_ns"),
            last_token=_ints(requests, "last_token_ns"),
            end=_ints(requests, "end_ns"),
            bundled=_ints(requests, "bundled_tokens", 0) == 1,
            gap_counts=counts.astype(np.int64),
            gaps_ns=pc.list_flatten(gaps).to_numpy(zero_copy_only=False),
            thinking_tokens=_optional(requests, "thinking_tokens", 0),
            first_answer=_optional(requests, "first_answer_ns"),
            prefilled=_optional(requests, "prefilled_ns"),
            request_class=_texts(requests, "class") if "class" in requests.column_names else np.full(len(session), ""),
            tool=_optional(requests, "tool_ns"),
        )


def _optional(table: pa.Table, name: str, null: int = MISSING) -> Ints:
    """A column that only some tables have."""
    return _ints(table, name, null) if name in table.column_names else np.full(table.num_rows, null, np.int64)


def _ints(table: pa.Table, name: str, null: int = MISSING) -> Ints:
    column = table.column(name).cast(pa.int64())
    values: Ints = pc.fill_null(column, null).to_numpy()
    return np.array(values)  # a copy: Arrow's memory is read-only


def _texts(table: pa.Table, name: str) -> npt.NDArray[Any]:
    texts: npt.NDArray[Any] = pc.fill_null(table.column(name), "").to_numpy()
    return texts
