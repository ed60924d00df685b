"""How close workloads that were fitted to logs come to the replayed logs, simulated.

    python tests/benchmarks/bench_fit.py FOLDER             # the traces of reference/traces; some 15 CPU minutes
    python tests/benchmarks/bench_fit.py FOLDER --only code --jobs 2
    python tests/benchmarks/bench_fit.py FOLDER --device rtx-pro-6000 --gpus 16  # another GPU; 16 of them for Mooncake
    python tests/benchmarks/bench_fit.py FOLDER --only code --windows --jobs 2   # other cuts of it; some 10 CPU minutes

Each trace is cut into halves of equally many requests. A workload is fitted to a half and simulated with several seeds,
and its mean figures are compared with the replay of the same half; then the workload and the replay of the first half
with the replay of the second. Prints the tables of reports/fit.md.

A replay has no seed, but its figures also depend on chance: which requests met in a burst. The last columns show how
much, as the standard deviation of the replays of resampled logs: stretches of 128 successive requests, with their gaps,
in random order with repetition (a circular block bootstrap). Logs with shared prefixes are not resampled, since a
repeated stretch would find its own prompts in the cache.

``--windows`` asks whether an error is of the fit or of one cut of the trace: its halves, quarters and eighths, and cuts
between them, each fitted and replayed. Beside them replays whose gaps are dealt anew within each eight successive
requests, and so dealt that each eight keep their centre; replays whose requests are dealt anew to the times of each
eight, or each two, successive ones; and replays whose arrivals are moved by up to 50 ms. It prints the share of the
seeds whose figure is below the replay's, and the root mean square of the errors over the windows of each half.
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
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from ebbench.traffic.arrivals import order_centred, stretch_centres
from ebbench.workloads import build_plan
from ebbench.workloads.fit_log import as_toml, fit_workload
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

Floats = npt.NDArray[np.float64]
DEVICE, MODEL = "h200", "qwen3-8b"
STRETCH, RESAMPLED = 128, 24
LONGEST = 131_072  # max_model_len; Mooncake has prompts of up to 126,000 tokens
HEADER = ("output tok/s", "TTFT median", "TTFT p75", "TTFT mean", "TPOT median", "TPOT p75", "TPOT mean")


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


def figures(plan: Plan, gpus: int, device: str = DEVICE) -> Floats:
    """Output tokens/s, then TTFT and TPOT (ms), median, p75 and mean each, under vLLM's own scheduler."""
    engine = SimEngine(figures_only=True)
    if gpus > 1:
        engine = SimEngine(parse_topology(f"dp={gpus}"), "least-outstanding", figures_only=True)
    result = engine.run(plan, parse_policy("v1"), load_device(device, MODEL), EngineOptions(max_model_len=LONGEST))
    assert not result.invalid, result.invalid
    names = ("intended_ns", "first_token_ns", "last_token_ns", "output_tokens")
    intended, first, last, tokens = (np.asarray(result.requests[name]) for name in names)
    ttft_ms = (first - intended) / 1e6
    tpot_ms = ((last - first) / 1e6)[tokens > 1] / (tokens[tokens > 1] - 1)
    rate = tokens.sum() / ((last.max() - intended.min()) / 1e9)
    times = [figure for one in (ttft_ms, tpot_ms) for figure in (*np.percentile(one, [50, 75]), one.mean())]
    return np.array([rate, *times])


CUTS = ((0, 4), (0, 2), (1, 3), (2, 4), (0, 1), (1, 2), (2, 3), (3, 4))
"""Windows of the first half, in eighths of the trace; those of the second begin and end four later."""
GROUP = 8
CLOCK_S = 0.1
"""Period of the clock by which the senders of the Azure code trace work."""


def deal_requests(workload: str, seed: int, group: int) -> Floats:
    """Figures of a log whose requests are dealt anew to the times of each ``group`` successive ones."""
    plan, rng = build_plan(workload, with_text=False), np.random.default_rng(seed)
    rows, table = np.lexsort((rng.random(len(plan)), np.arange(len(plan)) // group)), plan.table
    for name in ("input_tokens", "output_tokens"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), table[name].take(pa.array(rows)))
    return figures(replace(plan, table=table), 1)


def deal(workload: str, seed: int, centred: bool) -> Floats:
    """Figures of a log whose gaps are dealt anew within each eight; ``centred``: they keep their centre."""
    plan, rng = build_plan(workload, with_text=False), np.random.default_rng(seed)
    times = plan.table["arrival_ns"].to_numpy()
    gaps = np.diff(times, prepend=times[0]).astype(np.float64)
    eight = np.arange(len(gaps)) // GROUP
    dealt = gaps[np.lexsort((rng.random(len(gaps)), eight))]
    if centred:
        dealt = dealt[order_centred(eight, dealt, stretch_centres(eight, gaps), rng)]
    return figures(_at(plan, np.cumsum(dealt)), 1)


def blur(workload: str, seed: int) -> Floats:
    """Figures of a log whose arrivals are moved by up to half the period of its clock; requests stay in order."""
    plan, rng = build_plan(workload, with_text=False), np.random.default_rng(seed)
    times_ns = plan.table["arrival_ns"].to_numpy()
    moved_ns = np.sort(times_ns + rng.uniform(-0.5, 0.5, len(plan)) * CLOCK_S * 1e9)
    return figures(_at(plan, moved_ns - moved_ns[0]), 1)


def _at(plan: Plan, arrival_ns: Floats) -> Plan:
    """The requests of the plan in their order, at other times."""
    field, place = plan.table.schema.field("arrival_ns"), plan.table.schema.get_field_index("arrival_ns")
    column = pa.array(arrival_ns.astype(np.int64), field.type)
    return replace(plan, table=plan.table.set_column(place, field, column))


def measure_windows(log: Log, path: Path, folder: Path, pool: ProcessPoolExecutor) -> None:
    """Print the figures of the fitted workload and of replays with other gaps against the replay, per window."""
    header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    print(f"| window, in eighths | | {' | '.join(HEADER)} |")
    for half in (0, 4):
        errors: dict[str, list[Floats]] = {}
        for begin, end in ((half + begin, half + end) for begin, end in CUTS):
            part = folder / f"window-{begin}-{end}.csv"
            cut = rows[round(begin / 8 * len(rows)) : round(end / 8 * len(rows))]
            part.write_text(header + "".join(cut), encoding="utf-8")
            toml, replayed, seeds = part.with_suffix(".toml"), f"log:{part}", range(log.seeds)
            toml.write_text(as_toml(fit_workload(read_trace(part), "window"), part.name), encoding="utf-8")
            runs = {
                "fitted": [pool.submit(simulate, str(toml), 1, seed) for seed in seeds],
                "gaps of eight dealt": [pool.submit(deal, replayed, seed, False) for seed in seeds],
                "with their centre": [pool.submit(deal, replayed, seed, True) for seed in seeds],
                "requests of eight dealt": [pool.submit(deal_requests, replayed, seed, GROUP) for seed in seeds],
                "arrivals blurred": [pool.submit(blur, replayed, seed) for seed in seeds],
                "requests of two dealt": [pool.submit(deal_requests, replayed, seed, 2) for seed in seeds],
            }
            base = simulate(replayed, 1, 0)
            for name, found in ((name, [run.result() for run in each]) for name, each in runs.items()):
                print(f"| {begin} to {end} | {name} | {changes(found, base)} |", flush=True)
                below = " | ".join(f"{one:.0f} %" for one in (np.array(found) < base).mean(axis=0) * 100)
                print(f"| | of its seeds below the replay | {below} |", flush=True)
                errors.setdefault(name, []).append(np.mean(found, axis=0) / base - 1)
        for name, each in errors.items():
            text = " | ".join(f"{one:.1f} %" for one in np.sqrt(np.mean(np.square(each), axis=0)) * 100)
            print(f"| {half} to {half + 4}, root mean square | {name} | {text} |", flush=True)


def simulate(workload: str, gpus: int, seed: int, device: str = DEVICE) -> Floats:
    """Figures of a workload with a seed."""
    return figures(build_plan(workload, seed=seed, with_text=False), gpus, device)


def resample(workload: str, gpus: int, seed: int, device: str) -> Floats:
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
    return figures(replace(plan, table=table), gpus, device)


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


def measure(log: Log, path: Path, folder: Path, pool: ProcessPoolExecutor, device: str) -> None:
    """Print the rows of one trace."""
    files = halves(path, folder)
    fitted = [folder / f"{file.stem}.toml" for file in files]
    for file, toml in zip(files, fitted, strict=True):
        toml.write_text(as_toml(fit_workload(read_trace(file), toml.stem), file.name), encoding="utf-8")
    replays = [pool.submit(simulate, f"log:{file}", log.gpus, 0, device) for file in files]
    drawn = [[pool.submit(simulate, str(toml), log.gpus, seed, device) for seed in range(log.seeds)] for toml in fitted]
    prefixes = read_trace(path).requests.hash_ids is not None
    seeds = range(0 if prefixes else RESAMPLED)
    chance = [[pool.submit(resample, f"log:{file}", log.gpus, seed, device) for seed in seeds] for file in files]
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
    parser.add_argument("--windows", action="store_true", help="other cuts of one trace without prefixes")
    parser.add_argument("--device", default=DEVICE, help="the simulated GPU (not with --windows)")
    parser.add_argument("--gpus", type=int, help="GPUs of the traces that take several")
    asked = parser.parse_args()
    if asked.windows:
        if (asked.device, asked.gpus) != (DEVICE, None):
            parser.error("--windows is simulated on one " + DEVICE)
        log = next(log for log in LOGS if log.name == (asked.only or "code"))
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.jobs) as pool:
            measure_windows(log, asked.folder / log.file, Path(folder), pool)
        return
    print(f"| trace | half | {' | '.join(HEADER)} |")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.jobs) as pool:
        for log in LOGS:
            if asked.only in (None, log.name):
                several = replace(log, gpus=asked.gpus or log.gpus) if log.gpus > 1 else log
                measure(several, asked.folder / log.file, Path(folder), pool, asked.device)


if __name__ == "__main__":
    main()
