"""Write what :mod:`ebbench.analysis.fidelity_runs` found: Markdown to read, Parquet to query, pictures to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbench.analysis.fidelity import REPLAY_TARGETS, THROUGHPUT, Cell, Score, comparisons, replay_scores, scores
from ebbench.devices.profiles import find_profile, list_devices

INTRODUCTION = """# Fidelity: emulated devices against published measurements

Written by `ebbench fidelity`. Every number measured by others stands beside ours. *Fitted* cells belong to rows that a
constant was fitted on; everything else is *predicted*. *Unscored* cells carry a note that says why.
Sources: Zhang et al., ICML 2026 (tables 2, 3, 13; figures 3 and 5; calibrations, weifang231/eb-vllm) and
casys-kaist/LLMServingSim (the RTX 4090 run). What a device is made of is in `NOTICE`.
"""

EXPLANATIONS = """## Where it misses, and why

- **Gains on RTX PRO 6000 (table 3).** Published v1 is slower at c = 512 than at c = 2048 (8,330 against 8,830
  tokens/s); ours is flat. With gains of 23 to 63 %, a few per cent in each throughput move the gain by 5 points.
- **EB on ShareGPT, RTX PRO 6000 and Qwen3-8B** is 24 % too fast at N = 1536 without the memory-safe batch. Published
  TPOT times requests/s leaves room for some 720 sequences in flight, ours holds 1,120: their runs kept fewer.
- **EB at c = 32 (table 3).** The published TTFT (0.09 s, 0.06 s) is that of a refill at every free slot. The published
  rule waits for `min(q, N-n)/n >= theta/(1-theta)`; with the thresholds Algorithm 1 gives it makes requests wait about
  1 s, which is what an earlier printing of the same cell shows (1.046 s on H200). That is the policy, not the device.
- **ShareGPT (table 2, figure 5).** The published lengths and the published rates exclude each other: with table 9's 280
  answer tokens our throughput would be 25 to 70 % too high on every device and model. The runs here use 400, set by
  one cell.
- **WildChat (table 2, figure 5).** Message lengths were not published, and the authors' client gives a request up after
  120 s. Not scored.
- **Figure 3, EB's point.** Stated for geometric answers, but its p99 TPOT (58, 103, 262 ms) is that of uniform answers,
  which reproduce it (rows `..., uniform`). With geometric answers no policy comes near: some requests are preempted.
  Its lead over v1 and over the fixed thresholds is then one between workloads.
- **Figure 3, latencies of fixed thresholds** were read off log-scale charts by the authors.
- **Table 13.** Neither B nor N was published: only the shape can be compared.
- **TTFT at low load.** Ours has no HTTP server, tokenizer or client in it: 20 ms are missing at c = 32.
- **Long prompts on H200 (LongBench).** Matrix products in the kernel tables are faster than in the authors' own
  calibration (21.5 against 24.9 us a prompt token): short bursts run at higher clocks than a server under load.
- **Prefill calibrations on RTX PRO 6000** are 18 % above the tables for the same reason, yet LongBench, which is
  nearly pure prefill, comes out within 5 % for Qwen3-8B: the calibration measured single prompts on an idle GPU.
"""


def write_report(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Write report.md, cells.parquet and, with the extra ``plots``, pictures. Returns the files written."""
    out.mkdir(parents=True, exist_ok=True)
    table = out / "cells.parquet"
    pq.write_table(_table(cells), table)
    written = [table, *_pictures(cells, out)]
    report = out / "report.md"
    report.write_text("\n".join(_markdown(cells, written)) + "\n", encoding="utf-8")
    return [report, *written]


def all_scores(cells: Sequence[Cell]) -> dict[str, list[Score]]:
    """Scores of the predicted cells, of the fitted ones, of both, and of the replayed run."""
    published = [cell for cell in cells if cell.source not in ("calibration", "RTX 4090 run")]
    return {
        "replayed run (nothing fitted)": replay_scores(cell for cell in cells if cell.source == "RTX 4090 run"),
        "predicted rows": scores([cell for cell in published if not cell.fitted]),
        "fitted rows": scores([cell for cell in published if cell.fitted]),
        "all rows": scores(published),
    }


def _table(cells: Iterable[Cell]) -> pa.Table:
    rows = [{**asdict(cell), "error": cell.error} for cell in cells]
    names = [*(f.name for f in fields(Cell)), "error"]
    return pa.table({name: [row[name] for row in rows] for name in names})


def _markdown(cells: Sequence[Cell], files: Iterable[Path]) -> Iterator[str]:
    yield INTRODUCTION
    yield "## Scores\n"
    yield from _score_lines(all_scores(cells))
    yield "\n## Constants\n"
    yield from _constant_lines()
    for file in files:
        if file.suffix == ".svg":
            yield f"\n![{file.stem}]({file.name})"
    yield "\n" + EXPLANATIONS
    for source in dict.fromkeys(cell.source for cell in cells):
        yield f"\n## {source}\n"
        chosen = [cell for cell in cells if cell.source == source]
        yield from _calibration_lines(chosen) if source == "calibration" else _cell_lines(chosen)
        if source in ("table 2", "table 3"):
            yield ""
            yield from _gain_lines(chosen)


def _score_lines(groups: dict[str, list[Score]]) -> Iterator[str]:
    yield "| cells | score | target | reached | count | met |"
    yield "|---|---|---|---:|---:|---|"
    for name, found in groups.items():
        for score in found:
            yield (
                f"| {name} | {score.name} | {score.target} | {score.reached:.1%} | {score.count} | "
                f"{'yes' if score.met else 'no'} |"
            )


def _constant_lines() -> Iterator[str]:
    yield "At most three a device; models without their own take the device's.\n"
    yield "| device | host a step | host a sequence | mixed excess x | source |"
    yield "|---|---:|---:|---:|---|"
    for name in list_devices():
        for model, host in find_profile(name).host.items():
            yield (
                f"| {name} ({model}) | {host.step_s * 1e3:.2f} ms | {host.sequence_s * 1e6:.1f} us | "
                f"{host.mixed_excess:.2f} | {host.source} |"
            )


def _cell_lines(cells: Sequence[Cell]) -> Iterator[str]:
    yield "| device | model | case | scheduler | metric | published | ours | error | |"
    yield "|---|---|---|---|---|---:|---:|---:|---|"
    for cell in cells:
        remark = "fitted" if cell.fitted else "" if cell.scored else f"unscored: {cell.note}"
        yield (
            f"| {cell.device} | {cell.model} | {cell.case} | {cell.scheduler} | {cell.metric} | {cell.published:.4g} | "
            f"{cell.ours:.4g} | {cell.error:+.1%} | {remark} |"
        )


def _gain_lines(cells: Sequence[Cell]) -> Iterator[str]:
    yield "| device | model | case | pair | published gain | our gain | |"
    yield "|---|---|---|---|---:|---:|---|"
    for pair in comparisons(cells):
        _, device, model, case = pair.row
        verdict = "too close" if not pair.decided else "same winner" if pair.same_winner else "**other winner**"
        yield (
            f"| {device} | {model} | {case} | {pair.second} over {pair.first} | {pair.published_gain:+.1%} | "
            f"{pair.our_gain:+.1%} | {verdict} |"
        )


def _calibration_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """One line per device, model and kind of step: the cells themselves are in the Parquet file."""
    yield "Step times of the kernel tables against the authors' fitted lines (eager mode, context 512).\n"
    yield "| device | model | step | median error | from | to | |"
    yield "|---|---|---|---:|---:|---:|---|"
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for cell in cells:
        groups.setdefault((cell.device, cell.model, cell.case.split()[0], cell.note), []).append(cell.error)
    for (device, model, kind, note), errors in groups.items():
        low, high = min(errors), max(errors)
        yield f"| {device} | {model} | {kind} | {median(errors):+.1%} | {low:+.1%} | {high:+.1%} | {note} |"


def _pictures(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Published against ours, one picture per metric; nothing without the extra ``plots``."""
    try:
        import altair
    except ImportError:
        return []
    written = []
    for name, metrics in (("throughput", THROUGHPUT), ("ttft", ("ttft_mean_s",)), ("tpot", ("tpot_mean_ms",))):
        rows = [_point(cell) for cell in cells if cell.metric in metrics and cell.scored]
        if rows:
            path = out / f"{name}.svg"
            _scatter(altair, name, rows).save(str(path))
            written.append(path)
    return written


def _point(cell: Cell) -> dict[str, Any]:
    kind = "fitted" if cell.fitted else "predicted"
    return {"published": cell.published, "ours": cell.ours, "source": cell.source, "device": cell.device, "kind": kind}


def _scatter(altair: Any, title: str, rows: list[dict[str, Any]]) -> Any:
    low = min(min(r["published"], r["ours"]) for r in rows) * 0.8
    high = max(max(r["published"], r["ours"]) for r in rows) * 1.2
    scale = altair.Scale(type="log", domain=[low, high])
    line = altair.Chart(altair.InlineData(values=[{"x": low, "y": low}, {"x": high, "y": high}])).mark_line(
        color="gray", strokeDash=[4, 4]
    )
    points = altair.Chart(altair.InlineData(values=rows)).mark_point(filled=True, size=55)
    return altair.layer(
        line.encode(x=altair.X("x:Q", scale=scale, title="published"), y=altair.Y("y:Q", scale=scale, title="ours")),
        points.encode(x="published:Q", y="ours:Q", color="source:N", shape="kind:N"),
    ).properties(title=title, width=380, height=380)


def unmet(cells: Sequence[Cell]) -> list[Score]:
    """Targets of the predicted cells and of the replayed run that were not reached."""
    found = all_scores(cells)
    return [
        score for name in ("replayed run (nothing fitted)", "predicted rows") for score in found[name] if not score.met
    ]


__all__ = ["REPLAY_TARGETS", "all_scores", "unmet", "write_report"]
