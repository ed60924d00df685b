"""The limit on the lateness of sends, above which a run is INVALID."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

LAG_FLOOR_MS = 10.0
LAG_SHARE_OF_TTFT = 0.05
LAG_REMEDY = "use more --workers or less load, or allow more with --lag-limit-ms"


def lag_limit_ms(requests: pa.Table, asked_ms: float | None = None) -> float:
    """The limit on the p99 lag in ms: ``asked_ms``, else the larger of 10 ms and 5 % of the median TTFT."""
    if asked_ms is not None:
        return asked_ms
    done = requests.filter(pc.equal(requests.column("status"), "ok"))
    ttft_ns = pc.subtract(done.column("first_token_ns"), done.column("intended_ns"))
    median_ns = pc.quantile(ttft_ns, 0.5)[0].as_py() or 0.0
    return max(LAG_FLOOR_MS, LAG_SHARE_OF_TTFT * median_ns / 1e6)
