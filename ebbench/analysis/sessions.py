"""Sessions as jobs: how long each took, how much of that in the model, and what it sent and received.

Definitions, the same for simulated and measured runs; a session is complete if all its planned requests completed:

- completion time: from the intended start of its first request to the last token of its last one
- model time: how much of it at least one request of the session was open, from its intended start to its last token
- wait: the rest of it; completion = model + wait
- tool time: the part of the wait in which tools ran, as the plan says; think time: the rest, the user's. Undefined
  for a session if the plan does not say it of one of its pauses: then both are one wait
- request time: sum over its requests of E2EL; more than the model time where sub-agents run at the same time
- end-to-end interactivity: output tokens / request time, in tokens/s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import MISSING, NO_CLASS, Ints, RequestColumns
from ebbench.analysis.metrics import NS_PER_MS, Distribution

SESSIONS = pa.schema(
    [
        pa.field("session", pa.int64(), nullable=False),
        pa.field("class", pa.string()),  # that of its first request
        pa.field("first_turn", pa.int32(), nullable=False),  # above 0: it had begun before the run (--session-start)
        pa.field("complete", pa.bool_(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),  # planned requests, those of sub-agents included
        pa.field("completed_turns", pa.int32(), nullable=False),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        # Null for sessions that are not complete.
        pa.field("completion_ms", pa.float64()),
        pa.field("model_ms", pa.float64()),
        pa.field("wait_ms", pa.float64()),
        pa.field("tool_ms", pa.float64()),  # of the wait; null too where the plan does not tell tools from users
        pa.field("think_ms", pa.float64()),
        pa.field("request_ms", pa.float64()),
        pa.field("interactivity_tokens_per_s", pa.float64()),
        # Of completed requests.
        pa.field("input_tokens", pa.int64(), nullable=False),
        pa.field("cached_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
    ]
)
"""One row per session, in the order of their first requests in the plan."""


def sessions_table(columns: RequestColumns) -> pa.Table | None:
    """Table SESSIONS; None if every session is a single request."""
    first, number = np.unique(columns.session, return_index=True, return_inverse=True)[1:]
    count = len(first)
    if count == len(number):
        return None
    ok, turns = columns.ok, np.bincount(number, minlength=count)
    done = np.bincount(number[ok], minlength=count)
    start, end, wait, tool = _spans(columns, ok, number, count)
    complete = done == turns
    told_apart = complete & (np.bincount(number[columns.tool == MISSING], minlength=count) == 0)

    def summed(values: Ints) -> Ints:
        return np.bincount(number[ok], values[ok], minlength=count).astype(np.int64)

    output = summed(columns.output_tokens)
    request_ns = np.bincount(number[ok], (columns.last_token - columns.intended)[ok], minlength=count)
    known = done > 0
    names = columns.request_class[first]
    columns_by_name = {
        "session": pa.array(columns.session[first]),
        "class": pa.array(names, pa.string(), mask=names == NO_CLASS),
        "first_turn": pa.array(columns.turn[first], pa.int32()),
        "complete": pa.array(complete),
        "turns": pa.array(turns, pa.int32()),
        "completed_turns": pa.array(done, pa.int32()),
        "start_ns": pa.array(start, pa.int64(), mask=~known),
        "end_ns": pa.array(end, pa.int64(), mask=~known),
        "completion_ms": pa.array((end - start) / NS_PER_MS, mask=~complete),
        "model_ms": pa.array((end - start - wait) / NS_PER_MS, mask=~complete),
        "wait_ms": pa.array(wait / NS_PER_MS, mask=~complete),
        "tool_ms": pa.array(tool / NS_PER_MS, mask=~told_apart),
        "think_ms": pa.array((wait - tool) / NS_PER_MS, mask=~told_apart),
        "request_ms": pa.array(request_ns / NS_PER_MS, mask=~complete),
        "interactivity_tokens_per_s": pa.array(output / np.maximum(request_ns, 1) * 1e9, mask=~complete),
        "input_tokens": pa.array(summed(columns.input_tokens)),
        "cached_tokens": pa.array(summed(np.where(columns.cached_tokens == MISSING, 0, columns.cached_tokens))),
        "output_tokens": pa.array(output),
    }
    return pa.table(columns_by_name, schema=SESSIONS).take(pa.array(np.argsort(first, kind="stable")))


def _spans(
    columns: RequestColumns, ok: npt.NDArray[np.bool_], number: Ints, count: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """First intended start and last token of each session, the time between in which no request was open (ns), and how
    much of that tools took before the request that ended it."""
    rows = np.flatnonzero(ok)
    rows = rows[np.lexsort((columns.intended[rows], number[rows]))]
    session, starts, ends = number[rows], columns.intended[rows], columns.last_token[rows]
    by_end = np.argsort(ends, kind="stable")
    rank = np.empty(len(ends), np.int64)
    rank[by_end] = np.arange(len(ends))
    reached = np.maximum.accumulate(session.astype(np.int64) * len(ends) + rank)
    latest: Ints = ends[by_end][reached % max(len(ends), 1)]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = session[1:] != session[:-1]
    idle = np.zeros(len(rows), np.int64)
    idle[1:] = np.where(begins[1:], 0, np.maximum(starts[1:] - latest[:-1], 0))
    start, end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    start[session[begins]] = starts[begins]
    finals = np.append(begins[1:], np.True_) if len(rows) else begins
    end[session[finals]] = latest[finals]
    wait, tool = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(wait, session, idle)
    np.add.at(tool, session, np.minimum(idle, np.maximum(columns.tool[rows], 0)))
    return start, end, wait, tool


_TIMES = ("completion", "model", "wait", "tool", "think")


@dataclass(frozen=True)
class SessionFigures:
    """Sessions that began in a run, of all or of one class; times in ms, of complete ones.

    ``model_share``: model time / completion time, ``tool_share`` and ``think_share``: the same of tools and users, and
    ``interactivity_tokens_per_s``: output tokens / request time, each over all complete sessions together. ``tool``
    and ``think``: of the sessions whose plan tells them apart; the shares are None unless it does of all.
    """

    planned: int
    complete: int
    completion: Distribution
    model: Distribution
    wait: Distribution
    tool: Distribution
    think: Distribution
    model_share: float | None
    tool_share: float | None
    think_share: float | None
    interactivity_tokens_per_s: float | None
    mean_turns: float | None
    mean_input_tokens: float | None
    mean_output_tokens: float | None

    @classmethod
    def of(cls, table: pa.Table) -> SessionFigures:
        """The figures of a table SESSIONS."""
        table = table.filter(pc.equal(table["first_turn"], 0))
        done = table.filter(table["complete"])

        def ns(name: str) -> npt.NDArray[np.float64]:
            return np.asarray(done[name].drop_null().to_numpy(), np.float64) * NS_PER_MS

        def mean(name: str) -> float | None:
            return float(done[name].to_numpy().mean()) if done.num_rows else None

        def share(part: npt.NDArray[np.float64]) -> float | None:
            return float(part.sum()) / whole if whole and len(part) == done.num_rows else None

        completion, model, wait, tool, think = (ns(f"{name}_ms") for name in _TIMES)
        whole, requests = float(completion.sum()), float(ns("request_ms").sum())
        of = Distribution.of_ns
        return cls(
            table.num_rows, done.num_rows, of(completion), of(model), of(wait), of(tool), of(think), share(model),
            share(tool), share(think),
            float(done["output_tokens"].to_numpy().sum()) / requests * 1e9 if requests else None,
            mean("turns"), mean("input_tokens"), mean("output_tokens"),
        )  # fmt: skip

    def to_dict(self) -> dict[str, float | int | None]:
        """Flat values, times as ``{mean,median,std,p90,p95,p99}_{completion,model,wait,tool,think}_ms``."""
        own = {name: value for name, value in vars(self).items() if name not in _TIMES}
        times = {f"{statistic}_{name}_ms": value for name in _TIMES for statistic, value in getattr(self, name).items()}
        return own | times


def figures_by_class(table: pa.Table | None) -> Mapping[str, SessionFigures]:
    """The figures of all sessions under ``""``, and of each class by name; empty without sessions of several turns."""
    if table is None:
        return {}
    classes = np.asarray(table["class"].fill_null(NO_CLASS).to_numpy(zero_copy_only=False))
    names = sorted(set(classes.tolist()) - {NO_CLASS})
    return {"": SessionFigures.of(table)} | {
        name: SessionFigures.of(table.filter(pa.array(classes == name))) for name in names
    }
