"""What a full KV cache cost a run: requests that waited for memory, and preempted ones that were computed again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.manifest import Manifest
from ebbench.records.run import Run

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


def kv_pressure(run: Run) -> KvPressure | None:
    """By the recorded steps, else by the server's metrics; None without both."""
    if run.manifest.rows.get("steps"):
        return _of_steps(run)
    if run.manifest.rows.get("server_metrics"):
        return _of_metrics(run.table("server_metrics"), run.manifest)
    return None


def _of_steps(run: Run) -> KvPressure:
    table = run.table("steps", STEP_COLUMNS)
    steps = {name: table.column(name).to_numpy() for name in STEP_COLUMNS}
    requests = run.table("requests", ["input_tokens", "cached_tokens", "status"])
    prompts = requests.filter(pc.equal(requests["status"], "ok"))["input_tokens"]
    spent = (steps["end_ns"] - steps["start_ns"]).astype(np.float64)
    total = float(spent.sum()) or 1.0
    slots = run.manifest.options.get("max_num_active_seqs") or run.manifest.options.get("max_num_seqs")
    full = _waits_for_memory(steps, slots, run.manifest, pc.quantile(prompts, 0.5)[0].as_py() or 0)
    preemptions = int(steps["preemptions"].sum())
    repeated = _repeated_tokens(steps, requests) if preemptions else 0
    computed = int(steps["prefill_tokens"].sum())
    tokens = np.maximum(steps["prefill_tokens"] + steps["decode_seqs"], 1)
    prefilling = float((spent * steps["prefill_tokens"] / tokens).sum()) / total
    return KvPressure(
        full_share=float(spent[full].sum()) / total,
        running=float(np.average(steps["running"][full], weights=spent[full])) if spent[full].sum() else 0.0,
        slots=slots,
        preemptions=preemptions,
        preempted_share=preemptions / max(requests.num_rows, 1),
        repeated_tokens=repeated,
        repeated_share=prefilling * repeated / computed if computed else 0.0,
    )


def _waits_for_memory(
    steps: Mapping[str, npt.NDArray[np.int64]], slots: int | None, manifest: Manifest, prompt_tokens: float
) -> npt.NDArray[np.bool_]:
    """Steps in which requests waited, slots were free, and the free blocks held no prompt of the median length."""
    free_tokens = (steps["kv_blocks_total"] - steps["kv_blocks_used"]) * int(manifest.options.get("block_size") or 1)
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


def _of_metrics(metrics: pa.Table, manifest: Manifest) -> KvPressure | None:
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
        slots=manifest.options.get("max_num_seqs"),
        preemptions=preemptions,
        preempted_share=preemptions / max(manifest.rows.get("requests", 0), 1),
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
