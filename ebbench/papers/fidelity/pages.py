"""The pages of the fidelity report: one per published source, with what it measured and what was fitted on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbench.errors import DataError
from ebbench.papers.fidelity.cases import WITHOUT
from ebbench.papers.fidelity.cases_gpustack import FUSED
from ebbench.papers.fidelity.scores import THROUGHPUT, PublishedFigure
from ebbench.render import palette

_EB = "Zhang et al., ICML 2026"
_SEEN = "Before the model was finished."
_NOTHING = "Nothing."


@dataclass(frozen=True)
class Page:
    """One source of measurements.

    ``slug``: name of its file. ``sources``: names of its cells' sources, up to a comma. ``measured``: what was
    measured, where, by which software. ``fitted``: which constants were set on which of its cells. ``constants``: the
    same in a few words, for the front table. ``seen``: whether its figures were known before the model was finished.
    ``notes``: name of the file of ``notes/`` that explains its errors.
    """

    slug: str
    title: str
    sources: tuple[str, ...]
    measured: str
    fitted: str = _NOTHING
    constants: str = ""
    seen: str = _SEEN
    notes: str = ""


PAGES = (
    Page(
        "rtx-4090-run",
        "One measured run on an RTX 4090",
        ("RTX 4090 run",),
        "Llama-3.1-8B on vLLM, one RTX 4090, request by request (casys-kaist/LLMServingSim).",
        "Nothing on its latencies. The memory that vLLM's context takes on this GPU is set so that the KV cache has "
        "the 41,408 tokens that this server printed.",
        seen="Before the model was finished; run in CI.",
    ),
    Page(
        "kv-cache",
        "KV cache that vLLM servers printed at their start",
        ("KV cache at the start", "KV cache in tokens"),
        "Twenty-three starts of vLLM 0.9 to 0.31 on seven GPUs, and the tokens that fifteen made of their memory, from "
        "published logs (reports/reference/kv_cache/).",
        "Bytes per logit, CUDA graphs, context and collectives, by vLLM's version, on ten starts; none of the tokens.",
        "memory that vLLM takes",
        "Collected before any was computed, but for the last. The sizes were set on the first half and then not "
        "changed, but for the second model runner's (0.25 and later), which needed three later starts. The starts of "
        "gpt-oss and Gemma 4 and all tokens were found later; weights that every GPU holds, wider experts in MXFP4, "
        "encoders, and vLLM's rule for windows before 0.26 were mended with them in view.",
        "kv-cache",
    ),
    Page(
        "iog",
        "vLLM 0.8.5 on one to eight RTX 4090, by IOG",
        ("IOG",),
        "ShareGPT at 1 to 32 requests/s on rented servers (IOG-Foundation/llm-inference-benchmarks, "
        "reports/reference/iog/).",
        seen="Held out: settings and scored metrics were committed, then all cases were run once (2026-11-24). One "
        "link was changed after that run; the notes have the first run's figures.",
        notes="iog",
    ),
    Page(
        "systalyze",
        "What one GPU carries of Qwen3-32B, by Systalyze",
        ("Systalyze",),
        "Requests/s and output tokens/s at capacity, vLLM 0.27.1 (systalyze/vllm-benchmarks, "
        "reports/reference/systalyze/). Ours are means over three draws of the arrivals.",
        seen="Held out: settings were committed, then all cases were run once (2026-11-24); nothing was changed.",
        notes="systalyze",
    ),
    Page(
        "table-3",
        "Table 3: traffic levels and non-stationary traffic",
        ("table 3",),
        f"Qwen3-8B on one GPU, 32 to 2,048 open requests and two shifts ({_EB}).",
        "The host's times per step and per sequence and the cost of mixed attention on c = 32 and 512; what the "
        "paper's servers leave for the KV cache on c = 2,048, RTX PRO 6000.",
        "host, mixed attention, KV size",
        notes="eb-paper",
    ),
    Page(
        "table-2-and-figure-5",
        "Table 2 and figure 5: real workloads",
        ("table 2", "figure 5"),
        f"ShareGPT, LongBench, NuminaMath and WildChat on one GPU: throughput and latencies ({_EB}).",
        "Arithmetic of matrix products x 1.10 on LongBench, Qwen3-8B, H200; the API server's time per token on "
        "ShareGPT, H200 (only with the API server).",
        "matrix products, API server",
        notes="eb-paper",
    ),
    Page(
        "figure-3",
        "Figure 3: fixed thresholds against the controller",
        ("figure 3",),
        f"Three synthetic mixes with geometric answers on one H200 ({_EB}; numbers of weifang231/eb-vllm).",
        "Arithmetic of matrix products x 1.10 on the prefill-heavy mix.",
        "matrix products",
        notes="eb-paper",
    ),
    Page(
        "figure-4",
        "Figure 4: three synthetic mixes at the best settings",
        ("figure 4",),
        f"Qwen3-8B, 2,048 open requests, each scheduler at its best B and N ({_EB}; numbers of the authors' plot "
        "script).",
        seen="Bars had been drawn beside marks read off the chart; the numbers were compared first on 2026-11-25.",
        notes="eb-paper",
    ),
    Page(
        "table-13",
        "Table 13: throughput over fixed thresholds",
        ("table 13",),
        f"ShareGPT on one RTX PRO 6000 ({_EB}). B and N were not published: compare the shape only.",
        notes="eb-paper",
    ),
    Page(
        "table-6",
        "Table 6: prompts of 128K tokens",
        ("table 6",),
        f"Six models of 4B to 30B, 3 or 4 open requests, one RTX PRO 6000 ({_EB}).",
        seen="Held out: settings were committed before the first run (2026-11-25); nothing was changed.",
        notes="eb-paper",
    ),
    Page(
        "silicon",
        "Tensor-parallel servers of aiconfigurator-core's sample",
        ("silicon",),
        "Qwen3-32B in 16 bits on two to eight H100, vLLM 0.12 (`silicon_sample.csv`). The engine arguments are "
        "unknown, and TTFT is defined differently by source: TPOT counts. The sample's Llama-3.1-70B in FP8 are runs "
        "of [InferenceX](inferencex.md) and stand there, with their settings.",
        "What an H100's host takes more with several GPUs, per step and per sequence, on 15 points: Qwen3-32B, tp = 4, "
        "1,024 tokens in.",
        "host of several H100",
        notes="silicon",
    ),
    Page(
        "inferencex",
        "InferenceX: 70B, gpt-oss and MiniMax on H100, H200 and B200",
        ("InferenceX",),
        "Closed loops of 4 to 256 requests on vLLM 0.10 to 0.22, tensor and expert parallel, every second published "
        "run (SemiAnalysisAI, reports/reference/servers/).",
        "No constant. With these rows in view it was chosen that an FP8 cache decodes no faster than one in 16 bits on "
        "Hopper, that collectives take their lower envelope, and that gpt-oss computes in MXFP8 on B200.",
        seen="Its H100 and H200 runs of Llama-3.3-70B had been part of the silicon sample, with wrong settings. "
        "Settings were committed with the figures of the model as it was; those and what was changed then stand in the "
        "notes.",
        notes="servers",
    ),
    Page(
        "inference-perf",
        "inference-perf: Llama-3.1-8B on one H100 from idle to overload",
        ("inference-perf",),
        "1 to 254 requests/s of 203 tokens in and 64 out over 440 connections, vLLM 0.11, with and without a common "
        "prefix (kubernetes-sigs/inference-perf, KubeCon NA 2025; reports/reference/servers/).",
        seen="Settings were committed with the figures of the model as it was; the notes have them.",
        notes="servers",
    ),
    Page(
        "llmservingsim",
        "LLMServingSim: three runs on RTX PRO 6000",
        ("LLMServingSim",),
        "300 ShareGPT requests at their recorded times on vLLM 0.19: one GPU, two with tp = 2, two with expert "
        "parallelism (casys-kaist/LLMServingSim, reports/reference/servers/).",
        seen="Held out: repeated with the source's arguments; nothing was changed.",
    ),
    Page(
        "table-17",
        "Table 17: Gemma-3-1B-IT",
        ("table 17",),
        f"Real workloads on a small model, where the API server limits ({_EB}).",
        seen="Before the model was finished; NuminaMath was left out after it had been seen.",
        notes="table-17",
    ),
    Page(
        "table-19",
        "Table 19: two GPUs",
        ("table 19",),
        f"Data parallelism in lockstep and one prefill with one decode GPU, Qwen3-8B ({_EB}).",
        "Nothing. The margin of EB+ on RTX PRO 6000 and 4,000 requests at 2,048 open are inferred with the print in "
        "view.",
        seen="With other settings first; those of the authors' scripts since 2026-11-25.",
        notes="tables-19-and-20",
    ),
    Page(
        "table-20",
        "Table 20: four GPUs",
        ("table 20",),
        f"Data parallelism in lockstep and pools of prefill and decode GPUs, Qwen3-8B ({_EB}).",
        "The KV connector's 0.12 ms per layer and prompt on its prefill pools.",
        "KV connector",
        "With other settings first; those of the authors' scripts since 2026-11-25.",
        "tables-19-and-20",
    ),
    Page(
        "authors-repetition",
        "The authors' own repetition on H200",
        ("authors' repetition",),
        "What the authors of the EB paper measured when they ran its H200 experiments again in May 2026 "
        "(reports/reference/eb_repetition/).",
        "Nothing on these figures. Counted as fitted are rows on whose printed counterpart a constant was fitted.",
        "as of the printed rows",
        "Held out: settings were committed, then all cases were run once (2026-11-25). What the paper itself prints "
        "from it was then taken out.",
        "repetition",
    ),
    Page(
        "gpustack",
        "vLLM 0.9 to 0.11 on A100, H100 and RTX 4090, by GPUStack",
        ("GPUStack",),
        "`vllm bench serve` with random prompts and ShareGPT (GPUStack's performance lab, "
        "reports/reference/gpustack/). *Fused sampler*: servers with vLLM 0.11, with the KV cache that FlashInfer's "
        "sampler leaves, which 0.11 takes if told to.",
        seen="Held out: settings were committed, then all cases were run once (2026-11-23; A100: 2026-11-24). Two "
        "settings were corrected and KV caches sized anew; the notes have the first run's figures.",
        notes="gpustack",
    ),
    Page(
        "calibration",
        "The authors' calibrations of single steps",
        ("calibration",),
        "Step times of the kernel tables against the lines that the EB paper's authors fitted (eager mode, context "
        "512).",
        notes="eb-paper",
    ),
)


def is_variant(source: str) -> bool:
    """Whether the source's cases are those of another one under other settings."""
    return source.endswith((WITHOUT, FUSED))


def source_page(source: str) -> Page:
    """The page on which a cell's source stands. Raises DataError for a source without one."""
    name = source.split(",")[0]
    for page in PAGES:
        if name in page.sources:
            return page
    raise DataError(f"{source}: this source has no page in ebbench/papers/fidelity/pages.py")


# The pictures of the fidelity report: our figures over published ones.


def pictures(cells: Sequence[PublishedFigure], out: Path) -> list[Path]:
    """Write our results over published ones, one picture per metric; returns the files."""
    from ebbench.render.figures import altair, save_chart

    alt, written = altair(), []
    for name, metrics, title in PICTURES:
        rows = [
            _point(cell) for cell in cells if cell.metric in metrics and cell.scored and not is_variant(cell.source)
        ]
        if rows:
            path = out / f"{name}.svg"
            save_chart((_errors if name == "throughput" else _scatter)(alt, title, rows), path)
            written.append(path)
    return written


PICTURES = (
    ("throughput", THROUGHPUT, "Throughput (requests/s, tokens/s)"),
    ("ttft", ("ttft_mean_s",), "Mean TTFT, seconds"),
    ("tpot", ("tpot_mean_ms",), "Mean TPOT, milliseconds"),
)
SOURCES = ("table 3", "table 2", "figure 5", "figure 3", "RTX 4090 run")  # the same colours in every picture


def _point(cell: PublishedFigure) -> dict[str, Any]:
    kind = "fitted" if cell.fitted else "predicted"
    return {
        "published": cell.published, "ours": cell.ours, "error": cell.error,
        "source": cell.source, "device": cell.device, "kind": kind,
    }  # fmt: skip


def _scale(altair: Any, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Any:
    """A logarithmic scale that covers the values."""
    values = [row[name] for row in rows for name in names]
    return altair.Scale(type="log", domain=[min(values) * 0.8, max(values) * 1.2], nice=False)


def _marks(altair: Any, rows: list[dict[str, Any]], y: Any, x: Any) -> Any:
    shown = [name for name in SOURCES if any(row["source"] == name for row in rows)]
    others = sorted({row["source"] for row in rows} - set(SOURCES))
    colours = dict(zip(SOURCES, PALETTE, strict=True))
    return (
        altair.Chart(altair.InlineData(values=rows))
        .mark_point(filled=True, size=55, opacity=0.75)
        .encode(
            x=x,
            y=y,
            color=altair.Color(
                "source:N",
                scale=altair.Scale(domain=shown + others, range=[colours.get(n, palette.GREY) for n in shown + others]),
            ),
            shape=altair.Shape("kind:N", scale=altair.Scale(domain=["predicted", "fitted"], range=["circle", "cross"])),
        )
    )


PALETTE = (palette.BLUE, palette.VERMILION, palette.GREEN, palette.PURPLE, palette.BLACK)


def _scatter(altair: Any, title: str, rows: list[dict[str, Any]]) -> Any:
    """Our values over published ones; both are equal on the dashed line."""
    scale = _scale(altair, rows, ("published", "ours"))
    ends = [{"x": v, "y": v} for v in scale["domain"]]
    axis = altair.Axis(grid=False, format=",~g", tickCount=6)
    line = altair.Chart(altair.InlineData(values=ends)).mark_line(color="gray", strokeDash=[4, 4])
    x = altair.X("published:Q", scale=scale, axis=axis, title="published")
    y = altair.Y("ours:Q", scale=scale, axis=axis, title="ours")
    marks = _marks(altair, rows, y, x)
    return altair.layer(line.encode(x="x:Q", y="y:Q"), marks).properties(title=title, width=380, height=380)


def _errors(altair: Any, title: str, rows: list[dict[str, Any]]) -> Any:
    """Relative error over the published value; the band is the target for the median."""
    scale = _scale(altair, rows, ("published",))
    low, high = scale["domain"]
    area = altair.Chart(altair.InlineData(values=[{"from": low, "to": high, "below": -0.1, "above": 0.1}]))
    band = area.mark_rect(color="gray", opacity=0.15).encode(x="from:Q", x2="to:Q", y="below:Q", y2="above:Q")
    x = altair.X("published:Q", scale=scale, axis=altair.Axis(grid=False, format=",~g", tickCount=6), title="published")
    y = altair.Y("error:Q", axis=altair.Axis(format="+.0%"), title="ours against published")
    return altair.layer(band, _marks(altair, rows, y, x)).properties(title=title, width=520, height=320)
