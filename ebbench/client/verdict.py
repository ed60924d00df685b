"""The client's own findings about a run: reasons that make it invalid, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client.lag import lag_percentile_ns
from ebbench.client.messages import WorkerDone
from ebbench.records.lateness import LAG_REMEDY

_TOKENIZER_TOLERANCE = 0.02  # share by which prompt token counts may differ, for special tokens


def loop_lag_p99_ms(workers: Iterable[WorkerDone | None]) -> float:
    """The 99th percentile of the event loop's lag, of the worst worker."""
    lags = [lag_percentile_ns(np.frombuffer(done.late_ns, np.int64), 0.99) for done in workers if done is not None]
    return max(lags, default=0.0) / 1e6


def send_lag_p99_ms(requests: pa.Table) -> float:
    """The 99th percentile of actual send minus intended start, in ms."""
    lag_ns = pc.subtract(requests.column("sent_ns"), requests.column("intended_ns"))
    return float(pc.quantile(lag_ns, 0.99)[0].as_py() or 0.0) / 1e6


def invalid_reasons(limit_ms: float, workers: Mapping[int, WorkerDone | None]) -> tuple[str, ...]:
    """Reasons that the requests table does not show: a stalled event loop, a worker that died (None)."""
    reasons = []
    lag_ms = loop_lag_p99_ms(workers.values())
    if lag_ms > limit_ms:
        reasons.append(
            f"the client's event loop stalled: p99 lag {lag_ms:.1f} ms, limit {limit_ms:.4g} ms; {LAG_REMEDY}"
        )
    for number, done in workers.items():
        if done is None:
            reasons.append(f"client worker {number} died; its requests are lost")
        elif done.error is not None:
            reasons.append(f"client worker {number} failed: {done.error}")
    return tuple(reasons)


def client_warnings(requests: pa.Table, plan: pa.Table, renamed: int, dropped: int) -> tuple[str, ...]:
    """Warnings about the measurement, one sentence each."""
    found = [_tokenizer_warning(requests, plan), _bundle_warning(requests)]
    if renamed:
        found.append(f"{renamed} request ids occurred more than once and were made unique")
    if dropped:
        found.append(f"{dropped} request(s) exceed the server's max_model_len and were left out")
    return tuple(text for text in found if text)


def other_models_warning(other_models: Mapping[str, int], asked: str, completed: int) -> str | None:
    """A warning if complete responses name another model than the one asked for; None if none does."""
    others = sum(other_models.values())
    if not others:
        return None
    if others == completed and len(other_models) == 1 and " and " not in next(iter(other_models)):
        (name,) = other_models
        return (
            f"every answer names {name!r} as its model, not {asked!r} as asked for: an alias of it, or another model "
            "that these figures are then of"
        )
    named = ", ".join(f"{count:,} from {name!r}" for name, count in Counter(other_models).most_common(3))
    more = f" and {len(other_models) - 3} more" if len(other_models) > 3 else ""
    return (
        f"{others:,} of {completed:,} answers did not come from {asked!r} alone, as asked for: {named}{more}. These "
        "figures mix models: a router in front of the server falls back, or balances among several; measure one model"
    )


def _tokenizer_warning(requests: pa.Table, plan: pa.Table) -> str | None:
    done = pc.equal(requests.column("status"), "ok")
    counted = requests.column("input_tokens").filter(done).to_numpy()
    planned = plan.column("input_tokens").filter(done).to_numpy()
    if counted.size == 0:
        return None
    other = np.abs(counted - planned) > np.maximum(1, _TOKENIZER_TOLERANCE * planned)
    if not other.any():
        return None
    ratio = float(np.median(counted[other] / np.maximum(planned[other], 1)))
    return (
        f"the server counts prompt tokens otherwise than the plan in {int(other.sum())} of {other.size} requests "
        f"(median {ratio:.2f} times as many); its counts are used"
    )


def _bundle_warning(requests: pa.Table) -> str | None:
    bundled = pc.sum(requests.column("bundled_tokens")).as_py() or 0
    if not bundled:
        return None
    return (
        f"{bundled} answers came with several tokens in one message: gaps of zero stand for them, so read TPOT, "
        "not the percentiles of ITL"
    )
