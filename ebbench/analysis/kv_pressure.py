"""What a full KV cache cost a run: requests that waited for memory, and preempted ones that were computed again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.warnings import KV_CACHE, RunWarning, warning

WORTH_SAYING = 0.02
"""Share of the time, or of the requests, from which on a full cache is said."""
STEP_COLUMNS = (
    "start_ns", "end_ns", "prefill_tokens", "decode_seqs", "kv_blocks_used", "kv_blocks_total", "waiting", "running",
    "preemptions",
)  # fmt: skip
FULL = 0.9
"""Share of a server's KV cache in use from which on requests that wait are taken to wait for memory."""
_USAGE = re.compile(r"(kv_cache_usage_perc|gpu_cache_usage_perc|sglang:token_usage)$")
_WAITING = re.compile(r"(num_requests_waiting|sglang:num_queue_reqs)$")
_RUNNING = re.compile(r"(num_requests_running|sglang:num_running_reqs)$")
_PREEMPTIONS = re.compile(r"num_preemptions(_total)?$")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KvPressure:
    """Costs of a full KV cache in one run.

    ``full_share``: share of the time in which requests waited for memory, not for a slot; ``running``: mean number of
    running sequences per engine meanwhile, ``slots``: of how many, None if not known. ``repeated_tokens``: prompt and
    output tokens of preempted requests that were computed again, ``repeated_share``: share of the time that this took;
    None if not known.
    """

    full_share: float
    running: float
    slots: int | None
    preemptions: int
    preempted_share: float
    repeated_tokens: int | None = None
    repeated_share: float | None = None

    @property
    def matters(self) -> bool:
        """Whether it cost enough to be said."""
        repeated = self.preempted_share if self.repeated_share is None else self.repeated_share
        return max(self.full_share, repeated) > WORTH_SAYING

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """What a full KV cache cost, with remedies; empty if that was little."""
        if not self.matters:
            return ()
        full_share = self.full_share if self.full_share > WORTH_SAYING else None
        of_memory = {"full_share": full_share, "running": self.running, "slots": self.slots}
        again = {"repeated_tokens": self.repeated_tokens, "repeated_share": self.repeated_share}
        return (warning(KV_CACHE, **of_memory, preemptions=self.preemptions, **again),)

    @property
    def figures(self) -> dict[str, float | None]:
        """Its shares of the time and repeated tokens, by their names in JSON."""
        return {
            "kv_full_share": self.full_share,
            "repeated_tokens": self.repeated_tokens,
            "repeated_share": self.repeated_share,
        }


FIGURES = ("kv_full_share", "repeated_tokens", "repeated_share")
"""Names of :attr:`KvPressure.figures`."""


def kv_pressure(steps: pa.Table, requests: pa.Table, options: Mapping[str, Any]) -> KvPressure | None:
    """The costs by the recorded steps of a run, with ``options`` as in its manifest; None without steps."""
    if not steps.num_rows:
        return None
    columns = {name: steps.column(name).to_numpy() for name in STEP_COLUMNS}
    prompts = requests.filter(pc.equal(requests["status"], "ok"))["input_tokens"]
    spent = (columns["end_ns"] - columns["start_ns"]).astype(np.float64)
    total = float(spent.sum()) or 1.0
    slots = options.get("max_num_active_seqs") or options.get("max_num_seqs")
    full = _waits_for_memory(columns, slots, options, pc.quantile(prompts, 0.5)[0].as_py() or 0)
    preemptions = int(columns["preemptions"].sum())
    repeated = _repeated_tokens(columns, requests) if preemptions else 0
    computed = int(columns["prefill_tokens"].sum())
    tokens = np.maximum(columns["prefill_tokens"] + columns["decode_seqs"], 1)
    prefilling = float((spent * columns["prefill_tokens"] / tokens).sum()) / total
    return KvPressure(
        full_share=float(spent[full].sum()) / total,
        running=float(np.average(columns["running"][full], weights=spent[full])) if spent[full].sum() else 0.0,
        slots=slots,
        preemptions=preemptions,
        preempted_share=preemptions / max(requests.num_rows, 1),
        repeated_tokens=repeated,
        repeated_share=prefilling * repeated / computed if computed else 0.0,
    )


def _waits_for_memory(
    steps: Mapping[str, npt.NDArray[np.int64]], slots: int | None, options: Mapping[str, Any], prompt_tokens: float
) -> npt.NDArray[np.bool_]:
    """Steps in which requests waited, slots were free, and the free blocks held no prompt of the median length."""
    free_tokens = (steps["kv_blocks_total"] - steps["kv_blocks_used"]) * int(options.get("block_size") or 1)
    limit = np.inf if slots is None else slots
    found: npt.NDArray[np.bool_] = (steps["waiting"] > 0) & (steps["running"] < limit) & (free_tokens < prompt_tokens)
    return found


def _repeated_tokens(steps: Mapping[str, npt.NDArray[np.int64]], requests: pa.Table) -> int:
    """Tokens that steps computed in prefill beyond every prompt once, less what the prefix cache held.

    A resumed request computes its prompt and the outputs so far again, and these count as prefill.
    """
    started = requests.filter(pc.not_equal(requests["status"], "never_sent"))
    prompts = pc.sum(started["input_tokens"]).as_py() or 0
    cached = pc.sum(started["cached_tokens"]).as_py() or 0
    return max(int(steps["prefill_tokens"].sum()) - (prompts - cached), 0)


def kv_pressure_by_metrics(metrics: pa.Table, requests: int, slots: int | None) -> KvPressure | None:
    """The costs by a server's own metrics during a run; None if they do not include its KV cache."""
    series = _series(metrics)
    usage = [values for name, values in series if _USAGE.search(name)]
    preempted = [values for name, values in series if _PREEMPTIONS.search(name)]
    if not usage and not preempted:
        return None
    preemptions = int(sum(values[-1][1] - values[0][1] for values in preempted))
    times = np.array(sorted({time_ns for _, values in series for time_ns, _ in values}), float)
    lasting = np.diff(times, append=times[-1:])
    waiting = _sum_over_time([values for name, values in series if _WAITING.search(name)], times)
    running = _sum_over_time([values for name, values in series if _RUNNING.search(name)], times)
    held = np.max([_over_time(values, times) for values in usage], axis=0) if usage else np.zeros(len(times))
    full = (held >= FULL) & (waiting > 0)
    total = float(lasting.sum()) or 1.0
    return KvPressure(
        full_share=float(lasting[full].sum()) / total,
        running=float(np.average(running[full], weights=lasting[full])) if lasting[full].sum() else 0.0,
        slots=slots,
        preemptions=preemptions,
        preempted_share=preemptions / max(requests, 1),
    )


_Values = list[tuple[int, float]]


def _series(metrics: pa.Table) -> list[tuple[str, _Values]]:
    """Samples during the run by name and labels, in order of time; a metric is stored when it changes."""
    found: dict[tuple[str, str], _Values] = {}
    for row in metrics.to_pylist():
        found.setdefault((row["name"], row["labels"]), []).append((max(row["time_ns"], 0), row["value"]))
    return [(name, values) for (name, _), values in found.items()]


def _over_time(values: _Values, times: Floats) -> Floats:
    """The value at each time: that of the last change."""
    place = np.searchsorted([time_ns for time_ns, _ in values], times, side="right") - 1
    numbers = np.array([value for _, value in values], float)
    return np.where(place >= 0, numbers[np.maximum(place, 0)], 0.0)


def _sum_over_time(several: list[_Values], times: Floats) -> Floats:
    return np.sum([_over_time(values, times) for values in several], axis=0) if several else np.zeros(len(times))
