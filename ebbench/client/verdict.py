"""The client's own findings about a run: reasons that make it invalid, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client.dialects import OddNumber
from ebbench.client.lag import PERIOD_NS
from ebbench.client.messages import WorkerDone
from ebbench.records.schema import SAME_TIME_NS, tokens_after_first_of
from ebbench.records.warnings import OTHER_MODEL, RunWarning, warning

_JOINED_SHARE = 0.1
"""Share of the output tokens without a time of their own from which on the median of ITL is misleading: zeros up to
this share move the median to what was the 44th percentile."""
_TOKENIZER_TOLERANCE = 0.02  # share by which prompt token counts may differ, for special tokens


def loop_lag_p99_ms(workers: Iterable[WorkerDone | None]) -> float:
    """The 99th percentile of the event loop's lag, of the worst worker."""
    lags = [lag_percentile_ns(np.frombuffer(done.late_ns, np.int64), 0.99) for done in workers if done is not None]
    return max(lags, default=0.0) / 1e6


def send_lag_p99_ms(requests: pa.Table) -> float:
    """The 99th percentile of actual send minus intended start, in ms."""
    lag_ns = pc.subtract(requests.column("sent_ns"), requests.column("intended_ns"))
    return float(pc.quantile(lag_ns, 0.99)[0].as_py() or 0.0) / 1e6


def invalid_reasons(limit_ms: float, workers: Mapping[int, WorkerDone | None]) -> tuple[RunWarning, ...]:
    """Reasons that the requests table does not show: a stalled event loop, a worker that died (None)."""
    reasons = []
    lag_ms = loop_lag_p99_ms(workers.values())
    if lag_ms > limit_ms:
        reasons.append(warning("event-loop-stalled", p99_lag_ms=lag_ms, limit_ms=limit_ms))
    for number, done in workers.items():
        if done is None:
            reasons.append(warning("worker-died", worker=number))
        elif done.error is not None:
            reasons.append(warning("worker-failed", worker=number, error=done.error))
    return tuple(reasons)


def client_warnings(
    requests: pa.Table,
    plan: pa.Table,
    renamed: int,
    dropped: int,
    odd_numbers: Mapping[str, OddNumber] = MappingProxyType({}),
) -> tuple[RunWarning, ...]:
    """Warnings about the measurement. ``odd_numbers``: by field of ``usage``."""
    warnings = [_tokenizer_warning(requests, plan), token_time_warning(requests)]
    warnings += [
        warning("odd-usage", field=name, answers=odd.answers, first=odd.first) for name, odd in odd_numbers.items()
    ]
    if renamed:
        warnings.append(warning("ids-renamed", requests=renamed))
    if dropped:
        warnings.append(warning("beyond-server", requests=dropped))
    return tuple(filter(None, warnings))


def other_models_warning(other_models: Mapping[str, int], asked: str, completed: int) -> RunWarning | None:
    """A warning if complete responses name another model than the one asked for; None if none does."""
    answers = {name: count for name, count in other_models.items() if count}
    return warning(OTHER_MODEL, answers=answers, asked=asked, completed=completed) if answers else None


def _tokenizer_warning(requests: pa.Table, plan: pa.Table) -> RunWarning | None:
    done = pc.equal(requests.column("status"), "ok")
    counted = requests.column("input_tokens").filter(done).to_numpy()
    planned = plan.column("input_tokens").filter(done).to_numpy()
    if counted.size == 0:
        return None
    unlike = np.abs(counted - planned) > np.maximum(1, _TOKENIZER_TOLERANCE * planned)
    if not unlike.any():
        return None
    ratio = float(np.median(counted[unlike] / np.maximum(planned[unlike], 1)))
    return warning("other-tokenizer", differ=int(unlike.sum()), requests=unlike.size, median_ratio=ratio)


def token_time_warning(requests: pa.Table) -> RunWarning | None:
    """A warning where several tokens share a time, so that TTFT, TPOT and ITL are less precise; None without."""
    done = requests.filter(pc.equal(requests.column("status"), "ok"))
    counted, after = done.column("output_tokens").to_numpy(), tokens_after_first_of(done)
    lists = done.column("itl_ns").combine_chunks()
    gaps = pc.list_flatten(lists).to_numpy()
    sent = pc.list_value_length(lists).to_numpy() + 1
    at_once, hidden = (after == 0) & (sent > 1), sent < counted
    joined = (gaps < SAME_TIME_NS) & np.repeat(~at_once, sent - 1)
    share = joined.sum() / max(1, sent[~at_once].sum())
    parts = {
        "joined_share": float(share) if share >= _JOINED_SHARE else 0.0,
        "at_once": int(at_once.sum()),
        "hidden": int(hidden.sum()),
    }
    return warning("shared-times", answers=len(sent), **parts) if any(parts.values()) else None


def lag_percentile_ns(
    late_ns: Sequence[int] | npt.NDArray[np.int64], share: float, period_ns: int = PERIOD_NS
) -> float:
    """The delay that a share ``share`` of events at random times does not exceed, in ns.

    A loop blocked for L ns delays events of that time by L to 0 ns, so the time in which the delay exceeds x is the sum
    of max(0, L - x) over all ticks. Counting ticks would hide long stalls, which are one tick each.
    """
    late = np.asarray(late_ns, dtype=np.float64)
    if late.size == 0:
        return 0.0
    allowed_ns = (1.0 - share) * float((late + period_ns).sum())
    low, high = 0.0, float(late.max())
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.maximum(late - middle, 0.0).sum()) > allowed_ns:
            low = middle
        else:
            high = middle
    return high
