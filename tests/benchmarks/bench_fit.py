"""How close workloads that were fitted to logs come to the replayed logs, simulated.

    python tests/benchmarks/bench_fit.py FOLDER             # the traces of reference/traces; some 15 CPU minutes
    python tests/benchmarks/bench_fit.py FOLDER --only code --jobs 2
    python tests/benchmarks/bench_fit.py FOLDER --only code --windows --jobs 2   # other cuts of the trace

Each trace is cut into halves of equally many requests. A workload is fitted to a half and simulated with several seeds,
and its mean figures are compared with the replay of the same half; then the workload and the replay of the first half
with the replay of the second. Prints the tables of docs/own-traffic.md.

A replay has no seed, but its figures also depend on chance: which requests met in a burst. The last columns show how
much, as the standard deviation of the replays of resampled logs: stretches of 128 successive requests, with their gaps,
in random order with repetition (a circular block bootstrap). Logs with shared prefixes are not resampled, since a
repeated stretch would find its own prompts in the cache.

``--windows`` asks whether an error is of the fit or of one cut of the trace: windows of half and of a quarter of the
trace, each fitted and replayed, and replayed with gaps dealt anew within each two successive requests. Of TPOT it
prints the changes at several percentiles and the percentile of the replay at which the other's median lies.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.config.topology import parse_topology
from ebbench.devices import load_device
from ebbench.dispatch import parse_dispatch
from ebbench.engines.base import EngineOptions
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.workloads import build_plan
from ebbench.workloads.fit_log import as_toml, fit_workload
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

Floats = npt.NDArray[np.float64]
DEVICE = ("h200", "qwen3-8b")
STRETCH, RESAMPLED = 128, 24
LONGEST = 131_072  # max_model_len; Mooncake has prompts of up to 126,000 tokens
HEADER = ("output tok/s", "TTFT median", "TTFT mean", "TPOT median", "TPOT mean")


@dataclass(frozen=True)
class Log:
    """A trace file, the seeds of the workload fitted to it, and its GPUs."""

    name: str
    file: str
    seeds: int
    gpus: int = 1


LOGS = (
    Log("code", "AzureLLMInferenceTrace_code.csv", 24),
    Log("conversation", "AzureLLMInferenceTrace_conv.csv", 8),
    Log("mooncake", "mooncake_conversation_trace.jsonl", 3, gpus=6),
)


def halves(path: Path, folder: Path) -> list[Path]:
    """The halves of a trace as files of their own."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header = lines[:1] if path.suffix == ".csv" else []
    rows = lines[len(header) :]
    found = [folder / f"{part}-{path.name}" for part in ("first", "second")]
    for out, part in zip(found, (rows[: len(rows) // 2], rows[len(rows) // 2 :]), strict=True):
        out.write_text("".join(header + part), encoding="utf-8")
    return found


def figures(plan: Plan, gpus: int) -> Floats:
    """Output tokens/s, then TTFT and TPOT (ms), median and mean each, under vLLM's own scheduler."""
    engine = SimEngine(requests_only=True)
    if gpus > 1:
        engine = SimEngine(parse_topology(f"dp={gpus}"), parse_dispatch("least-outstanding"), requests_only=True)
    result = engine.run(plan, parse_policy("v1"), load_device(*DEVICE), EngineOptions(max_model_len=LONGEST))
    assert not result.invalid, result.invalid
    names = ("intended_ns", "first_token_ns", "last_token_ns", "output_tokens")
    intended, first, last, tokens = (np.asarray(result.requests[name]) for name in names)
    ttft_ms = (first - intended) / 1e6
    tpot_ms = ((last - first) / 1e6)[tokens > 1] / (tokens[tokens > 1] - 1)
    rate = tokens.sum() / ((last.max() - intended.min()) / 1e9)
    return np.array([rate, np.median(ttft_ms), ttft_ms.mean(), np.median(tpot_ms), tpot_ms.mean()])


PERCENTILES = (40, 50, 60, 75)
WINDOWS = (*((k / 8, k / 8 + 0.5) for k in range(5)), *((k / 4, k / 4 + 0.25) for k in range(4)))
WINDOW_SEEDS = 8


def window_tpots(workload: str, seed: int, shuffled: int = 1) -> Floats:
    """TPOT (ms) of a workload's requests; ``shuffled``: gaps are dealt anew within so many successive requests."""
    plan = build_plan(workload, seed=seed, with_text=False)
    times = plan.table["arrival_ns"].to_numpy()
    order = np.lexsort((np.random.default_rng(seed).random(len(times)), np.arange(len(times)) // shuffled))
    column = pa.array(np.cumsum(np.diff(times, prepend=times[0])[order]), plan.table.schema.field("arrival_ns").type)
    table = plan.table.set_column(plan.table.schema.get_field_index("arrival_ns"), "arrival_ns", column)
    options = EngineOptions(max_model_len=LONGEST)
    engine = SimEngine(requests_only=True)
    result = engine.run(replace(plan, table=table), parse_policy("v1"), load_device(*DEVICE), options)
    first, last, tokens = (np.asarray(result.requests[x]) for x in ("first_token_ns", "last_token_ns", "output_tokens"))
    found: Floats = ((last - first) / 1e6)[tokens > 1] / (tokens[tokens > 1] - 1)
    return found


def measure_windows(log: Log, path: Path, folder: Path, pool: ProcessPoolExecutor) -> None:
    """Print TPOT of the fitted workload and of slightly shuffled replays against the replay, per window."""
    header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    print(f"| window | | {' | '.join(f'p{one}' for one in PERCENTILES)} | mean | its median is the replay's |")
    for begin, end in WINDOWS:
        part = folder / f"window-{begin}-{end}.csv"
        part.write_text(header + "".join(rows[round(begin * len(rows)) : round(end * len(rows))]), encoding="utf-8")
        toml = part.with_suffix(".toml")
        toml.write_text(as_toml(fit_workload(read_trace(part), "window"), part.name), encoding="utf-8")
        base = window_tpots(f"log:{part}", 0)
        for name, workload, shuffled in (("fitted", str(toml), 1), ("gaps of two dealt anew", f"log:{part}", 2)):
            runs = [pool.submit(window_tpots, workload, seed, shuffled) for seed in range(WINDOW_SEEDS)]
            drawn = [run.result() for run in runs]
            found = [np.append(np.percentile(one, PERCENTILES), one.mean()) for one in drawn]
            ranks = [100 * (base < np.median(one)).mean() for one in drawn]
            text = changes(found, np.append(np.percentile(base, PERCENTILES), base.mean()))
            print(f"| {begin:.3f} to {end:.3f} | {name} | {text} | {np.mean(ranks):.1f}th |", flush=True)


def simulate(workload: str, gpus: int, seed: int) -> Floats:
    """Figures of a workload with a seed."""
    return figures(build_plan(workload, seed=seed, with_text=False), gpus)


def resample(workload: str, gpus: int, seed: int) -> Floats:
    """Figures of a log resampled in stretches."""
    plan = build_plan(workload, with_text=False)
    times = plan.table["arrival_ns"].to_numpy()
    n = len(times)
    starts = np.random.default_rng(seed).integers(0, n, -(-n // STRETCH))
    rows = ((starts[:, None] + np.arange(STRETCH)) % n).ravel()[:n]
    gaps = np.diff(times, prepend=times[0] - int(np.diff(times).mean()))
    table = plan.table.take(pa.array(rows))
    for name, values in (("arrival_ns", np.cumsum(gaps[rows])), ("request_id", None), ("session", np.arange(n))):
        column = plan.table[name] if values is None else pa.array(values, plan.table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), plan.table.schema.field(name), column)
    return figures(replace(plan, table=table), gpus)


def changes(found: Sequence[Floats], base: Floats) -> str:
    """Mean change against ``base`` with its standard error, as cells of a row."""
    change = (np.array(found) / base - 1) * 100
    error = change.std(axis=0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.zeros(len(base))
    return " | ".join(
        f"{a:+.1f} ± {b:.1f} %" if b else f"{a:+.1f} %" for a, b in zip(change.mean(0), error, strict=True)
    )


def spread(found: Sequence[Floats], base: Floats) -> str:
    """Standard deviation in percent of ``base``, as cells of a row."""
    return " | ".join(f"{one:.0f} %" for one in np.array(found).std(axis=0, ddof=1) / base * 100)


def measure(log: Log, path: Path, folder: Path, pool: ProcessPoolExecutor) -> None:
    """Print the rows of one trace."""
    files = halves(path, folder)
    fitted = [folder / f"{file.stem}.toml" for file in files]
    for file, toml in zip(files, fitted, strict=True):
        toml.write_text(as_toml(fit_workload(read_trace(file), toml.stem), file.name), encoding="utf-8")
    replays = [pool.submit(simulate, f"log:{file}", log.gpus, 0) for file in files]
    drawn = [[pool.submit(simulate, str(toml), log.gpus, seed) for seed in range(log.seeds)] for toml in fitted]
    prefixes = read_trace(path).requests.hash_ids is not None
    seeds = range(0 if prefixes else RESAMPLED)
    chance = [[pool.submit(resample, f"log:{file}", log.gpus, seed) for seed in seeds] for file in files]
    bases = [one.result() for one in replays]
    for part, base, runs, resampled in zip(("first", "second"), bases, drawn, chance, strict=True):
        figures_text = ", ".join(f"{one:.4g}" for one in base)
        print(f"| {log.name} | {part} | {changes([one.result() for one in runs], base)} |", flush=True)
        if resampled:
            print(f"| | chance of the replay | {spread([one.result() for one in resampled], base)} |", flush=True)
        print(f"  (replay: {figures_text})", flush=True)
    print(
        f"| {log.name}: fitted to first, against second | | {changes([one.result() for one in drawn[0]], bases[1])} |"
    )
    print(f"| {log.name}: first, against second | | {changes([bases[0]], bases[1])} |", flush=True)


def main() -> None:
    """Measure all traces, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the Azure and Mooncake traces")
    parser.add_argument("--only", choices=[log.name for log in LOGS], help="one trace")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--windows", action="store_true", help="TPOT of other cuts of one trace without prefixes")
    asked = parser.parse_args()
    if asked.windows:
        log = next(log for log in LOGS if log.name == (asked.only or "code"))
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.jobs) as pool:
            measure_windows(log, asked.folder / log.file, Path(folder), pool)
        return
    print(f"| trace | half | {' | '.join(HEADER)} |")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.jobs) as pool:
        for log in LOGS:
            if asked.only in (None, log.name):
                measure(log, asked.folder / log.file, Path(folder), pool)


if __name__ == "__main__":
    main()
